"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) in its absorbed form.

The cache has one vector per token and layer. It consists of the latent c, from which the keys and
values of all heads follow, and a rotated key r that all heads share. The score of a query (q, p) is
`q (W_UK c) + p r = (W_UK^T q) c + p r`. So queries are multiplied by W_UK once. The vectors in the
cache then are the keys and values of all heads, as in multi-query attention. The sum of the latents
is multiplied by W_UV. No step computes the keys or values of tokens in the cache.

Letters of a step: T tokens, N blocks, bs tokens per block.
Letters of a model: H heads, R numbers of a latent, V of a value, P and E of a head. E are rotated.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from forge_kernels.attention import ragged_paged_attention, write_then_attend, write_vectors

Implementation = Literal["auto", "reference"]


def latent_attention(  # noqa: PLR0913
    q: jax.Array,
    kv: jax.Array,
    key_up: jax.Array,
    value_up: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float,
    kv_dtype: DTypeLike | None = None,
    max_q_len: int | None = None,
    implementation: Implementation = "auto",
    uniform: bool = False,
    attention: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Causal attention of each sequence's newest tokens over its latents.

    Args:
      q: float[T, H, P + E], queries whose last E numbers are rotated.
      kv: dtype[N, 1, 1, bs, R + E], the latents and rotated keys of one layer. The vectors of the
        step's tokens are already in it.
      key_up: float[H, P, R], W_UK, which turns a latent into the keys of the heads.
      value_up: float[H, V, R], W_UV, which turns a latent into the values of the heads.
      block_tables, kv_lens, cu_q_lens, num_seqs: see `ragged_paged_attention`.
      sm_scale: the factor on the scores.
      kv_dtype: see `ragged_paged_attention`.
      max_q_len: see `ragged_paged_attention`.
      implementation: `auto` is plain XLA on every device. `reference` is slow.
      uniform: see `ragged_paged_attention`.
      attention: replaces `ragged_paged_attention` with `implementation` and `uniform`, such as
        `pattern_attention`.

    Returns:
      [T, H, V] of q's type. Rows from `cu_q_lens[num_seqs]` on are zero.

    Raises:
      ValueError: shapes do not match.
      TypeError: types do not match, or the cache has 8 bits.
      NotImplementedError: as in `ragged_paged_attention`.
    """
    _check(q, kv, key_up, value_up)
    if attention is None:
        attention = partial(
            ragged_paged_attention,
            implementation="reference" if implementation == "reference" else "xla",
            uniform=uniform,
        )
    latents = attention(
        _absorbed(q, key_up),
        kv,
        block_tables,
        kv_lens,
        cu_q_lens,
        num_seqs,
        sm_scale=sm_scale,
        kv_dtype=kv_dtype,
        max_q_len=max_q_len,
    )
    return _values(latents, value_up)


def write_latent_attention(  # noqa: PLR0913
    q: jax.Array,
    vectors: jax.Array,
    kv: jax.Array,
    key_up: jax.Array,
    value_up: jax.Array,
    slot_mapping: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    kv_dtype: DTypeLike | None = None,
    implementation: Implementation = "auto",
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Write the vectors of T tokens, and attend to the cache.

    The results are those of `write_latents` and `latent_attention`, whose arguments these are. The
    gradient passes as in `forge_kernels.attention.rotate_write_attend`: to q, `vectors`, `key_up`,
    `value_up`, and a float32 cache.

    Returns:
      (kv, [T, H, V] of q's type).

    Raises:
      ValueError: shapes do not match.
      TypeError: types do not match, or the cache has 8 bits.
      NotImplementedError: a gradient was requested with respect to `kv` that is not float32.
    """
    _check(q, kv, key_up, value_up)

    def write(kv: jax.Array, slots: jax.Array, q: jax.Array, vectors: jax.Array, up: jax.Array):
        with jax.named_scope("rope_write"):
            kv = write_latents(kv, vectors, slots, kv_dtype=kv_dtype)
        with jax.named_scope("attention"):
            return kv, _absorbed(q, up)

    def inputs_of(q: jax.Array, vectors: jax.Array, up: jax.Array):
        return _absorbed(q, up), vectors[:, None, None]

    batch = block_tables, kv_lens, cu_q_lens, num_seqs
    form = "reference" if implementation == "reference" else "xla"
    options |= {"kv_dtype": kv_dtype, "implementation": form}
    arrays = q, vectors, key_up
    kv, latents = write_then_attend(
        write, inputs_of, arrays, kv, slot_mapping, batch, None, options
    )
    with jax.named_scope("attention"):
        return kv, _values(latents, value_up)


def _absorbed(q: jax.Array, key_up: jax.Array) -> jax.Array:
    """Return the queries multiplied by W_UK, [T, H, R + E]."""
    plain = key_up.shape[1]
    absorbed = _by_head(q[..., :plain], key_up, contract=1)
    return jnp.concatenate([absorbed, q[..., plain:]], axis=-1)


def _values(latents: jax.Array, value_up: jax.Array) -> jax.Array:
    """Return sums of latents multiplied by W_UV, [T, H, V].

    The sums [T, H, R + E] include the rotated keys, E numbers, which are dropped.
    """
    return _by_head(latents[..., : value_up.shape[2]], value_up, contract=2)


def _by_head(x: jax.Array, w: jax.Array, *, contract: int) -> jax.Array:
    """Multiply float[T, H, K] by the matrix of each head, float[H, ...], over its axis `contract`.

    Sums are in float32, and rounded to x's type as the products of other matrices are. Heads come
    first in both operands, because XLA:CPU has no 16-bit product for other orders.
    """
    dimensions = (((2,), (contract,)), ((0,), (0,)))
    y = lax.dot_general(x.swapaxes(0, 1), w, dimensions, preferred_element_type=jnp.float32)
    return y.swapaxes(0, 1).astype(x.dtype)


def write_latents(
    kv: jax.Array,
    vectors: jax.Array,
    slot_mapping: jax.Array,
    *,
    kv_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Write the latents and rotated keys of T tokens, float[T, R + E], to their slots in the cache.

    Args:
      kv: dtype[N, 1, 1, bs, R + E]. The caller must donate it to avoid a copy.
      vectors: float[T, R + E].
      slot_mapping: i32[T], see `forge_kernels.attention.write_kv`.
      kv_dtype: see `ragged_paged_attention`.

    Returns:
      `kv` with the vectors written.

    Raises:
      TypeError: types do not match.
      ValueError: shapes do not match.
      NotImplementedError: a gradient was requested, but `kv` is not float32.
    """
    return write_vectors(kv, vectors[:, None, None], slot_mapping, kv_dtype=kv_dtype)


def _check(q: jax.Array, kv: jax.Array, key_up: jax.Array, value_up: jax.Array) -> None:
    if not isinstance(kv, jax.Array):
        raise TypeError("latent attention does not support a cache of 8 bits")
    shapes = f"q {q.shape}, kv {kv.shape}, key_up {key_up.shape} and value_up {value_up.shape}"
    ranks = q.ndim, kv.ndim, key_up.ndim, value_up.ndim
    if ranks != (3, 5, 3, 3) or kv.shape[1:3] != (1, 1):
        raise ValueError(
            "q must be [T, H, P + E], kv [N, 1, 1, bs, R + E], key_up [H, P, R] and value_up "
            f"[H, V, R], got {shapes}"
        )
    heads, plain, rank = key_up.shape
    rotated = q.shape[2] - plain
    fits = q.shape[1] == heads == value_up.shape[0] and rank == value_up.shape[2]
    if not fits or rotated < 0 or kv.shape[4] != rank + rotated:
        raise ValueError(f"the shapes do not fit each other: {shapes}")
    if not q.dtype == key_up.dtype == value_up.dtype:
        raise TypeError(
            f"q, key_up and value_up must have one type, got {q.dtype}, {key_up.dtype} and "
            f"{value_up.dtype}"
        )
