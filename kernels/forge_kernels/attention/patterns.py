"""Paged attention that computes all softmax weights, to return or replace them.

Each sequence's keys are gathered once, and all its queries are multiplied by all of them. The
memory is O(S * Q * C) for Q queries of a sequence and C tokens of a block table. It is
differentiable for float32 `kv`.

A NaN or infinity affects only the rows that see it. Zero weights do not ensure this, because
0 * NaN is NaN. Such numbers are replaced by zeros, and the results that depend on them by NaN.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from forge_kernels.attention.quantized import QuantizedKV, dequantize_rows
from forge_kernels.attention.reference import NO_SCORE, token_rows


def pattern_attention(  # noqa: PLR0913
    q: jax.Array,
    kv: jax.Array | QuantizedKV,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float,
    kv_dtype: DTypeLike | None = None,
    max_q_len: int | None = None,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    tap: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Return what `ragged_paged_attention` returns, whose arguments these are.

    Args:
      chunk: a query attends only to keys in its own chunk of so many positions, see
        `forge_kernels.attention.chunks`.
      tap: returns the softmax weights to use for f32[T, H, C], those of each row and query head.
        C is the number of tokens of a block table. The weights of a padding row are zero. With
        sinks, the weights of a row sum to less than one.
    """
    tokens, heads, _ = q.shape
    seq, visible = token_rows(tokens, kv_lens, cu_q_lens, num_seqs)
    queries = tokens if max_q_len is None else min(max_q_len, tokens)
    place = jnp.clip(jnp.arange(tokens) - cu_q_lens[seq], 0, queries - 1)  # within the sequence
    row = jnp.clip(cu_q_lens[:-1, None] + jnp.arange(queries)[None], 0, tokens - 1)  # i32[S, Q]
    exists = (cu_q_lens[:-1, None] + jnp.arange(queries)[None]) < cu_q_lens[1:, None]
    exists &= (jnp.arange(len(kv_lens)) < num_seqs)[:, None]
    seen = jnp.where(exists, visible[row], 0)  # i32[S, Q], the keys that each query sees

    vectors = _vectors(kv, block_tables, kv_lens, kv_dtype)  # f32[S, K, C, D]
    (keys, bad_keys), (values, bad_values) = map(_finite, vectors)
    kv_heads, context = keys.shape[1:3]
    grouped, bad_queries = _finite(
        q.astype(jnp.float32)[row].reshape(
            len(kv_lens), queries, kv_heads, heads // kv_heads, q.shape[-1]
        )
    )
    exact = lax.Precision.HIGHEST
    scores = sm_scale * jnp.einsum("sqkgd,skcd->sqkgc", grouped, keys, precision=exact)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    allowed = _allowed(seen[..., None], context, window, chunk)[:, :, None, None]
    sink = None if sinks is None else sinks.reshape(1, 1, kv_heads, -1, 1)
    weights = _softmax(scores, allowed, sink)
    undefined = bad_queries | (allowed & bad_keys[:, None, :, None]).any(axis=-1)  # [S, Q, K, G]
    if tap is not None:
        in_use = (jnp.arange(tokens) < cu_q_lens[num_seqs])[:, None, None]
        by_row = jnp.where(undefined[..., None], jnp.nan, weights)
        by_row = by_row[seq, place].reshape(tokens, heads, context)
        by_row = jnp.where(in_use, by_row, 0.0)
        tapped = tap(by_row)
        if tapped is not by_row:
            weights, undefined = _finite(tapped[row].reshape(weights.shape))
    read = allowed | (weights != 0.0)  # a function of `tap` may add keys that a row does not see
    undefined |= (read & bad_values[:, None, :, None]).any(axis=-1)
    out = jnp.einsum("sqkgc,skcd->sqkgd", weights, values, precision=exact)
    out = jnp.where(undefined[..., None], jnp.nan, out)
    out = out[seq, place].reshape(q.shape)
    return jnp.where((visible > 0)[:, None, None], out, 0.0).astype(q.dtype)


def _allowed(seen: jax.Array, context: int, window: int | None, chunk: int | None) -> jax.Array:
    """Return the keys that each query uses, bool[S, Q, C], of those up to its own, `seen`."""
    position = jnp.arange(context)[None, None]
    allowed = position < seen
    if window is not None:
        allowed &= position >= seen - window
    if chunk is not None:
        allowed &= position >= (seen - 1) // chunk * chunk
    return allowed


def _finite(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (x with zeros for NaN and infinities, bool[...]: whether a row has any) for [..., D].

    Replaced numbers have no gradient.
    """
    finite = jnp.isfinite(x)
    return jnp.where(finite, x, 0.0), ~finite.all(axis=-1)


def _softmax(scores: jax.Array, allowed: jax.Array, sink: jax.Array | None) -> jax.Array:
    """Return the softmax over the last axis of the allowed scores; zeros if there are none."""
    # Selected before and after the exponential: the gradient of an unused branch may be NaN.
    scores = jnp.where(allowed, scores, NO_SCORE)
    top = scores.max(axis=-1, keepdims=True)
    top = lax.stop_gradient(top if sink is None else jnp.maximum(top, sink))
    weights = jnp.where(allowed, jnp.exp(scores - top), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    return weights / jnp.where(total == 0.0, 1.0, total)


def _vectors(
    kv: jax.Array | QuantizedKV,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    kv_dtype: DTypeLike | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the keys and values of each sequence, f32[S, K, C, D], zeros beyond its length."""
    if isinstance(kv, QuantizedKV):
        data = kv.data.at[block_tables].get(mode="clip")
        blocks = dequantize_rows(data, kv.scale.at[block_tables].get(mode="clip"))
    else:
        blocks = kv.at[block_tables].get(mode="clip")
        if kv.dtype == jnp.uint16:
            assert kv_dtype is not None
            blocks = lax.bitcast_convert_type(blocks, kv_dtype)
        blocks = blocks.astype(jnp.float32)
    seqs, tables, planes, kv_heads, block_size, dim = blocks.shape
    vectors = blocks.transpose(2, 0, 3, 1, 4, 5)
    vectors = vectors.reshape(planes, seqs, kv_heads, tables * block_size, dim)
    written = jnp.arange(tables * block_size)[None] < kv_lens[:, None]  # others may be NaN
    vectors = jnp.where(written[None, :, None, :, None], vectors, 0.0)
    return vectors[0], vectors[-1]
