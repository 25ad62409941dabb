"""Do the rules for fast plain XLA on CPUs still hold? Each as a good and a bad way to do a thing.

    python -m benchmarks.xla_cpu_rules [--only 1 4 7] [--rounds 5] [--output FILE.json]

forge-jax's plain form is written by these rules (docs/architecture.md); run this after a new jax. A
rule *holds* where the bad way takes at least 1.5 times as long. Takes about two minutes; nothing
else should run meanwhile. CPU only.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from benchmarks import report as reports
from benchmarks.interleaved import median_seconds
from forge_kernels.sampling import filter_threshold
from forge_serve.bench import machine

HOLDS = 1.5
RNG = np.random.default_rng(0)
Step = Callable[[], Any]


@dataclass(frozen=True)
class Pair:
    """Two ways to compute one thing, and which the rule says is fast."""

    rule: str
    good: str
    bad: str
    fast: Step
    slow: Step


def main() -> int:
    parser = argparse.ArgumentParser(description="Do the rules for plain XLA on CPUs still hold?")
    parser.add_argument("--only", nargs="+", help="numbers of rules, or parts of their names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the report here as JSON")
    args = parser.parse_args()
    if jax.default_backend() != "cpu":
        print("these rules are about CPUs: set JAX_PLATFORMS=cpu", file=sys.stderr)
        return 1
    rules = []
    for make in PAIRS:
        title = make.__doc__ or ""
        if args.only and not any(word in title for word in args.only):
            continue
        for pair in make():
            rules.append(measure(title, pair, args.rounds))
            print(line(rules[-1]), file=sys.stderr)
    report = {"benchmark": "xla_cpu_rules", **machine.describe(), "rules": rules}
    print(table(report))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def measure(rule: str, pair: Pair, rounds: int) -> dict[str, Any]:
    times = median_seconds({"good": pair.fast, "bad": pair.slow}, rounds)
    ratio = times["bad"] / times["good"]
    return {
        "rule": rule,
        "what": pair.rule,
        "good": pair.good,
        "bad": pair.bad,
        "good_ms": 1e3 * times["good"],
        "bad_ms": 1e3 * times["bad"],
        "ratio": ratio,
        "holds": ratio >= HOLDS,
    }


def line(rule: dict[str, Any]) -> str:
    return (
        f"| {rule['what']} | {rule['good']} | {rule['good_ms']:.3g} | {rule['bad']} | "
        f"{rule['bad_ms']:.3g} | {rule['ratio']:.1f} | {'yes' if rule['holds'] else 'NO'} |"
    )


def table(report: dict[str, Any]) -> str:
    lines = [reports.heading(report), ""]
    lines += [
        "| rule | good | ms | bad | ms | bad / good | holds |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [line(rule) for rule in report["rules"]])


# ---- arrays -------------------------------------------------------------------------------------


def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape, np.float32), dtype)


def small_int(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.integers(-127, 128, shape), jnp.int8)


def call(function: Callable[..., Any], *arrays: Any) -> Step:
    compiled = jax.jit(function)
    return lambda: compiled(*arrays)


def in_place(function: Callable[..., jax.Array], state: jax.Array, *arrays: Any) -> Step:
    """A function that updates a donated array, over and over."""
    compiled, held = jax.jit(function, donate_argnums=0), [state]

    def step() -> jax.Array:
        held[0] = compiled(held[0], *arrays)
        return held[0]

    return step


def dot(x: jax.Array, w: jax.Array, x_axis: int, w_axis: int, dtype: Any) -> jax.Array:
    return lax.dot_general(x, w, (((x_axis,), (w_axis,)), ((), ())), preferred_element_type=dtype)


# ---- the rules ----------------------------------------------------------------------------------

K, N, ROWS = 2048, 5632, 16  # one matrix of TinyLlama-1.1B's MLP


def matrices() -> Iterator[Pair]:
    """1: how matrices lie, and of which type results are"""
    x, w = normal(ROWS, K), normal(N, K)
    transposed = jnp.asarray(np.asarray(w).T)
    good = call(lambda x, w: dot(x, w, 1, 1, jnp.float32), x, w)
    form = "bf16[T, K] bf16[N, K] -> f32"
    yield Pair(
        "1: a float32 result",
        form,
        "-> bf16",
        good,
        call(lambda x, w: dot(x, w, 1, 1, jnp.bfloat16), x, w),
    )
    yield Pair(
        "1: one type",
        form,
        "f32[T, K] times w.astype(f32)",
        good,
        call(
            lambda x, w: dot(x, w.astype(jnp.float32), 1, 1, jnp.float32),
            normal(ROWS, K, dtype=jnp.float32),
            w,
        ),
    )
    yield Pair(
        "1: [N, K]",
        form,
        "bf16[K, N]",
        good,
        call(lambda x, w: dot(x, w, 1, 0, jnp.float32), x, transposed),
    )
    yield Pair(
        "1: the weight on the right",
        form,
        "bf16[K, N] on the left",
        good,
        call(lambda x, w: dot(w, x, 0, 1, jnp.float32), x, transposed),
    )


def one_row() -> Iterator[Pair]:
    """2: one row falls off a cliff"""
    for name, make, out in (
        ("bf16", normal, jnp.float32),
        ("int8", small_int, jnp.int32),
    ):
        w = make(N, K)
        steps = [
            call(functools.partial(dot, x_axis=1, w_axis=1, dtype=out), make(rows, K), w)
            for rows in (2, 1)
        ]
        yield Pair(f"2: two rows at least, {name}", "2 rows", "1 row", *steps)


def int8_dots() -> Iterator[Pair]:
    """3: int8 times int8 is a fast product"""
    x, w = small_int(ROWS, K), small_int(N, K)
    good = call(lambda x, w: dot(x, w, 1, 1, jnp.int32), x, w)
    as_bf16 = call(
        lambda x, w: dot(x, w.astype(jnp.bfloat16), 1, 1, jnp.float32), normal(ROWS, K), w
    )
    as_f32 = call(
        lambda x, w: dot(x, w.astype(jnp.float32), 1, 1, jnp.float32),
        normal(ROWS, K, dtype=jnp.float32),
        w,
    )
    yield Pair("3: int8 activations too", "int8 int8 -> i32", "w.astype(bf16)", good, as_bf16)
    yield Pair("3: int8 activations too", "int8 int8 -> i32", "w.astype(f32)", good, as_f32)


BLOCKS, KV_HEADS, BLOCK, HEAD_DIM, SEQS = 2048, 4, 16, 64, 16


def cache_writes() -> Iterator[Pair]:
    """4: never scatter or gather bfloat16"""
    shape = (BLOCKS, 2, KV_HEADS, BLOCK, HEAD_DIM)
    rows = normal(SEQS, 2, KV_HEADS, HEAD_DIM)
    slots = jnp.asarray(RNG.permutation(BLOCKS * BLOCK)[:SEQS], jnp.int32)

    def scatter(kv: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
        if kv.dtype == jnp.uint16:
            rows = lax.bitcast_convert_type(rows, jnp.uint16)
        return kv.at[slots // BLOCK, :, :, slots % BLOCK].set(rows, mode="drop")

    def slices(kv: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
        rows = lax.bitcast_convert_type(rows, jnp.uint16)[:, None, :, :, None]
        for i in range(SEQS):
            at = (slots[i] // BLOCK, 0, 0, slots[i] % BLOCK, 0)
            kv = lax.dynamic_update_slice(kv, rows[i], at)
        return kv

    bits, floats = jnp.zeros(shape, jnp.uint16), jnp.zeros(shape, jnp.bfloat16)
    good = in_place(scatter, bits, rows, slots)
    yield Pair(
        "4: a cache of bits",
        "scatter into uint16",
        "into bf16",
        good,
        in_place(scatter, floats, rows, slots),
    )
    yield Pair(
        "4: one scatter",
        "scatter into uint16",
        "dynamic_update_slice by row",
        in_place(scatter, jnp.zeros(shape, jnp.uint16), rows, slots),
        in_place(slices, jnp.zeros(shape, jnp.uint16), rows, slots),
    )
    tables = jnp.asarray(RNG.permutation(BLOCKS)[: SEQS * 16].reshape(SEQS, 16), jnp.int32)

    def gather(kv: jax.Array, tables: jax.Array) -> jax.Array:
        read = kv.at[tables].get(mode="clip")
        if kv.dtype == jnp.uint16:
            read = lax.bitcast_convert_type(read, jnp.bfloat16)
        return read.astype(jnp.float32).sum(axis=(1, 4))

    kvs = jnp.zeros(shape, jnp.uint16), jnp.zeros(shape, jnp.bfloat16)
    yield Pair(
        "4: a cache of bits",
        "gather from uint16",
        "from bf16",
        *(call(gather, kv, tables) for kv in kvs),
    )


def cache_layout() -> Iterator[Pair]:
    """5: heads before tokens within a block"""
    tables = jnp.asarray(RNG.permutation(BLOCKS)[: SEQS * 16].reshape(SEQS, 16), jnp.int32)
    q = normal(SEQS, KV_HEADS, 8, HEAD_DIM, dtype=jnp.float32)

    def attend(q: jax.Array, kv: jax.Array, tables: jax.Array, heads_first: bool) -> jax.Array:
        blocks = kv.at[tables].get(mode="clip")  # [S, 16, 2, ...]
        blocks = lax.bitcast_convert_type(blocks, jnp.bfloat16).astype(jnp.float32)
        keys, values = blocks[:, :, 0], blocks[:, :, 1]
        letters = "snkbd" if heads_first else "snbkd"
        scores = jnp.einsum(f"skgd,{letters}->skgnb", q, keys)
        weights = jax.nn.softmax(scores.reshape(*scores.shape[:3], -1)).reshape(scores.shape)
        return jnp.einsum(f"skgnb,{letters}->skgd", weights, values)

    by_head = jnp.zeros((BLOCKS, 2, KV_HEADS, BLOCK, HEAD_DIM), jnp.uint16)
    by_token = jnp.zeros((BLOCKS, 2, BLOCK, KV_HEADS, HEAD_DIM), jnp.uint16)
    yield Pair(
        "5: heads first",
        "blocks [heads, tokens, D]",
        "[tokens, heads, D]",
        call(functools.partial(attend, heads_first=True), q, by_head, tables),
        call(functools.partial(attend, heads_first=False), q, by_token, tables),
    )


def sampling() -> Iterator[Pair]:
    """7: never sort the vocabulary"""
    logits = normal(16, 49152, dtype=jnp.float32)
    top_k, ones = jnp.full(16, 50, jnp.int32), jnp.full(16, 0.9, jnp.float32)

    def bisect(logits: jax.Array) -> jax.Array:
        return filter_threshold(logits, top_k=top_k, top_p=ones, min_p=jnp.zeros(16))

    def sort(logits: jax.Array) -> jax.Array:
        ordered = -jnp.sort(-logits, axis=1)
        mass = jnp.exp(ordered - ordered[:, :1]) * (jnp.arange(ordered.shape[1]) < top_k[:, None])
        enough = jnp.cumsum(mass, axis=1) >= ones[:, None] * mass.sum(axis=1, keepdims=True)
        return jnp.take_along_axis(ordered, enough.argmax(axis=1)[:, None], axis=1)

    yield Pair(
        "7: top-k and top-p without a sort",
        "bisection over bits, 16 x 49,152",
        "sort",
        call(bisect, logits),
        call(sort, logits),
    )


def loops() -> Iterator[Pair]:
    """8: unrolled layers, flat leaves, one upload"""
    layers, d = 8, 2048
    x, stacked = normal(ROWS, d), normal(layers, d, d)
    apart = [jnp.asarray(layer) for layer in np.asarray(stacked)]

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + dot(x, w, 1, 1, jnp.float32).astype(x.dtype)

    def unrolled(x: jax.Array, *weights: jax.Array) -> jax.Array:
        return functools.reduce(layer, weights, x)

    def scanned(x: jax.Array, stacked: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (layer(x, w), None), x, stacked)[0]

    yield Pair(
        "8: unrolled layers",
        "8 matrices apart",
        "lax.scan over a stack",
        call(unrolled, x, *apart),
        call(scanned, x, stacked),
    )

    leaves = tuple(jnp.ones(8) for _ in range(200))
    total = jax.jit(lambda leaves: leaves[0] + leaves[-1])

    class Module(nnx.Module):
        def __init__(self) -> None:
            self.weights = nnx.List([nnx.Param(leaf) for leaf in leaves])

    module = Module()
    by_module = nnx.jit(lambda module: module.weights[0][...] + module.weights[-1][...])
    yield Pair(
        "8: flat leaves",
        "a tuple of 200 leaves",
        "nnx.jit of a module",
        lambda: total(leaves),
        lambda: by_module(module),
    )

    parts = [np.zeros(64, np.int32) for _ in range(8)]
    packed = np.zeros(8 * 64, np.int32)
    yield Pair(
        "8: one upload",
        "device_put of 512 ints",
        "of 8 times 64",
        lambda: jax.device_put(packed),
        lambda: [jax.device_put(part) for part in parts],
    )


def prefill() -> Iterator[Pair]:
    """9: causal attention of long prompts in blocks of queries"""
    T, heads, group, D = 512, 4, 8, 64
    q, k, v = normal(T, heads, group, D), normal(T, heads, D), normal(T, heads, D)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, start: int) -> jax.Array:
        scores = jnp.einsum("tkgd,skd->kgts", q, k, preferred_element_type=jnp.float32)
        seen = jnp.arange(len(k)) <= start + jnp.arange(len(q))[:, None]
        weights = jax.nn.softmax(jnp.where(seen, scores * D**-0.5, -jnp.inf))
        out = jnp.einsum(
            "kgts,skd->tkgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return out.astype(q.dtype)

    def blocked(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        ends = range(128, T + 1, 128)
        return jnp.concatenate([attend(q[e - 128 : e], k[:e], v[:e], e - 128) for e in ends])

    yield Pair(
        "9: blocks of queries",
        "4 blocks of 128 rows",
        "512 rows at once",
        call(blocked, q, k, v),
        call(functools.partial(attend, start=0), q, k, v),
    )


PAIRS = (matrices, one_row, int8_dots, cache_writes, cache_layout, sampling, loops, prefill)


if __name__ == "__main__":
    sys.exit(main())
