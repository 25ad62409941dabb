"""Paged attention by the C++ kernels, and the RoPE and cache write before it.

They support bfloat16 queries, caches of bfloat16 (stored as uint16) or of 8 bits, and head dims
that are multiples of 32. Every row's bits depend only on its own query and keys (see
`cpu/src/attention.h`).
"""

import jax
import jax.numpy as jnp
import numpy as np

from forge_kernels.attention.quantized import LARGEST, QuantizedKV

MAX_HEAD_DIM = 512


def unsupported(head_dim: int, kv_dtype: jnp.dtype, platform: str) -> str | None:
    """Return why these kernels do not support such a cache, or None if they do."""
    if platform != "cpu":
        return f"they run on CPUs, not on {platform}"
    if kv_dtype not in (jnp.bfloat16, *LARGEST):
        return f"the cache must be bfloat16, int8 or float8_e4m3fn, not {kv_dtype}"
    if head_dim % 32 or head_dim > MAX_HEAD_DIM:
        return f"the head dim must be a multiple of 32 up to {MAX_HEAD_DIM}, not {head_dim}"
    return None


def cpu_attention(
    q: jax.Array,  # bf16[T, H, D]
    kv: jax.Array | QuantizedKV,  # u16[N, 2, K, bs, D]
    block_tables: jax.Array,  # i32[S, max_blocks]
    kv_lens: jax.Array,  # i32[S]
    cu_q_lens: jax.Array,  # i32[S + 1]
    num_seqs: jax.Array,  # i32[]
    *,
    sm_scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # f32[H]
) -> jax.Array:  # bf16[T, H, D]; rows that belong to no sequence are undefined
    out = jax.ShapeDtypeStruct(q.shape, jnp.bfloat16)
    data, scale = kv if isinstance(kv, QuantizedKV) else (kv, jnp.zeros(0, jnp.float32))
    return jax.ffi.ffi_call("forge_attention", out)(
        q,
        data,
        scale,
        block_tables,
        kv_lens,
        cu_q_lens,
        num_seqs.reshape(1),
        jnp.zeros(0, jnp.float32) if sinks is None else sinks,
        sm_scale=np.float32(sm_scale),
        window=np.int64(window or 0),
        soft_cap=np.float32(soft_cap or 0),
    )


def cpu_rotate_write(
    qkv: jax.Array,  # bf16[T, H + 2K, D]
    cos: jax.Array,  # f32[T, pairs]
    sin: jax.Array,  # f32[T, pairs]
    slot_mapping: jax.Array,  # i32[T]
    num_tokens: jax.Array,  # i32[]
    kv: jax.Array,  # u16[N, 2, K, bs, D]
    *,
    interleaved: bool,
) -> tuple[jax.Array, jax.Array]:  # q bf16[T, H, D], kv
    tokens, heads, head_dim = qkv.shape
    q = jax.ShapeDtypeStruct((tokens, heads - 2 * kv.shape[2], head_dim), jnp.bfloat16)
    written = jax.ShapeDtypeStruct(kv.shape, kv.dtype)
    call = jax.ffi.ffi_call("forge_rotate_write", (q, written), input_output_aliases={5: 1})
    count = num_tokens.reshape(1)
    q, kv = call(qkv, cos, sin, slot_mapping, count, kv, interleaved=np.bool_(interleaved))
    return q, kv


def untouched(array: jax.ShapeDtypeStruct) -> jax.Array:
    """Return uninitialized memory for an array."""
    out = jax.ShapeDtypeStruct(array.shape, array.dtype)
    # The side effect keeps XLA from merging two arrays of the same type.
    return jax.ffi.ffi_call("forge_untouched", out, has_side_effect=True)()
