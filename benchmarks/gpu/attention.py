"""Paged attention on the device: correctness, and speed relative to memory and compute limits."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import errors, predicted
from benchmarks.gpu.clock import seconds
from benchmarks.gpu.device import copy_bytes_per_s
from benchmarks.gpu.parts import Case
from forge_kernels import cpu
from forge_kernels.attention import QuantizedKV, ragged_paged_attention
from forge_kernels.attention.api import Implementation
from forge_kernels.attention.shapes import LLAMA_3_1_8B, SHAPES, AttentionShape

BLOCK_SIZE = 64
BATCHES, CONTEXTS = (1, 8, 64, 256), (1024, 4096, 32768)
KV_BYTES = 1_500_000_000  # all layers together, at least: far more than any cache holds
MAX_KV_BYTES = 60_000_000_000
MAX_LAYERS = 32
# With more tokens in the cache, plain XLA's loops, which the host drives, take too long.
MAX_XLA_TOKENS = 300_000
# These have head sizes 128, 64, 80, 96 and 256. Phi-3 has a window, Gemma 2 also a soft cap.
HEAD_SIZES = ("llama-3.1-8b", "llama-3.2-1b", "phi-2", "phi-3-mini", "gemma-2-9b")
TOLERANCE = 2.0**-7  # relative to the largest value: two roundings of bfloat16


@dataclass(frozen=True)
class Batch:
    """Sequences as (rows, context), in blocks in random order."""

    seqs: Sequence[tuple[int, int]]
    block_size: int = BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        return sum(-(-context // self.block_size) for _, context in self.seqs)

    def arrays(self) -> dict[str, Any]:
        most = max(-(-context // self.block_size) for _, context in self.seqs)
        order = np.random.default_rng(0).permutation(self.num_blocks)
        tables, used = np.zeros((len(self.seqs), most), np.int32), 0
        for table, (_, context) in zip(tables, self.seqs, strict=True):
            count = -(-context // self.block_size)
            table[:count] = order[used : used + count]
            used += count
        rows = np.cumsum([0, *(rows for rows, _ in self.seqs)], dtype=np.int32)
        return {
            "block_tables": jnp.asarray(tables),
            "kv_lens": jnp.asarray([context for _, context in self.seqs], jnp.int32),
            "cu_q_lens": jnp.asarray(rows),
            "num_seqs": jnp.int32(len(self.seqs)),
        }

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.seqs)


def implementations() -> list[str]:
    """Return the implementations that this device can run, without the oracle, the best first."""
    platform = jax.devices()[0].platform
    if platform == "cpu":
        cpu.available()  # also loads the kernels
    others = {"cpu": ("cpu",), "gpu": ("mosaic",), "cuda": ("mosaic",)}.get(platform, ())
    return [*others, *(name for name in get_args(Implementation) if name == "xla")]


def kinds() -> list[tuple[str, str]]:
    """Return (implementation, cache type): each in bfloat16, and the best that supports 8 bits."""
    found = implementations()
    best = "mosaic" if "mosaic" in found else "xla"
    return [*((name, "bfloat16") for name in found), (best, "fp8"), (best, "int8")]


@dataclass(frozen=True)
class Check:
    """A comparison with the float32 reference.

    Attributes:
      poison: entries that no sequence owns are NaN.
      uniform: as in `--deterministic`.
    """

    implementation: str
    kv_dtype: str
    shape: str
    kind: str
    block_size: int
    poison: bool = False
    uniform: bool = False

    @property
    def name(self) -> str:
        parts = (self.shape, self.kind, f"blocks of {self.block_size}", self.kv_dtype)
        flags = [word for word in ("poison", "uniform") if getattr(self, word)]
        return ", ".join((*parts, *flags, self.implementation))

    def case(self, contexts: tuple[int, int, int]) -> Case:
        return Case(self.name, functools.partial(_error, self, batches(contexts)[self.kind]), 40.0)


def batches(contexts: tuple[int, int, int]) -> dict[str, Batch]:
    """Return ragged batches with these contexts."""
    short, long, prompt = contexts[0], contexts[1], contexts[2]
    return {
        "decode": Batch([(1, context) for context in contexts]),
        "verify": Batch([(5, context) for context in contexts]),
        "mixed": Batch([(1, short), (4, long), (prompt, prompt), (33, short)]),
    }


def _contexts(tiny: bool) -> tuple[int, int, int]:
    return (40, 70, 33) if tiny else (1000, 4000, 700)


def first(tiny: bool) -> Iterator[Case]:
    """Yield the smallest check of the best kernel."""
    yield Check(implementations()[0], "bfloat16", "llama-3.1-8b", "decode", 64).case(
        _contexts(tiny)
    )


def numerics(tiny: bool) -> Iterator[Case]:
    """Yield the checks whose failure would make later figures worthless."""
    yield from (check.case(_contexts(tiny)) for check in _checks(tiny))


def more_numerics(tiny: bool) -> Iterator[Case]:
    """Yield checks of the other shapes, cache types and options; plain XLA comes last."""
    before = set(_checks(tiny))
    checks: list[Check] = []
    for implementation, kv_dtype in sorted(kinds(), key=lambda kind: kind[0] == "xla"):
        check = functools.partial(Check, implementation, kv_dtype)
        checks += [check("llama-3.1-8b", "decode", 64, poison=True)]
        checks += [check("llama-3.1-8b", kind, 64) for kind in ("mixed", "verify")]
        if implementation != "xla" and not tiny:
            checks += [check(name, "mixed", 64) for name in HEAD_SIZES]
            checks += [check("llama-3.1-8b", "mixed", 64, uniform=True)]
            checks += [check(name, "decode", 16) for name in HEAD_SIZES]
    for check in dict.fromkeys(checks):
        if check not in before:
            yield check.case(_contexts(tiny))


def _checks(tiny: bool) -> list[Check]:
    """Return the most important checks: 16 and 8 bits, head sizes 64, 128 and 256, NaN."""
    checks: list[Check] = []
    for implementation, kv_dtype in kinds():
        if implementation == implementations()[0] or kv_dtype == "fp8":
            check = functools.partial(Check, implementation, kv_dtype)
            checks += [check("llama-3.1-8b", "decode", 64, poison=True)]
            names = ("llama-3.1-8b",) if tiny else ("llama-3.1-8b", "llama-3.2-1b", "gemma-2-9b")
            checks += [check(name, "mixed", 64) for name in names if kv_dtype != "int8"]
    return checks


def _error(check: Check, batch: Batch) -> dict[str, Any]:
    shape, batch = SHAPES[check.shape], Batch(batch.seqs, check.block_size)
    q, kv = _values(shape, batch, layers=1, kv_dtype=check.kv_dtype)
    arrays = batch.arrays()
    reference = functools.partial(
        ragged_paged_attention, **arrays, implementation="reference", **_scoring(shape)
    )
    exact = jax.jit(reference)(q.astype(jnp.float32), kv[0])
    if check.poison:
        kv = [_poisoned(layer, batch) for layer in kv]
    attend = _attend(check.implementation, shape, batch, arrays, uniform=check.uniform)
    return errors.row(attend(q, kv), exact, TOLERANCE)


def _poisoned(layer: jax.Array | QuantizedKV, batch: Batch) -> jax.Array | QuantizedKV:
    """Set the entries beyond each sequence, which only its last block has, to NaN."""
    tables = np.asarray(batch.arrays()["block_tables"])
    last = [
        table[-(-context // batch.block_size) - 1]
        for table, (_, context) in zip(tables, batch.seqs, strict=True)
    ]
    begin = np.full(batch.num_blocks, batch.block_size)
    begin[last] = [(context - 1) % batch.block_size + 1 for _, context in batch.seqs]
    unused = jnp.asarray(np.arange(batch.block_size) >= begin[:, None])[:, None, None]
    if isinstance(layer, QuantizedKV):  # int8 has no NaN, but its scales have
        return QuantizedKV(layer.data, jnp.where(unused, jnp.nan, layer.scale))
    return jnp.where(unused[..., None], jnp.nan, layer).astype(layer.dtype)


def _scoring(shape: AttentionShape) -> dict[str, Any]:
    scale = shape.head_dim**-0.5
    return {"sm_scale": scale, "window": shape.window, "soft_cap": shape.soft_cap}


@functools.cache
def _ceiling(tiny: bool) -> float:
    return copy_bytes_per_s(tiny)


def decode(tiny: bool) -> Iterator[Case]:
    """Yield times of decodes: bytes/s of keys and values, and the ratio to a copy."""
    sizes, contexts = ((1, 3), (128,)) if tiny else (BATCHES, CONTEXTS)
    for context in contexts:
        for count in sizes:
            batch = Batch([(1, context)] * count)
            for implementation, kv_dtype in kinds():
                layers = _layers(LLAMA_3_1_8B, batch, kv_dtype, tiny)
                name = f"{count} x {context}, {kv_dtype}, {implementation}"
                if layers and (implementation != "xla" or count * context <= MAX_XLA_TOKENS):
                    run = functools.partial(_decode, implementation, kv_dtype, batch, layers, tiny)
                    yield Case(name, run, 40.0)


def _decode(
    implementation: str, kv_dtype: str, batch: Batch, layers: int, tiny: bool
) -> dict[str, Any]:
    shape, (_, context) = LLAMA_3_1_8B, batch.seqs[0]
    q, kv = _values(shape, batch, layers, kv_dtype)
    attend = _attend(implementation, shape, batch, batch.arrays(), max_q_len=1)
    per_layer_s = seconds(lambda: attend(q, kv)) / layers
    read = _token_bytes(shape, kv_dtype) * context * len(batch.seqs)
    rate = read / per_layer_s
    expected = {}
    if implementation == "mosaic" and not tiny:
        expected = predicted.attention(shape, len(batch.seqs), context, kv_dtype)
    row = {"us": 1e6 * per_layer_s, **expected}
    return {**row, "bytes_per_s": rate, "of_copy": rate / _ceiling(tiny)}


def prefill(tiny: bool) -> Iterator[Case]:
    """Yield times of whole prompts: TFLOP/s (causal, half of the square), and cuDNN's."""
    for length in (128,) if tiny else (1024, 4096, 16384):
        for implementation in (*implementations(), "cudnn"):
            run = functools.partial(_prefill, implementation, length)
            yield Case(f"{length} tokens, {implementation}", run, 30.0)


