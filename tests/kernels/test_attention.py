"""Paged attention's contract: every implementation against a dense one in float64."""

import hashlib
import inspect
import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from forge_kernels.attention import (
    QuantizedKV,
    kv_shape_dtype,
    kv_storage_dtype,
    ragged_paged_attention,
    rotate_and_write,
    write_kv,
)
from forge_kernels.attention import xla as xla_file
from forge_kernels.attention.quantized import dequantize_rows, quantize_rows
from forge_kernels.attention.shapes import SHAPES
from forge_kernels.attention.xla import GROUP, KV_TILE, Q_TILE, SHORT
from forge_kernels.rope import apply_rope, inverse_frequencies, rope_tables

FORMS = [("reference", False), ("xla", False), ("xla", True)]  # implementation, uniform
EIGHT_BITS = ("int8", "float8_e4m3fn")
TOLERANCE = {"atol": 2e-6, "rtol": 1e-5}
BF16_ROUNDOFF = 2.0**-8


@pytest.fixture(autouse=True)
def _kernels_of(request: pytest.FixtureRequest) -> None:
    if getattr(request.node, "callspec", None) and "cpu" in request.node.callspec.params.values():
        request.getfixturevalue("cpu_kernels")


@dataclass(frozen=True)
class Batch:
    """Sequences as (rows, context), and the shapes of the arrays that hold them.

    Batches share shapes, and thus executables, where possible.
    """

    seqs: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 8
    rows: int = 240  # T
    max_seqs: int = 2 * GROUP + 6  # S
    pool_tokens: int = 3584  # N * bs
    max_context: int = 320
    seed: int = 0
    dtype: str = "float32"  # rounding of queries, keys and values

    def for_cpu(self) -> "Batch":
        """Return the batch for the CPU kernels: bfloat16 and head dims that are multiples of 32."""
        return replace(self, dtype="bfloat16", head_dim=-(-self.head_dim // 32) * 32)

    def exact(self) -> "Batch":
        """Return the batch without padding rows, padding sequences, or a free block."""
        blocks = sum(-(-context // self.block_size) for _, context in self.seqs)
        return replace(
            self,
            rows=sum(rows for rows, _ in self.seqs),
            max_seqs=len(self.seqs),
            pool_tokens=blocks * self.block_size,
            max_context=max(context for _, context in self.seqs),
        )


@dataclass
class Arrays:
    q: np.ndarray  # f32[T, H, D]
    kv: np.ndarray  # f32[N, 2, K, bs, D]; NaN wherever no sequence has a token
    block_tables: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray
    num_seqs: np.ndarray
    expected: np.ndarray  # f64[T, H, D]
    spread: np.ndarray  # f64[T, H, D]: the same weighted sum of the values' magnitudes


def make(
    batch: Batch,
    *,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    kv_dtype: str | None = None,
    sinks: bool = False,
    magnitudes: tuple[float, ...] = (1.0,),
) -> Arrays:
    """Return the arrays of a batch.

    Args:
      kv_dtype: 8-bit type to which keys and values are rounded.
      sinks: True for the sinks of `sinks_of`.
      magnitudes: Magnitudes of tokens, in turn; queries are divided by the largest.
    """
    rng = np.random.default_rng(batch.seed)
    H, K, D, bs = batch.heads, batch.kv_heads, batch.head_dim, batch.block_size
    S, T, N = batch.max_seqs, batch.rows, batch.pool_tokens // bs
    q_lens = np.array([rows for rows, _ in batch.seqs], int)
    lens = np.array([context for _, context in batch.seqs], int)
    needed, max_blocks = -(-lens // bs), -(-batch.max_context // bs)

    def normal(*shape):
        return rng.standard_normal(shape).astype(jnp.dtype(batch.dtype)).astype(np.float32)

    q = normal(T, H, D) / np.float32(max(magnitudes))
    q[int(q_lens.sum()) :] = np.nan
    kv = np.full((N, 2, K, bs, D), np.nan, np.float32)
    order = rng.permutation(N)
    # Table entries beyond a sequence and beyond num_seqs are stale.
    tables = rng.integers(0, N, (S, max_blocks)).astype(np.int32)
    kv_lens = np.full(S, 77, np.int32)
    cu_q_lens = np.full(S + 1, T, np.int32)
    cu_q_lens[: len(q_lens) + 1] = np.cumsum([0, *q_lens])
    kv_lens[: len(lens)] = lens
    expected, spread = np.zeros((2, T, H, D))
    for s, (rows, context) in enumerate(batch.seqs):
        mine, order = order[: needed[s]], order[needed[s] :]
        tables[s, : len(mine)] = mine
        pairs = normal(2, K, context, D) * np.resize(magnitudes, context)[:, None]
        if kv_dtype in EIGHT_BITS:
            padded = np.zeros((2, K, batch.max_context, D), np.float32)
            padded[:, :, :context] = pairs
            pairs = np.asarray(rounded(padded, kv_dtype))[:, :, :context]
        for position in range(context):
            kv[mine[position // bs], :, :, position % bs] = pairs[:, :, position]
        keys, values = np.repeat(pairs.astype(np.float64), H // K, axis=1)
        start = cu_q_lens[s]
        for j in range(rows):
            visible = context - rows + j + 1
            first = 0 if window is None else max(0, visible - window)
            first = first if chunk is None else (visible - 1) // chunk * chunk
            seen = slice(first, visible)
            scores = D**-0.5 * np.einsum("hd,hpd->hp", q[start + j], keys[:, seen])
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = softmax(scores, sinks=sinks)
            expected[start + j] = np.einsum("hp,hpd->hd", weights, values[:, seen])
            spread[start + j] = np.einsum("hp,hpd->hd", weights, np.abs(values[:, seen]))
    return Arrays(q, kv, tables, kv_lens, cu_q_lens, np.int32(len(q_lens)), expected, spread)


def sinks_of(heads: int) -> np.ndarray:
    """Return f32[H], from almost no weight to more than all keys together."""
    return np.linspace(-3, 9, heads, dtype=np.float32)


def softmax(scores: np.ndarray, *, sinks: bool = False) -> np.ndarray:
    """Return the weights f64[H, keys], with the sinks of `sinks_of` in the denominator."""
    sink = np.full(len(scores), -np.inf)
    if sinks:
        sink = sinks_of(len(scores)).astype(np.float64)
    every = np.concatenate([scores, sink[:, None]], axis=1)
    weights = np.exp(every - every.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True))[:, :-1]


@partial(jax.jit, static_argnums=1)
def rounded(rows: jax.Array, kv_dtype: str) -> jax.Array:
    return dequantize_rows(*quantize_rows(rows, kv_dtype))


@partial(
    jax.jit,
    static_argnames=(
        "implementation",
        "kv_dtype",
        "max_q_len",
        "uniform",
        "window",
        "soft_cap",
    ),
)
def attend(arrays, **options):
    return ragged_paged_attention(*arrays, sm_scale=arrays[0].shape[-1] ** -0.5, **options)


def run(arrays, *, sinks: bool = False, **options):
    if sinks:
        options["sinks"] = sinks_of(arrays[0].shape[1])
    return attend(arrays, **options)


def inputs(a: Arrays, kv_dtype: str | None = None) -> tuple[Any, ...]:
    """Return the arguments of attention; an 8-bit `kv_dtype` gives a QuantizedKV as on a CPU."""
    arrays = (a.q, a.kv, a.block_tables, a.kv_lens, a.cu_q_lens, a.num_seqs)
    q, kv, *rest = (jnp.asarray(array) for array in arrays)
    return (q, kv if kv_dtype not in EIGHT_BITS else quantized(kv, kv_dtype), *rest)


@partial(jax.jit, static_argnums=1)
def quantized(kv: jax.Array, kv_dtype: str) -> QuantizedKV:
    """Quantize `kv`; where it is NaN, so is the scale, and the data is NaN or large."""
    data, scale = quantize_rows(kv, kv_dtype)
    if kv_dtype == "float8_e4m3fn":
        data = lax.bitcast_convert_type(data, jnp.uint8)
    return QuantizedKV(jnp.where(jnp.isnan(kv), jnp.asarray(127, data.dtype), data), scale)


def run_cpu(a: Arrays, *, kv_dtype: str = "bfloat16", **options: Any) -> np.ndarray:
    """Return the CPU kernels' result as f32 of the rows that exist."""
    q, kv, *rest = inputs(a, kv_dtype)
    if not isinstance(kv, QuantizedKV):
        kv = lax.bitcast_convert_type(kv.astype(jnp.bfloat16), jnp.uint16)
    arrays = (q.astype(jnp.bfloat16), kv, *rest)
    out = run(arrays, implementation="cpu", kv_dtype=kv_dtype, **options)
    assert out.dtype == jnp.bfloat16
    return np.asarray(out, np.float32)[: a.cu_q_lens[a.num_seqs]]


def check_cpu(batch: Batch, **kind: Any) -> None:
    """Check within half a bfloat16 unit per value's weight and of the result; sums are float32."""
    arrays = make(batch, **kind)
    out = run_cpu(arrays, **kind)
    rows = len(out)
    expected, spread = arrays.expected[:rows], arrays.spread[:rows]
    tolerance = BF16_ROUNDOFF * (spread + np.abs(expected)) + 1e-5
    worst = (np.abs(out - expected) / tolerance).max(initial=0.0)
    assert worst <= 1, f"off by {worst:.3g} times the tolerance"


def check(batch: Batch, implementation: str, *, uniform: bool, **options) -> None:
    names = ("window", "soft_cap", "kv_dtype", "sinks")
    kind = {name: options[name] for name in names if name in options}
    if implementation == "cpu":
        check_cpu(batch.for_cpu(), **kind)
        return
    arrays = make(batch, **kind)
    array_inputs = inputs(arrays, options.get("kv_dtype"))
    out = run(array_inputs, implementation=implementation, uniform=uniform, **options)
    np.testing.assert_allclose(out, arrays.expected, **TOLERANCE)


MIXED = Batch(seqs=((1, 9), (1, 1), (1, 150), (4, 40), (3, 3), (70, 70), (20, 201), (1, 33)))
SMALL = replace(MIXED, rows=110, max_seqs=9, pool_tokens=1600, max_context=216)
SHORT_ROWS = Batch(seqs=tuple((1 + i % SHORT, 20 + i) for i in range(GROUP + 5)))

BATCHES = {
    "decode": Batch(seqs=((1, 1), (1, 5), (1, 8), (1, 130), (1, 17))),
    "decode, several groups": Batch(seqs=tuple((1, 1 + 5 * i) for i in range(2 * GROUP + 3))),
    "verify rows": SHORT_ROWS,
    "whole prompts": Batch(
        seqs=(
            (5, 5),
            (Q_TILE, Q_TILE),
            (Q_TILE + 1, Q_TILE + 1),
            (SHORT, SHORT),
            (SHORT + 1, SHORT + 1),
        )
    ),
    "chunks": Batch(seqs=((7, 50), (16, 16), (100, KV_TILE + 100))),
    "mixed": MIXED,
    "empty sequences between": Batch(
        seqs=((1, 4), (0, 12), (1, 6), (0, 0), (9, 9), (0, 5), (12, 30))
    ),
    "nothing at all": Batch(seqs=()),
    "tile edges": Batch(
        seqs=((1, KV_TILE), (1, KV_TILE + 1), (2, KV_TILE + 1), (Q_TILE, KV_TILE + 3), (1, 320))
    ),
    "one row": Batch(seqs=((1, 21),)).exact(),
    "no padding": Batch(seqs=((1, 3), (2, 9), (10, 10))).exact(),
    "8 query heads to one, blocks of 16, head dim 64": replace(
        SMALL, heads=8, kv_heads=1, head_dim=64, block_size=16, seed=2
    ),
    "a query head to each kv head, blocks of 64, head dim 128": replace(
        SMALL, heads=2, head_dim=128, block_size=64, seed=4
    ),
    "blocks longer than a tile": replace(SMALL, block_size=2 * KV_TILE, pool_tokens=5120, seed=5),
    "blocks that no tile divides": replace(SMALL, block_size=24, seed=6),
}


@pytest.mark.parametrize(("implementation", "uniform"), FORMS)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.quick_cases(12)
def test_output_matches_dense_attention_in_float64(name, implementation, uniform):
    check(BATCHES[name], implementation, uniform=uniform)


# The type of the cache, the visible part of it, and the cap of the scores.
KINDS: dict[str, dict[str, Any]] = {
    "int8": {"kv_dtype": "int8"},
    "fp8": {"kv_dtype": "float8_e4m3fn"},
    "window": {"window": 37},
    "window longer than a tile": {"window": KV_TILE + 22},
    "soft cap": {"soft_cap": 2.0},
    "int8, window, soft cap": {"kv_dtype": "int8", "window": 37, "soft_cap": 2.0},
    "fp8, window, soft cap": {"kv_dtype": "float8_e4m3fn", "window": 37, "soft_cap": 2.0},
    "sinks": {"sinks": True},
    "sinks, window": {"sinks": True, "window": 37},
    "sinks, int8, window, soft cap": {
        "sinks": True,
        "kv_dtype": "int8",
        "window": 37,
        "soft_cap": 2.0,
    },
}


@pytest.mark.parametrize(("implementation", "uniform"), FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick_cases(5)
def test_output_of_every_kind_matches_dense_attention(kind, implementation, uniform):
    shared = ("decode, several groups", "verify rows", "chunks", "mixed", "tile edges")
    for name in (*shared, "empty sequences between", "nothing at all"):
        check(BATCHES[name], implementation, uniform=uniform, **KINDS[kind])


@pytest.mark.parametrize("window", [1, 50])
@pytest.mark.parametrize("block_size", [24, 64, 2 * KV_TILE])
@pytest.mark.quick_cases(2)
def test_scales_are_found_in_blocks_of_all_sizes(block_size, window):
    seqs = ((1, 130), (1, 1), (1, 140), (1, 64))
    batch = replace(SMALL, seqs=seqs, block_size=block_size, pool_tokens=block_size * 16)
    check(batch, "xla", uniform=False, kv_dtype="int8", window=window, max_q_len=1)


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
@pytest.mark.parametrize(("implementation", "uniform"), FORMS)
def test_8_bit_rows_may_be_zero_tiny_or_huge(implementation, uniform, kv_dtype):
    options = {"implementation": implementation, "uniform": uniform, "kv_dtype": kv_dtype}
    arrays = make(MIXED, kv_dtype=kv_dtype, magnitudes=(1.0, 0.0, 1e-39, 1e5))
    out = np.asarray(run(inputs(arrays, kv_dtype), **options))
    assert np.abs(arrays.expected).max() > 1e4
    assert (np.abs(out - arrays.expected) <= 1e-5 * arrays.spread).all()


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
@pytest.mark.parametrize(("implementation", "uniform"), FORMS)
def test_8_bit_nan_stays_in_its_sequence(implementation, uniform, kv_dtype):
    """The NaN is in a scale of keys or values, or in data that can hold one."""
    options = {"implementation": implementation, "uniform": uniform, "kv_dtype": kv_dtype}
    arrays = make(MIXED, kv_dtype=kv_dtype)
    q, kv, *rest = inputs(arrays, kv_dtype)
    want = np.asarray(run((q, kv, *rest), **options))
    assert np.isfinite(want).all()
    # A decode in a group with others of the same length, and the last 11 rows of a chunk.
    for s, at, sees in ((2, 5, 1), (6, 190, 11)):
        context, block_size = MIXED.seqs[s][1], MIXED.block_size
        mine = np.arange(arrays.cu_q_lens[s], arrays.cu_q_lens[s + 1])
        assert at < context
        for side in (0, 1):
            block = arrays.block_tables[s, at // block_size]
            place = (block, side, slice(None), at % block_size)
            spoilt = [kv._replace(scale=kv.scale.at[place].set(jnp.nan))]
            if kv_dtype == "float8_e4m3fn":
                spoilt.append(kv._replace(data=kv.data.at[place].set(0xFF)))
            for faulty in spoilt:
                out = np.asarray(run((q, faulty, *rest), **options))
                assert np.isnan(out[mine[-sees:]]).all()
                np.testing.assert_array_equal(np.delete(out, mine, 0), np.delete(want, mine, 0))


@pytest.mark.parametrize("kv_dtype", [None, *EIGHT_BITS])
@pytest.mark.parametrize(("implementation", "uniform"), FORMS)
@pytest.mark.quick_cases(2)
def test_nan_behind_every_window_is_ignored(implementation, uniform, kv_dtype):
    options = {"window": 37}
    if kv_dtype is not None:
        options = KINDS["int8, window, soft cap"] | {"kv_dtype": kv_dtype}
    for name in ("decode, several groups", "verify rows", "chunks", "mixed"):
        arrays = make(BATCHES[name], **options)
        pass_by(arrays, BATCHES[name], window=37)
        out = run(
            inputs(arrays, kv_dtype), implementation=implementation, uniform=uniform, **options
        )
        np.testing.assert_allclose(out, arrays.expected, **TOLERANCE)


def pass_by(arrays: Arrays, batch: Batch, *, window: int) -> None:
    """Fill everything that is behind the window of every row with NaN."""
    for table, (rows, context) in zip(arrays.block_tables, batch.seqs, strict=False):
        for position in range(context - rows + 1 - window):
            arrays.kv[table[position // batch.block_size], :, :, position % batch.block_size] = (
                np.nan
            )


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.quick_cases(1)
def test_bfloat16_queries_attend_over_8_bit_caches(uniform, kv_dtype):
    arrays = make(BATCHES["decode"], kv_dtype=kv_dtype)
    q, kv, *rest = inputs(arrays, kv_dtype)
    q, options = q.astype(jnp.bfloat16), {"implementation": "xla", "uniform": uniform}
    out = run((q, kv, *rest), kv_dtype=kv_dtype, max_q_len=1, **options)
    assert out.dtype == jnp.bfloat16
    rounding = BF16_ROUNDOFF * (4 + np.abs(arrays.expected) + arrays.spread)  # includes q
    assert (np.abs(np.asarray(out, np.float64) - arrays.expected) <= rounding).all()
    if kv_dtype == "float8_e4m3fn":
        as_float = kv._replace(data=lax.bitcast_convert_type(kv.data, jnp.float8_e4m3fn))
        np.testing.assert_array_equal(out, run((q, as_float, *rest), max_q_len=1, **options))


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.slow
def test_windowed_cost_follows_the_window(uniform, monkeypatch):
    """Counts the KV tiles that are read, once per group of sequences or rows."""
    read = xla_file._Pool.tile
    counted: list[int] = []

    def counting(self, seq, tile):
        jax.debug.callback(lambda: counted.append(1))
        return read(self, seq, tile)

    monkeypatch.setattr(xla_file._Pool, "tile", counting)

    def counter(**options):
        options |= {"sm_scale": 1.0, "kv_dtype": jnp.dtype(jnp.float32), "uniform": uniform}
        attend = jax.jit(partial(xla_file.xla_attention, max_q_len=LONG.rows, **options))

        def tiles(seqs) -> int:
            counted.clear()
            attend(*inputs(make(replace(LONG, seqs=seqs))))
            jax.effects_barrier()
            return len(counted)

        return tiles

    whole, narrow = counter(), counter(window=40)
    for seqs in (((1, 1000), (1, 400), (1, 100), (1, 2)), ((4, 1000), (3, 300)), ((70, 1000),)):
        groups = whole(seqs) // 8  # groups of rows, with a context of up to 1000
        assert groups * 8 == whole(seqs)
        assert groups <= narrow(seqs) <= 2 * groups


LONG = Batch(seqs=(), rows=80, max_seqs=5, max_context=1024)


def random_mix(seed: int) -> tuple[tuple[int, int], ...]:
    """Return decode rows, drafts, chunks and empty sequences in any order."""
    rng = np.random.default_rng(seed)
    kinds = ((1, 1), (2, 5), (0, 0), (10, 70))
    seqs = []
    for kind in rng.integers(0, len(kinds), 9):
        low, high = kinds[kind]
        rows = int(rng.integers(low, high + 1))
        seqs.append((rows, rows + int(rng.integers(0, 130))))
    return tuple(seqs)


CPU_BATCHES = {
    f"head dim {D}, {G} query heads to one, blocks of {bs}": Batch(
        seqs=random_mix(G),
        rows=640,
        max_seqs=11,
        pool_tokens=4096,
        head_dim=D,
        kv_heads=K,
        heads=G * K,
        block_size=bs,
        seed=G,
    )
    for D, G, K, bs in (
        (32, 1, 3, 8),
        (64, 2, 2, 16),
        (96, 3, 1, 64),
        (128, 4, 2, 128),
        (160, 5, 1, 16),
        (192, 6, 2, 32),
        (224, 7, 1, 16),
        (256, 8, 1, 64),
        (512, 2, 2, 16),
        (64, 71, 1, 16),
    )
}


@pytest.mark.parametrize("name", CPU_BATCHES)
def test_cpu_kernels_support_all_sizes(cpu_kernels, name):
    check_cpu(CPU_BATCHES[name].for_cpu())


# Contexts that are summed in several chunks, with too few items for the threads and with enough.
MANY_KEYS = replace(SMALL, rows=40, pool_tokens=6400, max_context=2100, block_size=16, head_dim=32)
MANY_KEYS_BATCHES = {
    "one decode": replace(MANY_KEYS, seqs=((1, 2100),)),
    "a chunk of a prompt": replace(MANY_KEYS, seqs=((30, 1537), (1, 1025))),
    "many": replace(MANY_KEYS, seqs=((1, 513), (1, 512), (5, 1100), *((1, 90),) * 4, (11, 2000))),
}


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_cpu_kernels_support_every_kind_and_long_contexts(cpu_kernels, kind):
    options = {} if kind is None else KINDS[kind]
    for name in ("decode, several groups", "chunks", "mixed", "empty sequences between"):
        check_cpu(BATCHES[name].for_cpu(), **options)
    for batch in MANY_KEYS_BATCHES.values():
        check_cpu(batch.for_cpu(), **options)


def cpu_digests() -> dict[str, str]:
    """Return hashes of the CPU kernels' results for long contexts."""
    found = {}
    for (name, batch), kind in itertools.product(MANY_KEYS_BATCHES.items(), ("int8", "window")):
        batch = batch.for_cpu()
        out = run_cpu(make(batch, **KINDS[kind]), **KINDS[kind])
        found[f"attention, {name}, {kind}"] = hashlib.sha256(out.tobytes()).hexdigest()
    return found


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_cpu_kernels_keep_an_8_bit_nan_in_its_sequence(cpu_kernels, kv_dtype):
    batch = Batch(seqs=((1, 40), (5, 5), (30, 100))).for_cpu()
    arrays = make(batch, kv_dtype=kv_dtype)
    q, kv, *rest = inputs(arrays, kv_dtype)
    q = q.astype(jnp.bfloat16)
    attend = partial(run, implementation="cpu", kv_dtype=kv_dtype)
    want = np.asarray(attend((q, kv, *rest)), np.float32)[:36]
    block = arrays.block_tables[1, 0]
    for side in (0, 1):
        place = (block, side, slice(None), 2)
        spoilt = [kv._replace(scale=kv.scale.at[place].set(jnp.nan))]
        if kv_dtype == "float8_e4m3fn":
            spoilt.append(kv._replace(data=kv.data.at[place].set(0xFF)))
        for faulty in spoilt:
            out = np.asarray(attend((q, faulty, *rest)), np.float32)[:36]
            assert np.isnan(out[3:6]).all()
            np.testing.assert_array_equal(
                np.delete(out, range(1, 6), 0), np.delete(want, range(1, 6), 0)
            )


@pytest.mark.parametrize("kv_dtype", ["bfloat16", *EIGHT_BITS])
def test_cpu_kernels_ignore_nan_behind_every_window(cpu_kernels, kv_dtype):
    options = {"window": 37, "kv_dtype": kv_dtype}
    for name in ("decode, several groups", "verify rows", "chunks", "mixed"):
        batch = BATCHES[name].for_cpu()
        arrays = make(batch, **options)
        want = run_cpu(arrays, **options)
        pass_by(arrays, batch, window=37)
        assert np.isfinite(want).all()
        np.testing.assert_array_equal(run_cpu(arrays, **options), want)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("implementation", "uniform"), FORMS)
@pytest.mark.quick_cases(2)
def test_16_bit_caches_may_be_stored_as_bits(implementation, uniform, kv_dtype):
    arrays = make(SHORT_ROWS)
    # Rounded first, so that only the arithmetic differs from the dense one.
    rounded = jnp.asarray(arrays.kv, kv_dtype)
    q = jnp.asarray(arrays.q, kv_dtype)
    as_float = (q, rounded, *inputs(arrays)[2:])
    as_bits = (q, lax.bitcast_convert_type(rounded, jnp.uint16), *inputs(arrays)[2:])
    options = {"implementation": implementation, "max_q_len": SHORT, "uniform": uniform}
    out = run(as_bits, kv_dtype=kv_dtype, **options)
    assert out.dtype == kv_dtype
    if kv_dtype == "bfloat16":
        np.testing.assert_array_equal(out, run(as_float, **options))
    tolerance = 2e-2 if kv_dtype == "bfloat16" else 3e-3
    np.testing.assert_allclose(
        np.asarray(out, np.float64), arrays.expected, atol=tolerance, rtol=tolerance
    )


@pytest.mark.slow
def test_max_q_len_hint_does_not_change_the_output():
    decode, verify = make(BATCHES["decode, several groups"]), make(BATCHES["verify rows"])
    for arrays, max_q_len in ((decode, 1), (verify, SHORT)):
        promised = run(inputs(arrays), implementation="xla", max_q_len=max_q_len)
        np.testing.assert_array_equal(promised, run(inputs(arrays), implementation="xla"))


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_row_is_independent_of_the_batch(implementation):
    batch = Batch(seqs=((1, 40),))
    batch = batch.for_cpu() if implementation == "cpu" else batch
    alone = make(batch)
    crowd = make(replace(batch, seqs=((1, 40), *((1, 300 - i) for i in range(8))), seed=1))
    used = crowd.block_tables[0, : 40 // 8]
    crowd.kv[used] = alone.kv[alone.block_tables[0, : 40 // 8]]
    crowd.q[0] = alone.q[0]
    assert not np.array_equal(used, alone.block_tables[0, : 40 // 8])
    attend = run_cpu if implementation == "cpu" else lambda a: run(inputs(a), implementation="xla")
    np.testing.assert_array_equal(attend(alone)[0], attend(crowd)[0])


@pytest.mark.parametrize("sizes", [(1,) * 150, (7, 50, 93), (64, 86), (149, 1)], ids=str)
def test_cpu_kernel_row_is_independent_of_the_chunks(cpu_kernels, sizes):
    check_chunks(sizes)


@pytest.mark.parametrize(
    "kind", ["int8", "window longer than a tile", "fp8, window, soft cap", "sinks, window"]
)
@pytest.mark.parametrize("sizes", [(700, 600), (1299, 1), (1, 511, 1, 787)], ids=str)
def test_cpu_kernel_row_is_independent_of_the_chunks_in_long_prompts(cpu_kernels, sizes, kind):
    check_chunks(sizes, **KINDS[kind])


def check_chunks(sizes: tuple[int, ...], **options: Any) -> None:
    """Check that a prompt has the same bits in any chunks and in any batch."""
    length = sum(sizes)
    prompt = Batch(
        seqs=((length, length),),
        heads=6,
        kv_heads=2,
        head_dim=64,
        block_size=16,
        rows=max(240, length),
        max_context=max(320, length),
    ).for_cpu()
    whole = make(prompt, **options)
    want, order = run_cpu(whole, **options), np.random.default_rng(0).permutation(len(sizes))
    ends = np.cumsum(sizes)
    # Each chunk as a separate sequence in the same blocks, shuffled between other sequences.
    pieces = [(sizes[i], ends[i]) for i in order]
    others = make(replace(prompt, seqs=((1, 30), (3, 3)), seed=1), **options)
    S = len(pieces) + 2
    rows = [others.q[:1], *(whole.q[end - n : end] for n, end in pieces), others.q[1:4]]
    free = np.flatnonzero(np.isnan(whole.kv).all(axis=(1, 2, 3, 4)))
    kv, tables = whole.kv.copy(), np.zeros((S, whole.block_tables.shape[1]), np.int32)
    tables[1:-1] = whole.block_tables[0]
    for row, theirs in ((0, 0), (-1, 1)):  # move the others' blocks to free ones
        tables[row, :2], free = free[:2], free[2:]
        kv[tables[row, :2]] = others.kv[others.block_tables[theirs, :2]]
    lens = np.array([30, *(end for _, end in pieces), 3], np.int32)
    counts = [1, *(n for n, _ in pieces), 3]
    arrays = replace(
        whole,
        q=np.concatenate(rows),
        kv=kv,
        block_tables=tables,
        kv_lens=lens,
        cu_q_lens=np.cumsum([0, *counts]).astype(np.int32),
        num_seqs=np.int32(S),
    )
    out, at = run_cpu(arrays, **options), 1
    for n, end in pieces:
        np.testing.assert_array_equal(out[at : at + n], want[end - n : end])
        at += n


def test_non_finite_row_stays_in_its_sequence(cpu_kernels):
    """The NaN is in another sequence's queries or cache."""
    batch = Batch(seqs=((1, 40), (5, 5), (30, 100))).for_cpu()
    clean = make(batch)
    want = run_cpu(clean)
    for value in (np.nan, np.inf):
        spoilt = make(batch)
        spoilt.q[3] = value
        out = run_cpu(spoilt)
        assert np.isnan(out[3]).all()
        np.testing.assert_array_equal(np.delete(out, 3, 0), np.delete(want, 3, 0))
        spoilt = make(batch)
        spoilt.kv[spoilt.block_tables[1, 0]] = value
        out = run_cpu(spoilt)
        assert np.isnan(out[1:6]).all()
        np.testing.assert_array_equal(
            np.delete(out, range(1, 6), 0), np.delete(want, range(1, 6), 0)
        )


def test_cpu_kernels_write_what_apply_rope_and_write_kv_write(cpu_kernels):
    check_rotate_and_write()


def check_rotate_and_write() -> None:
    rng = np.random.default_rng(0)
    shapes = ((32, 8, 3, 1), (64, 16, 4, 2), (96, 24, 2, 2), (256, 16, 2, 1), (512, 8, 2, 1))
    # Rotated numbers per head: all, or three quarters, which is no multiple of the vectors.
    for (D, bs, H, K), share, interleaved in itertools.product(shapes, (1.0, 0.75), (False, True)):
        T, N = 37, 7
        qkv = jnp.asarray(rng.standard_normal((T, H + 2 * K, D)), jnp.bfloat16)
        kv = jnp.asarray(rng.integers(0, 2**16, (N, 2, K, bs, D)), jnp.uint16)
        positions = jnp.asarray(rng.integers(0, 5000, T), jnp.int32)
        cos, sin = rope_tables(positions, inverse_frequencies(int(D * share), 10000.0))
        slots = rng.permutation(N * bs)[:T].astype(np.int32)
        slots[[3, 8]] = N * bs, N * bs + 5
        write = partial(
            rotate_and_write, qkv, kv, cos, sin, jnp.asarray(slots), interleaved=interleaved
        )
        by_xla = jax.jit(partial(write, kv_dtype=jnp.bfloat16))()
        by_kernel = jax.jit(partial(write, kv_dtype=jnp.bfloat16, implementation="cpu"))()
        # Products are summed with one rounding or with two: half a unit of bfloat16 where it
        # matters.
        for mine, theirs in zip(by_kernel, by_xla, strict=True):
            if mine.dtype == jnp.uint16:
                written = np.flatnonzero((slots >= 0) & (slots < N * bs))
                at = slots[written] // bs, slice(None), slice(None), slots[written] % bs
                left = np.ones((N, bs), bool)
                left[slots[written] // bs, slots[written] % bs] = False
                old = np.asarray(kv).transpose(0, 3, 1, 2, 4)[left]
                np.testing.assert_array_equal(np.asarray(mine).transpose(0, 3, 1, 2, 4)[left], old)
                mine, theirs = (
                    np.asarray(lax.bitcast_convert_type(a, jnp.bfloat16), np.float32)[at]
                    for a in (mine, theirs)
                )
                np.testing.assert_array_equal(mine[:, 1], theirs[:, 1])  # values
            mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
            np.testing.assert_allclose(mine, theirs, rtol=2 * BF16_ROUNDOFF, atol=1e-6)
            assert (mine != theirs).mean() < 0.001
            rotated = int(D * share)
            np.testing.assert_array_equal(mine[..., rotated:], theirs[..., rotated:])

        # Index -1 is invalid: the kernels drop it, but XLA would wrap it.
        _, dropped = jax.jit(
            partial(rotate_and_write, kv_dtype=jnp.bfloat16, implementation="cpu")
        )(qkv, kv, cos, sin, jnp.full(T, -1, jnp.int32))
        np.testing.assert_array_equal(dropped, kv)


@pytest.mark.full_compile
def test_cpu_kernels_write_into_a_donated_cache(cpu_kernels):
    kv = jnp.zeros((64, 2, 2, 16, 64), jnp.uint16)
    qkv = jnp.ones((4, 6, 64), jnp.bfloat16)
    angles = jnp.zeros((4, 32))
    write = jax.jit(
        partial(rotate_and_write, kv_dtype=jnp.bfloat16, implementation="cpu"), donate_argnums=1
    )
    compiled = write.lower(qkv, kv, angles, angles, jnp.arange(4)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096
    before = kv.unsafe_buffer_pointer()
    _, written = write(qkv, kv, angles, angles, jnp.arange(4))
    assert written.unsafe_buffer_pointer() == before
    kept = jnp.zeros((64, 2, 2, 16, 64), jnp.uint16)
    jax.jit(partial(rotate_and_write, kv_dtype=jnp.bfloat16, implementation="cpu"))(
        qkv, kept, angles, angles, jnp.arange(4)
    )
    assert not np.asarray(kept).any(), "a cache that was not donated has been written to"


def test_cpu_kernels_name_what_they_do_not_support():
    q, kv, *rest = inputs(make(BATCHES["no padding"]))
    attend = partial(ragged_paged_attention, sm_scale=1.0, implementation="cpu")
    with pytest.raises(TypeError, match="or float8_e4m3fn, not float32"):
        attend(q, kv, *rest)
    bits = jnp.zeros(kv.shape, jnp.uint16)
    with pytest.raises(TypeError, match="or float8_e4m3fn, not float16"):
        attend(q, bits, *rest, kv_dtype=jnp.float16)
    with pytest.raises(TypeError, match="the head dim must be a multiple of 32 up to 512, not 16"):
        attend(q.astype(jnp.bfloat16), bits, *rest, kv_dtype=jnp.bfloat16)
    wide = jnp.zeros((*kv.shape[:-1], 32), jnp.uint16)
    with pytest.raises(TypeError, match="queries must be bfloat16, not float32"):
        attend(jnp.zeros((*q.shape[:-1], 32)), wide, *rest, kv_dtype=jnp.bfloat16)
    with pytest.raises(TypeError, match="bfloat16 must be stored as its bits, not as bfloat16"):
        attend(jnp.zeros((*q.shape[:-1], 32), jnp.bfloat16), wide.astype(jnp.bfloat16), *rest)


def differing_schedules(**options: Any) -> list[str]:
    """Return the schedules of a sequence's last rows that give other bits than one step."""
    context = 150
    seqs = ((context, context), *((1, 90 + i) for i in range(9)))
    kv_dtype = options.get("kv_dtype")
    arrays = make(Batch(seqs=seqs, head_dim=32), kv_dtype=kv_dtype)

    def last_rows(rows: int, num_beside: int) -> np.ndarray:
        index = [*range(1, num_beside + 1), 0]
        a = replace(arrays)
        a.block_tables = arrays.block_tables.copy()
        a.block_tables[: len(index)] = arrays.block_tables[index]
        a.kv_lens = arrays.kv_lens.copy()
        a.kv_lens[: len(index)] = arrays.kv_lens[index]
        a.cu_q_lens = np.full_like(arrays.cu_q_lens, num_beside + rows)
        a.cu_q_lens[: len(index)] = np.arange(len(index))
        a.num_seqs = np.int32(len(index))
        a.q = np.full_like(arrays.q, np.nan)
        a.q[:num_beside] = arrays.q[context : context + num_beside]
        mine = slice(num_beside, num_beside + rows)
        a.q[mine] = arrays.q[context - rows : context]
        return np.asarray(run(inputs(a, kv_dtype), **options))[mine]

    whole = last_rows(context, 0)
    return [
        f"{rows} rows beside {num_beside} sequences"
        for rows, num_beside in itertools.product((1, 2, 7, 8, 33, 70), (0, 1, 9))
        if not np.array_equal(last_rows(rows, num_beside), whole[context - rows :])
    ]


@pytest.mark.full_compile
@pytest.mark.parametrize(("implementation", "uniform"), [("xla", True), ("reference", False)])
@pytest.mark.quick_cases(1)
def test_uniform_row_has_the_same_bits_on_every_schedule(implementation, uniform):
    assert differing_schedules(implementation=implementation, uniform=uniform) == []
    kind = {"sinks": True, "window": 37}
    assert differing_schedules(implementation=implementation, uniform=uniform, **kind) == []


@pytest.mark.full_compile
@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
@pytest.mark.parametrize(("implementation", "uniform"), [("xla", True), ("reference", False)])
@pytest.mark.quick_cases(1)
def test_uniform_8_bit_row_has_the_same_bits_on_every_schedule(implementation, uniform, kv_dtype):
    kind = {} if kv_dtype == "int8" else {"window": 70, "soft_cap": 2.0}
    kind |= {"implementation": implementation, "uniform": uniform, "kv_dtype": kv_dtype}
    assert differing_schedules(**kind) == []


@pytest.mark.full_compile
def test_results_that_depend_on_other_sequences_are_found(monkeypatch):
    def dependent(arrays, **options):
        return attend(arrays, **options) * (1 + 2.0**-20 * float(arrays[-1]))

    monkeypatch.setitem(globals(), "run", dependent)
    found = differing_schedules(implementation="reference", uniform=False)
    assert "7 rows beside 9 sequences" in found and "7 rows beside 0 sequences" not in found


FAULTS = {
    "sees one key too many": ("None, :] < visible", "None, :] <= visible"),
    "sees one key too few": ("seen = position[", "seen = 1 + position["),
    "multiplies values by the mask": (
        "data = jnp.where(exists[..., None], values.data, jnp.zeros((), values.data.dtype))",
        "data = values.data * exists[..., None].astype(values.data.dtype)",
    ),
    "adds the mask to the scores": (
        "scores = jnp.where(seen[:, None], scores, -jnp.inf)",
        "scores = scores - 1e30 * (1 - seen[:, None].astype(jnp.float32))",
    ),
    "forgets to rescale": ("out * decay[..., None] + added", "out + added"),
    "stops a tile early": ("(-(-longest // KV_TILE)", "(longest // KV_TILE"),
    "mixes up heads": ("transpose(0, 3, 1, 2, 4)", "transpose(0, 3, 2, 1, 4)"),
    "sees one key before the window": (
        ">= visible[:, :, None] - window",
        "> visible[:, :, None] - window - 2",
    ),
    "starts a tile late": ("first_tile = first_key //", "first_tile = 1 + first_key //"),
    "uses values before the window": ("(first_key[:, None] <= position) & ", ""),
    "caps before the scale of scores": ("scores = scores * sm_scale", "pass"),
    "forgets the keys' scales": ("scores * keys.scale[:, :, None]", "scores"),
    "multiplies the values' scales by the mask": (
        "jnp.where(exists, values.scale, 0.0)",
        "(values.scale * exists.astype(values.scale.dtype))",
    ),
    "forgets the sinks' weights": ("total + 1.0", "total"),
    "mixes up the heads of sinks": (
        "jnp.repeat(sinks, R // sinks.shape[1], axis=1)",
        "jnp.tile(sinks, (1, R // sinks.shape[1]))",
    ),
}
FAULT_KINDS: dict[str, dict[str, Any]] = {
    "sees one key before the window": {"window": 37},
    "starts a tile late": {"window": 37},
    "uses values before the window": {"window": 37},
    "caps before the scale of scores": {"soft_cap": 2.0},
    "forgets the keys' scales": {"kv_dtype": "int8"},
    "multiplies the values' scales by the mask": {"kv_dtype": "int8"},
    "forgets the sinks' weights": {"sinks": True},
    "mixes up the heads of sinks": {"sinks": True},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.quick_cases(3)
def test_suite_detects_a_planted_fault(fault):
    text, (old, new) = inspect.getsource(xla_file), FAULTS[fault]
    assert text.count(old) == 1
    faulty: dict = {}
    exec(compile(text.replace(old, new), fault, "exec"), faulty)
    decode_only = not fault.startswith("mixes up")
    batch = BATCHES["decode, several groups"] if decode_only else SHORT_ROWS
    kind = FAULT_KINDS.get(fault, {})
    arrays = make(batch, **kind)
    if "window" in kind:
        pass_by(arrays, batch, window=kind["window"])
    options = kind | {"kv_dtype": jnp.dtype(kind.get("kv_dtype", "float32")), "sm_scale": 16**-0.5}
    options["max_q_len"] = 1 if decode_only else SHORT
    if "sinks" in kind:
        options["sinks"] = sinks_of(batch.heads)
    attend = jax.jit(partial(faulty["xla_attention"], **options))
    out = attend(*inputs(arrays, kind.get("kv_dtype")))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        np.testing.assert_allclose(out, arrays.expected, **TOLERANCE)


def test_writes_fill_their_slots_and_drop_the_one_past_the_end():
    rng = np.random.default_rng(0)
    N, K, bs, D = 5, 2, 8, 4
    kv = rng.standard_normal((N, 2, K, bs, D)).astype(np.float32)
    k, v = rng.standard_normal((2, 4, K, D)).astype(np.float32)
    slots = np.array([0, 3 * bs + 5, N * bs, N * bs - 1], np.int32)
    expected = kv.copy()
    for row in (0, 1, 3):
        expected[slots[row] // bs, :, :, slots[row] % bs] = np.stack([k[row], v[row]])
    written = write_kv(jnp.asarray(kv), jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots))
    np.testing.assert_array_equal(written, expected)

    for kv_dtype in (jnp.bfloat16, jnp.float16):
        rounded = jnp.asarray(kv, kv_dtype)
        bits = lax.bitcast_convert_type(rounded, jnp.uint16)
        as_float = write_kv(rounded, jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots))
        as_bits = write_kv(
            bits, jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots), kv_dtype=kv_dtype
        )
        np.testing.assert_array_equal(lax.bitcast_convert_type(as_bits, kv_dtype), as_float)


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_8_bit_rows_are_written_with_their_scales(kv_dtype):
    rng = np.random.default_rng(0)
    N, K, bs, D = 5, 2, 8, 4
    storage = kv_storage_dtype(kv_dtype, "cpu")
    data = rng.integers(-128, 128, (N, 2, K, bs, D)).astype(np.int8).view(storage)
    scale = rng.random((N, 2, K, bs), np.float32)
    k, v = jnp.asarray(rng.standard_normal((2, 4, K, D)), jnp.float32)
    slots = np.array([0, 3 * bs + 5, N * bs, N * bs - 1], np.int32)
    write = jax.jit(partial(write_kv, kv_dtype=kv_dtype))
    old = QuantizedKV(jnp.asarray(data), jnp.asarray(scale))
    for count in (4, 1):
        written = write(old, k[:count], v[:count], jnp.asarray(slots[:count]))
        assert isinstance(written, QuantizedKV) and written.dtype == storage
        expected_data, expected_scale = data.copy(), scale.copy()
        rows, scales = quantize_rows(jnp.stack([k, v], axis=1), kv_dtype)
        for row in {0, 1, 3} & set(range(count)):
            place = slots[row] // bs, slice(None), slice(None), slots[row] % bs
            expected_data[place] = np.asarray(rows)[row].view(storage)
            expected_scale[place] = scales[row]
        np.testing.assert_array_equal(written.data, expected_data)
        np.testing.assert_array_equal(written.scale, expected_scale)


def test_8_bit_keys_are_rotated_before_rounding():
    rng = np.random.default_rng(0)
    H, K, D, T = 4, 2, 16, 5
    qkv = jnp.asarray(rng.standard_normal((T, H + 2 * K, D)), jnp.float32)
    cos, sin = rope_tables(jnp.arange(T) * 7, inverse_frequencies(D, 1e4))
    kv = QuantizedKV(jnp.zeros((3, 2, K, 8, D), jnp.int8), jnp.zeros((3, 2, K, 8)))
    q, written = jax.jit(rotate_and_write)(qkv, kv, cos, sin, jnp.arange(T) + 9)
    rotated = apply_rope(qkv[:, : H + K], cos, sin)
    np.testing.assert_allclose(q, rotated[:, :H], rtol=1e-6, atol=1e-6)
    pairs = jnp.stack([rotated[:, H:], qkv[:, H + K :]]).transpose(0, 2, 1, 3)  # [2, K, T, D]
    error = jnp.abs(dequantize_rows(*written)[1, :, :, 1 : 1 + T] - pairs)
    assert (error <= 0.5001 * jnp.abs(pairs).max(axis=-1, keepdims=True) / 127).all()


@pytest.mark.full_compile
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", *EIGHT_BITS])
@pytest.mark.quick_cases(2)
def test_donated_cache_is_written_and_read_in_place(kv_dtype, rows):
    form = kv_shape_dtype((512, 2, 2, 16, 64), kv_storage_dtype(kv_dtype, "cpu"))
    kv = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), form)
    k, i32 = jnp.ones((rows, 2, 64), jnp.bfloat16), partial(jnp.ones, dtype=jnp.int32)
    arrays = (k, jnp.arange(rows), i32((rows, 8)), i32(rows), jnp.arange(rows + 1), jnp.int32(rows))

    @partial(jax.jit, donate_argnums=0)
    def step(kv, k, slots, *rest):
        kv = write_kv(kv, k, k, slots, kv_dtype=kv_dtype)
        out = ragged_paged_attention(
            k, kv, *rest, sm_scale=1.0, kv_dtype=kv_dtype, max_q_len=1, implementation="xla"
        )
        return kv, out

    sizes = [array.nbytes for array in jax.tree.leaves(kv)]
    memory = step.lower(kv, *arrays).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(sizes)
    tile_bytes = rows * KV_TILE * 2 * 2 * 64 * 2
    assert memory.temp_size_in_bytes < 3 * tile_bytes + 2**16
    assert rows > 1 or memory.temp_size_in_bytes < sum(sizes) / 8
    before = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(kv)]
    written, _ = step(kv, *arrays)
    assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(written)] == before
    assert all(np.asarray(array).any() for array in jax.tree.leaves(written))


def test_16_and_8_bit_floats_are_stored_as_bits_only_on_cpu():
    assert kv_storage_dtype("bfloat16", "cpu") == jnp.uint16
    assert kv_storage_dtype("float16", "cpu") == jnp.uint16
    assert kv_storage_dtype("float32", "cpu") == jnp.float32
    assert kv_storage_dtype("bfloat16", "gpu") == jnp.bfloat16
    assert kv_storage_dtype("float8_e4m3fn", "cpu") == jnp.uint8
    assert kv_storage_dtype("float8_e4m3fn", "gpu") == jnp.float8_e4m3fn
    assert kv_storage_dtype("int8", "cpu") == kv_storage_dtype("int8", "gpu") == jnp.int8
    with pytest.raises(TypeError, match="got float8_e5m2"):
        kv_storage_dtype("float8_e5m2", "cpu")


def test_8_bit_cache_has_a_scale_per_row():
    shape = (5, 2, 3, 8, 16)
    assert kv_shape_dtype(shape, jnp.uint16) == jax.ShapeDtypeStruct(shape, jnp.uint16)
    for storage in (jnp.int8, jnp.uint8, jnp.float8_e4m3fn):
        data, scale = kv_shape_dtype(shape, storage)
        assert data == jax.ShapeDtypeStruct(shape, storage)
        assert scale == jax.ShapeDtypeStruct(shape[:-1], jnp.float32)


def test_mismatched_8_bit_caches_are_rejected():
    q, kv, *rest = inputs(make(BATCHES["no padding"]))
    call = partial(ragged_paged_attention, sm_scale=1.0)
    int8, fp8 = quantized(kv, "int8"), quantized(kv, "float8_e4m3fn")
    with pytest.raises(TypeError, match="stored as uint8: kv_dtype must be float8_e4m3fn"):
        call(q, fp8, *rest)
    with pytest.raises(TypeError, match="kv_dtype must be int8 like kv, got float8_e4m3fn"):
        call(q, int8, *rest, kv_dtype="float8_e4m3fn")
    with pytest.raises(TypeError, match="data of a QuantizedKV must be int8 or "):
        call(q, int8._replace(data=kv), *rest)
    with pytest.raises(ValueError, match=r"scale .* does not fit the data .* of a QuantizedKV"):
        call(q, int8._replace(scale=int8.scale[..., None]), *rest)
    with pytest.raises(TypeError, match="got float16"):
        write_kv(int8._replace(scale=int8.scale.astype(jnp.float16)), q, q, jnp.zeros(13))
    with pytest.raises(TypeError, match="or uint16, got uint8"):
        write_kv(fp8.data, q, q, jnp.zeros(13), kv_dtype="float8_e4m3fn")
    wide = QuantizedKV(jnp.zeros((*int8.shape[:-1], 32), jnp.int8), int8.scale)
    with pytest.raises(TypeError, match="queries must be bfloat16, not float32"):
        call(jnp.zeros((*q.shape[:-1], 32)), wide, *rest, implementation="cpu")
    with pytest.raises(TypeError, match="the GPU kernels do not support this attention: "):
        call(q, int8, *rest, implementation="mosaic")


@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu", "mosaic"])
def test_invalid_windows_soft_caps_and_sinks_are_rejected(implementation):
    arrays = inputs(make(BATCHES["no padding"]))
    call = partial(ragged_paged_attention, *arrays, sm_scale=1.0, implementation=implementation)
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        call(window=0)
    for soft_cap in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="soft_cap must be positive"):
            call(soft_cap=soft_cap)
    with pytest.raises(ValueError, match=r"sinks must be \[4\], one per query head, got \(2,\)"):
        call(sinks=jnp.zeros(2))
    with pytest.raises(TypeError, match="sinks must be float32, got bfloat16"):
        call(sinks=jnp.zeros(4, jnp.bfloat16))


@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu"])
@pytest.mark.parametrize("sink", [-jnp.inf, -1e30, 1e30])
def test_extreme_sinks_change_nothing_or_take_all_weight(implementation, sink):
    batch = BATCHES["mixed"].for_cpu()
    q, kv, *rest = inputs(make(batch))
    if implementation == "cpu":
        kv = lax.bitcast_convert_type(kv.astype(jnp.bfloat16), jnp.uint16)
    options = {"implementation": implementation, "sm_scale": 0.25}
    if implementation == "cpu":
        options["kv_dtype"] = jnp.bfloat16
    call = partial(ragged_paged_attention, q.astype(jnp.bfloat16), kv, *rest, **options)
    rows = sum(rows for rows, _ in batch.seqs)
    without, out = (
        np.asarray(call(sinks=sinks), np.float32)[:rows]
        for sinks in (None, jnp.full(batch.heads, sink, jnp.float32))
    )
    np.testing.assert_array_equal(out, without if sink < 0 else np.zeros_like(out))


def test_mismatched_inputs_are_rejected():
    q, kv, tables, lens, cu, num = inputs(make(BATCHES["no padding"]))
    call = partial(ragged_paged_attention, sm_scale=1.0)
    bits = jnp.zeros(kv.shape, jnp.uint16)
    with pytest.raises(ValueError, match=r"implementation must be one of .*, got 'magic'"):
        call(q, kv, tables, lens, cu, num, implementation="magic")
    with pytest.raises(TypeError, match="kv_dtype must be"):
        call(q, bits, tables, lens, cu, num)
    with pytest.raises(TypeError, match="kv_dtype must be float32 like kv"):
        call(q, kv, tables, lens, cu, num, kv_dtype=jnp.bfloat16)
    with pytest.raises(TypeError, match="got int8"):
        call(q, kv.astype(jnp.int8), tables, lens, cu, num)
    with pytest.raises(ValueError, match="heads"):
        call(q[:, :3], kv, tables, lens, cu, num)
    with pytest.raises(ValueError, match="cu_q_lens"):
        call(q, kv, tables, lens, cu[:-1], num)
    with pytest.raises(ValueError, match="slot_mapping"):
        write_kv(kv, q[:, :2], q[:, :2], jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="do not fit a cache"):
        write_kv(kv, q, q, jnp.zeros(q.shape[0], jnp.int32))


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_write_that_does_not_fit_the_cache_is_rejected(implementation):
    qkv, kv = jnp.zeros((3, 6, 32), jnp.bfloat16), jnp.zeros((4, 2, 2, 8, 32), jnp.uint16)
    angles, slots = jnp.zeros((3, 16)), jnp.zeros(3, jnp.int32)
    write = partial(rotate_and_write, kv_dtype=jnp.bfloat16, implementation=implementation)
    with pytest.raises(ValueError, match="heads of qkv"):
        write(qkv[:, :4], kv, angles, angles, slots)
    with pytest.raises(ValueError, match="heads of qkv"):
        write(qkv[..., :16], kv, angles, angles, slots)
    with pytest.raises(ValueError, match="do not fit 3 tokens and heads of 32"):
        write(qkv, kv, angles[:, :8], angles, slots)
    with pytest.raises(ValueError, match="do not fit 3 tokens and heads of 32"):
        write(qkv, kv, *(jnp.zeros((3, 17)),) * 2, slots)
    with pytest.raises(ValueError, match="do not fit 3 tokens and heads of 32"):
        write(qkv, kv, angles, angles, slots[:2])


@pytest.mark.slow
def test_gradient_leads_to_queries_sinks_and_a_float32_cache():
    q, kv, *rest = inputs(make(BATCHES["no padding"]))

    def loss(q, kv, implementation, sinks=None):
        options = {"sm_scale": 0.3, "implementation": implementation, "sinks": sinks}
        out = ragged_paged_attention(q, kv, *rest, **options)
        return jnp.sum(out * jnp.sin(jnp.arange(out.size)).reshape(out.shape))

    by_q, by_kv = jax.grad(loss, argnums=(0, 1))(q, kv, "reference")
    used = np.isfinite(np.asarray(kv))
    assert np.isfinite(by_q).all() and np.isfinite(by_kv).all()
    assert np.abs(np.asarray(by_kv)[used]).max() > 0.01
    assert (np.asarray(by_kv)[~used] == 0).all()
    for ours, theirs in zip(jax.grad(loss, (0, 1))(q, kv, "xla"), (by_q, by_kv), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-4)

    sinks, step = jnp.asarray(sinks_of(4)), 1e-2
    by_sink = jax.grad(loss, argnums=3)(q, kv, "reference", sinks)
    higher, lower = (loss(q, kv, "reference", sinks.at[1].add(s)) for s in (step, -step))
    assert float(by_sink[1]) == pytest.approx(float(higher - lower) / (2 * step), rel=1e-2)
    np.testing.assert_allclose(jax.grad(loss, 3)(q, kv, "xla", sinks), by_sink, rtol=1e-4)


def test_gradient_of_a_cache_that_is_not_float32_is_rejected():
    q, kv, *rest = inputs(make(BATCHES["no padding"]))

    def loss(q, kv):
        return ragged_paged_attention(q, kv, *rest, sm_scale=0.3).sum()

    with pytest.raises(NotImplementedError, match="only if it is float32"):
        jax.eval_shape(jax.grad(loss, argnums=1), q, kv.astype(jnp.bfloat16))
    int8 = quantized(kv, "int8")
    with pytest.raises(NotImplementedError, match="only if it is float32"):
        jax.eval_shape(jax.grad(lambda s: loss(q, int8._replace(scale=s))), int8.scale)

    def through_bits(k):
        kv = write_kv(
            jnp.zeros((2, 2, 2, 8, 16), jnp.uint16), k, k, jnp.arange(3), kv_dtype=jnp.bfloat16
        )
        return kv.astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match="only if it is float32"):
        jax.grad(through_bits)(jnp.ones((3, 2, 16)))


@pytest.mark.full_compile
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        *((name, "bfloat16") for name in SHAPES),
        ("tinyllama-1b", "int8"),
        ("tinyllama-1b", "float8_e4m3fn"),
        ("gemma-2-9b", "float8_e4m3fn"),
    ],
)
@pytest.mark.quick_cases(2)
def test_temporaries_stay_small_at_real_model_shapes(name, kv_dtype):
    """A copy or a conversion of the pool would exceed the bound 60 times."""
    shape = SHAPES[name]
    S, bs, max_blocks, N = 16, 16, 128, 4096
    pool_shape = (N, 2, shape.kv_heads, bs, shape.head_dim)
    pool = kv_shape_dtype(pool_shape, kv_storage_dtype(kv_dtype, "cpu"))
    i32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)

    def step(kv, q, k, v, slots, tables, lens, cu, num):
        kv = write_kv(kv, k, v, slots, kv_dtype=kv_dtype)
        out = ragged_paged_attention(
            q,
            kv,
            tables,
            lens,
            cu,
            num,
            sm_scale=1.0,
            kv_dtype=kv_dtype,
            max_q_len=1,
            window=shape.window,
            soft_cap=shape.soft_cap,
            sinks=jnp.zeros(shape.heads) if shape.sinks else None,
        )
        return kv, out

    q = jax.ShapeDtypeStruct((S, shape.heads, shape.head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((S, shape.kv_heads, shape.head_dim), jnp.bfloat16)
    lowered = jax.jit(step, donate_argnums=0).lower(
        pool, q, k, k, i32((S,)), i32((S, max_blocks)), i32((S,)), i32((S + 1,)), i32(())
    )
    temp = lowered.compile().memory_analysis().temp_size_in_bytes
    tile_bytes = S * KV_TILE * 2 * shape.kv_heads * shape.head_dim * 2
    scores_bytes = S * shape.heads * KV_TILE * 4
    assert temp < 3 * (tile_bytes + scores_bytes) + 2**20
    assert temp < np.prod(pool_shape) * jnp.dtype(kv_dtype).itemsize / 8
