"""Writes of new keys and values into the cache, alone: the gain that another kernel could bring.

The step rotates queries and keys and writes keys and values by one scatter per layer, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.clock import seconds
from benchmarks.gpu.parts import Case
from forge_kernels.attention import rotate_and_write, write_kv
from forge_kernels.attention.shapes import LLAMA_3_1_8B

BATCHES = (1, 64, 256)
LAYERS = 32
BLOCKS = 1024  # per layer


def write(tiny: bool) -> Iterator[Case]:
    """Yield us per layer for each batch size, for the scatter alone and after the rotation."""
    for batch in (1, 4) if tiny else BATCHES:
        yield Case(f"batch {batch}", partial(_row, batch, tiny), 20.0)


def _row(batch: int, tiny: bool) -> dict[str, Any]:
    layers, blocks = (2, 16) if tiny else (LAYERS, BLOCKS)
    return {
        "bytes": 2 * 2 * LLAMA_3_1_8B.kv_heads * LLAMA_3_1_8B.head_dim * batch,
        "scatter_us": 1e6 * _per_layer_s(_scatter, batch, layers, blocks),
        "rotate_and_scatter_us": 1e6 * _per_layer_s(_rotate_and_scatter, batch, layers, blocks),
    }


def _scatter(qkv: jax.Array, kv: jax.Array, half: jax.Array, slots: jax.Array):
    K = LLAMA_3_1_8B.kv_heads
    return qkv, write_kv(kv, qkv[:, -2 * K : -K], qkv[:, -K:], slots)


def _rotate_and_scatter(qkv: jax.Array, kv: jax.Array, half: jax.Array, slots: jax.Array):
    q, kv = rotate_and_write(qkv, kv, half, half, slots)
    # The next layer's input is made of this one's queries, so that no layer is optimized away.
    return jnp.concatenate([q, qkv[:, q.shape[1] :]], axis=1), kv


def _per_layer_s(call: Callable[..., Any], batch: int, layers: int, blocks: int) -> float:
    shape, block_size = LLAMA_3_1_8B, 64
    key = jax.random.key(0)
    heads = shape.heads + 2 * shape.kv_heads
    qkv = jax.random.normal(key, (batch, heads, shape.head_dim), jnp.bfloat16)
    half = jax.random.normal(key, (batch, shape.head_dim // 2), jnp.float32)
    slots = np.random.default_rng(0).permutation(blocks * block_size)[:batch]
    size = (blocks, 2, shape.kv_heads, block_size, shape.head_dim)
    cache = [jnp.zeros(size, jnp.bfloat16) for _ in range(layers)]

    @partial(jax.jit, donate_argnums=0)
    def step(cache: list[jax.Array], qkv: jax.Array, half: jax.Array, slots: jax.Array):
        written = []
        for kv in cache:
            qkv, kv = call(qkv, kv, half, slots)
            written.append(kv)
        return written, qkv

    def run() -> jax.Array:
        nonlocal cache
        cache, out = step(cache, qkv, half, jnp.asarray(slots, jnp.int32))
        return out

    return seconds(run) / layers
