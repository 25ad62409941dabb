"""The bytes and operations of the attention kernels, counted from their own plan."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.aot.costs import Attention
from forge_kernels.attention.mosaic_gpu import attention_geometry
from forge_kernels.attention.plan import KV_TILE, SLICE, Plan, Sum, Tile, make_plan
from forge_kernels.attention.shapes import AttentionShape
from forge_kernels.devices import Gpu

PARTIAL_BYTES, SUM_BYTES = 4, 4  # per value of a partial result, and per sum of probabilities


def decode_attention(
    shape: AttentionShape,
    gpu: Gpu,
    *,
    batch: int,
    context: int,
    tokens: int | None = None,
    max_context: int | None = None,
    kv_dtype: Any = "bfloat16",
) -> Attention:
    """Return the work of one layer for `batch` sequences that each decode a token.

    Args:
      context: tokens of each sequence, with the new one.
      tokens: token count of the step's shape; default: `batch`.
      max_context: tokens of a block table; default: `context`.
    """
    tokens = tokens or batch
    dtypes = (jnp.dtype(jnp.bfloat16), jnp.dtype(kv_dtype))
    geometry = attention_geometry(
        tokens=tokens,
        seqs=tokens,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_context=max_context or context,
        max_q_len=1,
        dtypes=dtypes,
        device=gpu,
        window=shape.window,
    )
    lengths = np.where(np.arange(tokens) < batch, context, 0).astype(np.int32)
    starts = np.minimum(np.arange(tokens + 1), batch).astype(np.int32)
    plan = make_plan(geometry, jnp.asarray(lengths), jnp.asarray(starts), jnp.int32(batch))
    return _counted(plan, shape, dtypes, geometry.query_rows)


def _counted(
    plan: Plan, shape: AttentionShape, dtypes: tuple[Any, Any], query_rows: int
) -> Attention:
    q_dtype, kv_dtype = dtypes
    tiles = shape.kv_heads * float(np.asarray(plan.tiles)[:, Tile.COUNT].sum())
    token_bytes = shape.head_dim * kv_dtype.itemsize + (4 if kv_dtype.itemsize == 1 else 0)
    row = SLICE * shape.head_dim
    slices = float(np.asarray(plan.sums)[:, Sum.COUNT].sum())  # slices of whole and partial results
    queries = len(plan.sums) * row * q_dtype.itemsize
    partial = slices * (row * PARTIAL_BYTES + SLICE * SUM_BYTES)
    return Attention(
        read=tiles * 2 * KV_TILE * token_bytes + queries,
        written=partial,
        sum_read=partial,
        sum_written=queries,
        multiplied=tiles * 2 * 2 * query_rows * KV_TILE * shape.head_dim,
    )
