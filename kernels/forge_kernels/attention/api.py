"""The one signature of paged attention, the rotation and write before it, the guard on gradients.

Owns the checks of shapes and types and the choice of an implementation. Each implementation is a
file beside this one; `reference` is the oracle that the others are tested against.

Letters: T tokens in the step, S sequences, N blocks, bs tokens of a block, H query heads,
K key/value heads, D head dim.
"""

import functools
import logging
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from forge_kernels.attention.cpu_ffi import cpu_attention, cpu_rotate_write, unsupported
from forge_kernels.attention.reference import reference_attention
from forge_kernels.attention.xla import xla_attention
from forge_kernels.rope import apply_rope

Implementation = Literal["auto", "reference", "xla", "cpu", "mosaic"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)

# Traced and lowered once for all the layers of a model, which is most of what tracing a step costs.
_xla_attention = jax.jit(
    xla_attention, static_argnames=("sm_scale", "kv_dtype", "max_q_len", "uniform")
)

log = logging.getLogger(__name__)

_FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def ragged_paged_attention(
    q: jax.Array,
    kv: jax.Array,
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
) -> jax.Array:
    """Causal attention of each sequence's newest tokens over its blocks of the cache.

    Query j of sequence s stands at position `kv_lens[s] - q_lens[s] + j` and sees the keys 0 to
    that position, where `q_lens = diff(cu_q_lens)`. The tokens' own keys and values are already in
    `kv`.

    Args:
      q: float[T, H, D], the sequences' rows one after the other; decode rows (one token) first is
        fast.
      kv: dtype[N, 2, K, bs, D], keys and values of one layer; uint16 means the bits of `kv_dtype`.
        Whatever lies beyond a sequence's `kv_lens`, and in blocks of nobody, is never used: it may
        be NaN.
      block_tables: i32[S, max_blocks], the blocks of a sequence in order. Entries beyond its length
        may hold anything.
      kv_lens: i32[S], tokens of each sequence in the cache, this step's included.
      cu_q_lens: i32[S + 1], where each sequence's rows start in `q`; ends with the number of rows.
      num_seqs: i32[], how many sequences there are; what the arrays hold beyond is ignored.
      sm_scale: factor on the scores.
      kv_dtype: bfloat16 or float16, required where `kv` is uint16 and only there.
      max_q_len: a promise that no sequence has more rows; less is compiled. Rows beyond it may be
        zero.
      implementation: `reference` is differentiable for float32 `kv`; `xla` walks only the tiles
        that the sequences have; `cpu` is the C++ kernels', for bfloat16 on a CPU where they have
        been loaded (`forge_kernels.cpu`); `mosaic` is the Pallas kernels for NVIDIA Hopper; `auto`
        is `mosaic` on such a GPU if it knows the shapes and types, and else `xla`.
      uniform: compute every row in the same way, so that its bits do not depend on the other rows
        and sequences, nor on `cu_q_lens`, at one shape of the arrays. `reference` and `cpu` always
        do.

    Returns:
      [T, H, D] of q's type. Rows at and beyond `cu_q_lens[num_seqs]` are zero, but with `cpu` they
      may hold anything.

    Raises:
      ValueError: shapes that do not fit together, or an unknown implementation.
      TypeError: types that do not fit together.
      NotImplementedError: a gradient is asked of anything but `reference` with float32 `kv`.

    The cache's form is PagedAttention's (Kwon et al. 2023, section 4.1); the softmax is the online
    one (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022, section 3.1).
    """
    kv_dtype = _kv_float(kv, kv_dtype)
    _check_shapes(q, kv, block_tables, kv_lens, cu_q_lens, num_seqs)
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"no attention implementation {implementation!r}; there are: {known}")
    if implementation != "reference" or kv_dtype != jnp.float32:
        q = _without_gradient(q)
        if jnp.issubdtype(kv.dtype, jnp.floating):
            kv = _without_gradient(kv)
    arrays = (q, kv, block_tables, kv_lens, cu_q_lens, num_seqs)
    if implementation == "reference":
        return reference_attention(*arrays, sm_scale=sm_scale, kv_dtype=kv_dtype)
    if implementation == "cpu":
        _check_cpu(q, kv, kv_dtype)
        return cpu_attention(*arrays, sm_scale=sm_scale)
    tokens = q.shape[0]
    max_q_len = tokens if max_q_len is None else min(max_q_len, tokens)
    if implementation == "mosaic" or (implementation == "auto" and _auto_is_mosaic(q, kv)):
        return _mosaic(*arrays, sm_scale=sm_scale, max_q_len=max_q_len, uniform=uniform)
    return _xla_attention(
        *arrays, sm_scale=sm_scale, kv_dtype=kv_dtype, max_q_len=max_q_len, uniform=uniform
    )