def _prefill(implementation: str, length: int) -> dict[str, Any]:
    shape, batch = LLAMA_3_1_8B, Batch([(length, length)])
    flops = 2 * 2 * shape.heads * shape.head_dim * length * (length + 1) / 2
    if implementation == "cudnn":
        call = _cudnn(shape, length)
    else:
        q, kv = _values(shape, batch, layers=1)
        attend = _attend(implementation, shape, batch, batch.arrays())

        def call() -> jax.Array:
            return attend(q, kv)

    taken_s = seconds(call)
    return {"ms": 1e3 * taken_s, "tflops": 1e-12 * flops / taken_s}


def _cudnn(shape: AttentionShape, length: int) -> Any:
    key = jax.random.key(1)
    q = jax.random.normal(key, (1, length, shape.heads, shape.head_dim), jnp.bfloat16)
    k = jax.random.normal(key, (1, length, shape.kv_heads, shape.head_dim), jnp.bfloat16)

    @jax.jit
    def attend(q: jax.Array, k: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn")

    return lambda: attend(q, k)


def _token_bytes(shape: AttentionShape, kv_dtype: str) -> int:
    """Return the bytes of one token's keys and values in one layer, scales included."""
    row = 2 * shape.head_dim if kv_dtype == "bfloat16" else shape.head_dim + 4
    return 2 * shape.kv_heads * row


def _layers(shape: AttentionShape, batch: Batch, kv_dtype: str, tiny: bool) -> int:
    """Return enough layers to make the KV larger than caches, or 0 if not even one fits."""
    if tiny:
        return 2
    layer = _token_bytes(shape, kv_dtype) * batch.num_blocks * batch.block_size
    if layer > MAX_KV_BYTES:
        return 0
    return max(1, min(MAX_LAYERS, -(-KV_BYTES // layer)))


def _values(
    shape: AttentionShape, batch: Batch, layers: int, kv_dtype: str = "bfloat16"
) -> tuple[jax.Array, list[jax.Array | QuantizedKV]]:
    """Return queries in bfloat16 and the cache of each layer."""
    keys = jax.random.split(jax.random.key(0), layers + 1)
    q = jax.random.normal(keys[0], (batch.rows, shape.heads, shape.head_dim), jnp.bfloat16)
    size = (batch.num_blocks, 2, shape.kv_heads, batch.block_size, shape.head_dim)

    @jax.jit
    def make(key: jax.Array) -> jax.Array | QuantizedKV:
        values = jax.random.normal(key, size, jnp.bfloat16)
        if kv_dtype == "bfloat16":
            return values
        # Not rounded row by row, because the largest caches leave no room for a second one in
        # float32.
        scale = jax.random.uniform(key, size[:-1], minval=0.5, maxval=1.5)
        if kv_dtype == "int8":
            return QuantizedKV(jnp.clip(25 * values, -127, 127).astype(jnp.int8), scale / 25)
        return QuantizedKV((100 * values).astype(jnp.float8_e4m3fn), scale / 100)

    return q, [make(key) for key in keys[1:]]


def _attend(
    implementation: str,
    shape: AttentionShape,
    batch: Batch,
    arrays: dict[str, Any],
    max_q_len: int | None = None,
    uniform: bool = False,
) -> Any:
    """Return a jitted function of queries and caches that chains the layers."""
    bits = implementation == "cpu"

    @jax.jit
    def attend(q: jax.Array, kv: list[Any]) -> jax.Array:
        for layer in kv:
            if bits:
                layer = jax.lax.bitcast_convert_type(layer, jnp.uint16)
            q = ragged_paged_attention(
                q,
                layer,
                **arrays,
                **_scoring(shape),
                kv_dtype=jnp.bfloat16 if bits else None,
                max_q_len=max_q_len,
                uniform=uniform,
                implementation=implementation,  # type: ignore[arg-type]
            ).astype(q.dtype)
        return q

    return attend
