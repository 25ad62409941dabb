"""Paged attention in plain XLA, the oracle of the tests.

Every token processes all blocks of its sequence's block table, one block at a time. This is slow
and static, but differentiable because the loop is a `lax.scan`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.attention.quantized import QuantizedKV, dequantize_rows

NO_SCORE = -1e30  # the initial maximum: finite, so that exp(-inf - NO_SCORE) is 0


def reference_attention(  # noqa: PLR0913
    q: jax.Array,  # float[T, H, D]
    kv: jax.Array | QuantizedKV,  # dtype[N, 2 or 1, K, bs, D]
    block_tables: jax.Array,  # i32[S, max_blocks]
    kv_lens: jax.Array,  # i32[S]
    cu_q_lens: jax.Array,  # i32[S + 1]
    num_seqs: jax.Array,  # i32[]
    *,
    sm_scale: float,
    kv_dtype: jnp.dtype,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # f32[H]
) -> jax.Array:  # q.dtype[T, H, D]
    tokens, heads, head_dim = q.shape
    _, _, kv_heads, block_size, _ = kv.shape
    seq, visible = token_rows(tokens, kv_lens, cu_q_lens, num_seqs)
    tables = block_tables[seq]  # i32[T, max_blocks]
    grouped = q.astype(jnp.float32).reshape(tokens, kv_heads, heads // kv_heads, head_dim)

    def over_block(carry, block_index):
        top, total, out = carry
        blocks = _floats(kv, tables[:, block_index], kv_dtype)
        position = block_index * block_size + jnp.arange(block_size)
        seen = position[None, :] < visible[:, None]  # [T, bs]
        if window is not None:
            seen &= position[None, :] >= visible[:, None] - window
        # Selected rather than multiplied, because unseen entries may be NaN. The same holds for
        # keys, whose gradient would be 0 * NaN.
        blocks = jnp.where(seen[:, None, None, :, None], blocks, 0.0)
        keys, values = blocks[:, 0], blocks[:, -1]  # [T, K, bs, D]; the same if there is one plane
        scores = sm_scale * jnp.einsum(
            "tkgd,tkbd->tkgb", grouped, keys, precision=lax.Precision.HIGHEST
        )
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen[:, None, None, :], scores, -jnp.inf)
        # The result does not depend on the subtracted maximum, and neither does its gradient.
        new_top = lax.stop_gradient(jnp.maximum(top, scores.max(axis=-1)))
        weights = jnp.exp(scores - new_top[..., None])
        decay = jnp.exp(top - new_top)
        total = total * decay + weights.sum(axis=-1)
        out = out * decay[..., None] + jnp.einsum(
            "tkgb,tkbd->tkgd", weights, values, precision=lax.Precision.HIGHEST
        )
        return (new_top, total, out), None

    start = (
        jnp.full(grouped.shape[:3], NO_SCORE, jnp.float32),
        jnp.zeros(grouped.shape[:3], jnp.float32),
        jnp.zeros(grouped.shape, jnp.float32),
    )
    (top, total, out), _ = lax.scan(over_block, start, jnp.arange(block_tables.shape[1]))
    if sinks is not None:
        sink = sinks.reshape(1, kv_heads, heads // kv_heads)
        new_top = lax.stop_gradient(jnp.maximum(top, sink))
        decay = jnp.exp(top - new_top)
        total, out = total * decay + jnp.exp(sink - new_top), out * decay[..., None]
    out = out / jnp.where(total == 0.0, 1.0, total)[..., None]
    return out.reshape(q.shape).astype(q.dtype)


def _floats(kv: jax.Array | QuantizedKV, blocks: jax.Array, kv_dtype: jnp.dtype) -> jax.Array:
    """Return the contents of `blocks: i32[T]` as f32[T, 2 or 1, K, bs, D]."""
    if isinstance(kv, QuantizedKV):
        return dequantize_rows(
            kv.data.at[blocks].get(mode="clip"), kv.scale.at[blocks].get(mode="clip")
        )
    read = kv.at[blocks].get(mode="clip")
    if kv.dtype == jnp.uint16:
        read = lax.bitcast_convert_type(read, kv_dtype)
    return read.astype(jnp.float32)


def token_rows(
    tokens: int, kv_lens: jax.Array, cu_q_lens: jax.Array, num_seqs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return each token's sequence, i32[T], and number of visible keys, i32[T] (0 for padding)."""
    seqs = kv_lens.shape[0]
    token = jnp.arange(tokens)
    ended = (cu_q_lens[None, 1:] <= token[:, None]) & (jnp.arange(seqs) < num_seqs)[None, :]
    seq = jnp.minimum(ended.sum(axis=1, dtype=jnp.int32), seqs - 1)
    visible = kv_lens[seq] - (cu_q_lens[seq + 1] - 1 - token)
    return seq, jnp.where(token < cu_q_lens[num_seqs], visible, 0)