def rotate_and_write(
    qkv: jax.Array,
    kv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    *,
    num_tokens: jax.Array | None = None,
    kv_dtype: DTypeLike | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Rotates queries and keys by their positions, and writes keys and values into the cache.

    Args:
      qkv: float[T, H + 2K, D]: the heads of the queries, then keys, then values.
      kv: dtype[N, 2, K, bs, D], see `write_kv`.
      cos, sin: f32[T, D / 2], see `forge_kernels.rope`.
      slot_mapping: i32[T], see `write_kv`.
      num_tokens: i32[], a promise that rows from there on are not needed.
      implementation: see `ragged_paged_attention`.

    Returns:
      (q float[T, H, D], kv).

    Raises:
      TypeError, ValueError: types or shapes that do not fit together.
    """
    K = kv.shape[2]
    H = qkv.shape[1] - 2 * K
    T, D = qkv.shape[0], kv.shape[4]
    if H < 1 or qkv.shape[2] != D:
        raise ValueError(f"heads of qkv {qkv.shape} do not fit a cache {kv.shape}")
    if not cos.shape == sin.shape == (T, D // 2) or slot_mapping.shape != (T,):
        raise ValueError(
            f"cos {cos.shape}, sin {sin.shape} and slot_mapping {slot_mapping.shape} for {T} "
            f"tokens and heads of {D}"
        )
    if implementation == "cpu":
        _check_cpu(qkv, kv, _kv_float(kv, kv_dtype))
        count = jnp.full((), qkv.shape[0], jnp.int32) if num_tokens is None else num_tokens
        return cpu_rotate_write(qkv, cos, sin, slot_mapping, count, kv)
    q, k, v = qkv[:, :H], qkv[:, H : H + K], qkv[:, H + K :]
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    return q, write_kv(kv, k, v, slot_mapping, kv_dtype=kv_dtype)


def write_kv(
    kv: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    kv_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Writes the keys and values of T tokens into their places in the cache.

    Args:
      kv: dtype[N, 2, K, bs, D], donated by the caller if it should not be copied.
      k: float[T, K, D]. v: the same.
      slot_mapping: i32[T], `block * bs + offset`. Index `N * bs` means: drop this row. -1 is never
        an index: XLA would wrap it to the last slot.
      kv_dtype: bfloat16 or float16, required where `kv` is uint16 and only there.

    Returns:
      `kv` with the rows written.

    Raises:
      TypeError, ValueError: types or shapes that do not fit together.
      NotImplementedError: a gradient is asked where `kv` is not float32.
    """
    kv_dtype = _kv_float(kv, kv_dtype)
    block_size = kv.shape[3]
    rows = jnp.stack([k, v], axis=1)  # [T, 2, K, D]
    if (rows.shape[1:3], rows.shape[3]) != (kv.shape[1:3], kv.shape[4]):
        raise ValueError(f"keys {k.shape} and values {v.shape} do not fit a cache {kv.shape}")
    if slot_mapping.shape != k.shape[:1]:
        raise ValueError(f"slot_mapping {slot_mapping.shape} for {k.shape[0]} tokens")
    if kv_dtype != jnp.float32:
        rows = _without_gradient(rows)
    rows = rows.astype(kv_dtype)
    if kv.dtype == jnp.uint16:
        rows = lax.bitcast_convert_type(rows, jnp.uint16)
    if rows.shape[0] == 1:
        # XLA:CPU turns a scatter of one row into a slice update, and copies the pool for it.
        rows = jnp.pad(rows, ((0, 1), (0, 0), (0, 0), (0, 0)))
        slot_mapping = jnp.pad(slot_mapping, (0, 1), constant_values=kv.shape[0] * block_size)
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    return kv.at[block, :, :, offset].set(rows, mode="drop")


def kv_storage_dtype(kv_dtype: DTypeLike, platform: str) -> jnp.dtype:
    """The type of the array that holds a cache of `kv_dtype` on `platform` ("cpu", "gpu").

    XLA:CPU converts a whole bfloat16 pool to float32 and back in order to scatter one row into it;
    the same bits as uint16 are scattered in place. So 16-bit caches are uint16 there.
    """
    kv_dtype = jnp.dtype(kv_dtype)
    if kv_dtype not in _FLOATS:
        raise TypeError(f"a KV cache is float32, bfloat16 or float16, not {kv_dtype}")
    return jnp.dtype(jnp.uint16) if platform == "cpu" and kv_dtype.itemsize == 2 else kv_dtype


@jax.custom_jvp
def _without_gradient(x: jax.Array) -> jax.Array:
    return x


@_without_gradient.defjvp
def _(primals, tangents):
    raise NotImplementedError(
        "this attention has no gradient: use implementation='reference' and a float32 KV cache"
    )


def _kv_float(kv: jax.Array, kv_dtype: DTypeLike | None) -> jnp.dtype:
    """The float type of what `kv` holds."""
    if kv.dtype == jnp.uint16:
        if kv_dtype is None or jnp.dtype(kv_dtype) not in _FLOATS[1:]:
            raise TypeError(
                f"kv is stored as uint16: kv_dtype must say bfloat16 or float16, not {kv_dtype}"
            )
        return jnp.dtype(kv_dtype)
    if kv.dtype not in _FLOATS:
        raise TypeError(f"kv must be float32, bfloat16, float16 or uint16, not {kv.dtype}")
    if kv_dtype is not None and jnp.dtype(kv_dtype) != kv.dtype:
        raise TypeError(f"kv is {kv.dtype} but kv_dtype says {jnp.dtype(kv_dtype)}")
    return kv.dtype


def _check_cpu(q: jax.Array, kv: jax.Array, kv_dtype: jnp.dtype) -> None:
    reason = unsupported(q.shape[2], kv_dtype, "cpu")
    if reason is None and (q.dtype != jnp.bfloat16 or kv.dtype != jnp.uint16):
        reason = f"they are for bfloat16 with a cache of uint16, not {q.dtype} with {kv.dtype}"
    if reason is not None:
        raise TypeError(f"no attention by the CPU kernels: {reason}")


def _mosaic(q: jax.Array, kv: jax.Array, *rest: jax.Array, **options) -> jax.Array:
    reason = _mosaic_unsupported(q, kv)
    if reason is not None:
        raise TypeError(f"no attention by the GPU kernels: {reason}")
    attention, calls = _mosaic_modules()
    return attention.jitted_attention(q, kv, *rest, interpret=calls.interpreter(), **options)


def _auto_is_mosaic(q: jax.Array, kv: jax.Array) -> bool:
    # On CPUs, also those of a GPU's host, 16-bit caches are uint16.
    if kv.dtype == jnp.uint16 or not _on_hopper():
        return False
    reason = _mosaic_unsupported(q, kv)
    if reason is not None:
        _say_once(f"attention in plain XLA, without the GPU kernels: {reason}")
    return reason is None


def _mosaic_unsupported(q: jax.Array, kv: jax.Array) -> str | None:
    heads, head_dim = q.shape[1:]
    attention, _ = _mosaic_modules()
    return attention.unsupported(heads, kv.shape[2], head_dim, kv.shape[3], q.dtype, kv.dtype)


def _mosaic_modules():
    # Pallas takes a second to import, and CPUs do not need it.
    from forge_kernels.attention import mosaic_calls, mosaic_gpu

    return mosaic_gpu, mosaic_calls


@functools.cache
def _on_hopper() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"


@functools.cache
def _say_once(message: str) -> None:
    log.warning(message)


def _check_shapes(q, kv, block_tables, kv_lens, cu_q_lens, num_seqs) -> None:
    if q.ndim != 3 or kv.ndim != 5 or kv.shape[1] != 2 or block_tables.ndim != 2:
        raise ValueError(
            "want q [T, H, D], kv [N, 2, K, bs, D] and block_tables [S, max_blocks], got "
            f"{q.shape}, {kv.shape} and {block_tables.shape}"
        )
    if q.shape[2] != kv.shape[4] or q.shape[1] % kv.shape[2]:
        raise ValueError(f"heads of q {q.shape} do not fit those of kv {kv.shape}")
    seqs = block_tables.shape[0]
    if kv_lens.shape != (seqs,) or cu_q_lens.shape != (seqs + 1,) or num_seqs.shape != ():
        raise ValueError(
            f"{seqs} rows in block_tables, but kv_lens {kv_lens.shape}, cu_q_lens "
            f"{cu_q_lens.shape}, num_seqs {num_seqs.shape}"
        )
