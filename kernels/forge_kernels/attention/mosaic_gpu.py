"""Paged attention for NVIDIA GPUs from sm_80 on, by Pallas kernels for the Mosaic GPU back end.

`mosaic_wgmma` is for Hopper, `mosaic_mma` for all others. Both have the plan, the softmax and the
sum of `mosaic_kernel`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from forge_kernels.attention import mosaic_calls as gpu
from forge_kernels.attention.mosaic_kernel import PRODUCT_DTYPES, Kernel
from forge_kernels.attention.mosaic_mma import MmaKernel, mma_unsupported
from forge_kernels.attention.mosaic_wgmma import WgmmaKernel
from forge_kernels.attention.plan import Geometry, make_plan
from forge_kernels.attention.quantized import QuantizedKV
from forge_kernels.devices import HOPPER, Gpu

HEAD_DIMS = (64, 80, 96, 128, 256)


def unsupported(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    q_dtype: Any,
    kv_dtype: Any,
    device: Gpu = HOPPER,
) -> str | None:
    """Return why the kernel for `device` does not support such a cache, or None if it does."""
    of_16_bits = q_dtype in (jnp.bfloat16, jnp.float16)
    if not of_16_bits or (kv_dtype != q_dtype and kv_dtype not in PRODUCT_DTYPES):
        return (
            "queries must be bfloat16 or float16, with a cache of the same type, int8 or "
            f"float8_e4m3fn, not {q_dtype} with a cache of {kv_dtype}"
        )
    if head_dim not in HEAD_DIMS:
        return f"the head dim must be one of {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    if block_size % 8:
        return f"the block size must be a multiple of 8, not {block_size}"
    if heads // kv_heads > gpu.ROWS:
        return f"{heads // kv_heads} query heads per key/value head are more than {gpu.ROWS}"
    if device.has_wgmma:
        return None
    return mma_unsupported(head_dim, block_size, q_dtype, kv_dtype, device)


def kernel_of(device: Gpu) -> type[Kernel]:
    return WgmmaKernel if device.has_wgmma else MmaKernel


def attention_geometry(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_q_len: int,
    dtypes: tuple[Any, Any],
    device: Gpu,
    **sizes: Any,
) -> Geometry:
    """Return the sizes of the plan.

    Args:
      dtypes: types of queries and of the cache.
      sizes: the other fields of `Geometry`.
    """
    make, (q_dtype, kv_dtype) = kernel_of(device), dtypes
    rows = min(max_q_len * (heads // kv_heads), 2 * gpu.ROWS)
    return Geometry(
        heads=heads,
        kv_heads=kv_heads,
        max_q_len=max_q_len,
        query_rows=make.query_rows(rows, head_dim, kv_dtype),
        ctas=device.cores * make.ctas_per_core(device, head_dim, kv_dtype, q_dtype),
        **sizes,
    )


def mosaic_attention(  # noqa: PLR0913
    q: jax.Array,  # bf16 or f16[T, H, D]
    kv: jax.Array | QuantizedKV,  # the same type[N, 2, K, bs, D], or 8 bits and scales
    block_tables: jax.Array,  # i32[S, max_blocks]
    kv_lens: jax.Array,  # i32[S]
    cu_q_lens: jax.Array,  # i32[S + 1]
    num_seqs: jax.Array,  # i32[]
    *,
    sm_scale: float,
    max_q_len: int,
    uniform: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # f32[H]
    device: Gpu = HOPPER,
    interpret: Any = None,
) -> jax.Array:  # q.dtype[T, H, D]; rows that belong to no sequence are zero
    data, scale = kv if isinstance(kv, QuantizedKV) else (kv, None)
    tokens, heads, head_dim = q.shape
    kv_heads, block_size = data.shape[2:4]
    geometry = attention_geometry(
        tokens=tokens,
        seqs=kv_lens.shape[0],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=block_tables.shape[1] * block_size,
        max_q_len=max_q_len,
        dtypes=(q.dtype, data.dtype),
        device=device,
        window=window,
        uniform=uniform,
    )
    kernel = kernel_of(device)(
        geometry=geometry,
        head_dim=head_dim,
        dtype=q.dtype,
        kv_dtype=data.dtype,
        block_size=block_size,
        sm_scale=sm_scale,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
        device=device,
        interpret=interpret,
    )
    plan = make_plan(geometry, kv_lens, cu_q_lens, num_seqs)
    query_rows = q.reshape(tokens * heads, head_dim)
    packed = query_rows.at[plan.pack].get(mode="fill", fill_value=0).astype(kernel.key_dtype)
    sink_rows = None if sinks is None else kernel.sink_rows(sinks)
    parts, lse = kernel.attend(plan, packed, data, scale, block_tables, sink_rows)
    return kernel.add_up(plan, parts, lse)


# Traced and lowered once for all layers of a model; XLA merges their equal plans into one.
jitted_attention = jax.jit(
    mosaic_attention,
    static_argnames=(
        "sm_scale",
        "max_q_len",
        "uniform",
        "window",
        "soft_cap",
        "device",
        "interpret",
    ),
)
