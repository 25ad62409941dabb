"""Paged attention on the device: correctness, and speed relative to memory and compute limits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.clock import seconds
from benchmarks.gpu.device import copy_bytes_per_s
from forge_kernels import cpu
from forge_kernels.attention import QuantizedKV, ragged_paged_attention
from forge_kernels.attention.api import Implementation
from forge_kernels.attention.shapes import LLAMA_3_1_8B, LLAMA_3_2_1B, AttentionShape

BLOCK_SIZE = 64
BATCHES, CONTEXTS = (1, 8, 64, 256), (1024, 4096, 32768)
KV_BYTES = 1_500_000_000  # of all layers together, at least: far more than any cache holds
MAX_KV_BYTES = 60_000_000_000
MAX_LAYERS = 32
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
    """Return the implementations that this device can run, without the oracle."""
    platform = jax.devices()[0].platform
    if platform == "cpu":
        cpu.available()  # also loads the kernels
    others = {"cpu": ("cpu",), "gpu": ("mosaic",), "cuda": ("mosaic",)}.get(platform, ())
    return [name for name in get_args(Implementation) if name in ("xla", *others)]


def cases() -> list[tuple[str, str]]:
    """Return (implementation, cache type): each in bfloat16, and the best that supports fp8."""
    found = implementations()
    best = "mosaic" if "mosaic" in found else "xla"
    return [*((name, "bfloat16") for name in found), (best, "fp8")]


def numerics(tiny: bool) -> list[dict[str, Any]]:
    """Compare each implementation with the float32 reference, on ragged batches of real shapes."""
    contexts = (20, 70, 33) if tiny else (1000, 4000, 700)
    batches = {
        "decode": Batch([(1, context) for context in contexts]),
        "verify": Batch([(5, context) for context in contexts]),
        "decode, verify and prompts": Batch(
            [(1, contexts[0]), (4, contexts[1]), (contexts[2], contexts[2]), (33, contexts[0])]
        ),
    }
    shapes = {"llama-3.1-8b": LLAMA_3_1_8B}
    if not tiny:
        shapes["llama-3.2-1b"] = LLAMA_3_2_1B
    return [
        _error(implementation, kv_dtype, name, shape, kind, batch, block_size)
        for implementation, kv_dtype in cases()
        for name, shape in shapes.items()
        for kind, batch in list(batches.items())[-1 if tiny else 0 :]
        for block_size in ((16,) if tiny else (16, 64))
    ]


def _error(
    implementation: str,
    kv_dtype: str,
    name: str,
    shape: AttentionShape,
    kind: str,
    batch: Batch,
    block_size: int,
) -> dict[str, Any]:
    batch = Batch(batch.seqs, block_size)
    q, kv = _values(shape, batch, layers=1, kv_dtype=kv_dtype)
    arrays = batch.arrays()
    reference = functools.partial(
        ragged_paged_attention, **arrays, implementation="reference", sm_scale=shape.head_dim**-0.5
    )
    exact = jax.jit(reference)(q.astype(jnp.float32), kv[0])
    row = {
        "implementation": implementation, "kv": kv_dtype, "shape": name, "batch": kind,
        "block": block_size,
    }  # fmt: skip
    try:
        got = _attend(implementation, shape, batch, arrays)(q, kv)
        error = float(jnp.abs(got.astype(jnp.float32) - exact).max() / jnp.abs(exact).max())
    except Exception as failure:
        return {**row, "failed": f"{type(failure).__name__}: {failure}"[:300]}
    return {**row, "error": error, "right": bool(error < TOLERANCE)}


def decode(tiny: bool) -> dict[str, Any]:
    """Time one query row per sequence: GB/s of keys and values, and the ratio to a copy."""
    batches, contexts = ((1, 3), (128,)) if tiny else (BATCHES, CONTEXTS)
    ceiling = copy_bytes_per_s(tiny)
    rows = []
    for context in contexts:
        for batch_size in batches:
            batch = Batch([(1, context)] * batch_size)
            for implementation, kv_dtype in cases():
                layers = _layers(LLAMA_3_1_8B, batch, kv_dtype, tiny)
                if layers:
                    rows.append(_decode(implementation, kv_dtype, batch, layers, ceiling))
    return {"copy_bytes_per_s": ceiling, "rows": rows}


def _decode(
    implementation: str, kv_dtype: str, batch: Batch, layers: int, ceiling: float
) -> dict[str, Any]:
    shape, (_, context) = LLAMA_3_1_8B, batch.seqs[0]
    row: dict[str, Any] = {
        "implementation": implementation, "kv": kv_dtype, "batch": len(batch.seqs),
        "context": context,
    }  # fmt: skip
    try:
        q, kv = _values(shape, batch, layers, kv_dtype)
        attend = _attend(implementation, shape, batch, batch.arrays(), max_q_len=1)
        per_layer_s = seconds(lambda: attend(q, kv)) / layers
    except Exception as failure:
        return {**row, "failed": f"{type(failure).__name__}: {failure}"[:300]}
    read = _token_bytes(shape, kv_dtype) * context * len(batch.seqs)
    rate = read / per_layer_s
    return {**row, "us": 1e6 * per_layer_s, "bytes_per_s": rate, "of_copy": rate / ceiling}


def prefill(tiny: bool) -> list[dict[str, Any]]:
    """Time whole prompts: TFLOP/s (causal, half of the square), next to cuDNN."""
    rows = []
    for length in (128,) if tiny else (1024, 4096, 16384):
        shape, batch = LLAMA_3_1_8B, Batch([(length, length)])
        flops = 2 * 2 * shape.heads * shape.head_dim * length * (length + 1) / 2
        q, kv = _values(shape, batch, layers=1)
        row: dict[str, Any] = {"length": length}
        for implementation in implementations():
            attend = _attend(implementation, shape, batch, batch.arrays())
            row[implementation] = _flops(lambda: attend(q, kv), flops)  # noqa: B023
        contiguous = functools.partial(_cudnn, shape, length)
        row["cudnn"] = _flops(contiguous(), flops)
        rows.append(row)
    return rows


def _flops(call: Any, flops: float) -> float | str:
    try:
        return flops / seconds(call)
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"[:200]


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
    row = shape.head_dim + 4 if kv_dtype == "fp8" else 2 * shape.head_dim
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
        return QuantizedKV((100 * values).astype(jnp.float8_e4m3fn), scale / 100)

    return q, [make(key) for key in keys[1:]]


def _attend(
    implementation: str,
    shape: AttentionShape,
    batch: Batch,
    arrays: dict[str, Any],
    max_q_len: int | None = None,
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
                sm_scale=shape.head_dim**-0.5,
                kv_dtype=jnp.bfloat16 if bits else None,
                max_q_len=max_q_len,
                implementation=implementation,  # type: ignore[arg-type]
            ).astype(q.dtype)
        return q

    return attend
