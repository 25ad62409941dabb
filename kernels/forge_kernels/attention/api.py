"""Paged attention behind one signature, the RoPE and write before it, and their gradients.

This module checks shapes and types and selects an implementation. Each implementation is a file in
this folder; `reference` is the oracle that the others are tested against.

Letters: T tokens in the step, S sequences, N blocks, bs tokens per block, H query heads,
K key/value heads, D head dim.
"""

import functools
import logging
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from forge_kernels.attention.backward import attention_backward
from forge_kernels.attention.cpu_ffi import cpu_attention, cpu_rotate_write, unsupported
from forge_kernels.attention.quantized import LARGEST, QuantizedKV, quantize_rows
from forge_kernels.attention.reference import reference_attention
from forge_kernels.attention.xla import xla_attention
from forge_kernels.derivatives import zero_from
from forge_kernels.devices import HOPPER, Gpu, current_gpu
from forge_kernels.rope import apply_rope

Implementation = Literal["auto", "reference", "xla", "cpu", "mosaic"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)

# Traced and lowered once for all layers of a model, which is most of the cost of tracing a step.
_xla_attention = jax.jit(
    xla_attention,
    static_argnames=("sm_scale", "kv_dtype", "max_q_len", "uniform", "window", "soft_cap"),
)

log = logging.getLogger(__name__)

_FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
# The float types whose bits an array of unsigned integers may store.
_BITS = {jnp.dtype(jnp.uint16): _FLOATS[1:], jnp.dtype(jnp.uint8): (_FLOAT8,)}


def ragged_paged_attention(  # noqa: PLR0913
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
    implementation: Implementation = "auto",
    uniform: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of each sequence's newest tokens over its blocks of the KV cache.

    Let `q_lens = diff(cu_q_lens)`. Query j of sequence s is at position
    `kv_lens[s] - q_lens[s] + j`. It attends to the keys from 0 to that position, or to the last
    `window` of them. The tokens' own keys and values are already in `kv`.

    Args:
      q: float[T, H, D], the rows of the sequences one after the other. Decode rows (one token) are
        fast if they come first.
      kv: dtype[N, 2, K, bs, D], keys and values of one layer, or a `QuantizedKV` of 8 bits. With
        one plane, dtype[N, 1, K, bs, D], each vector is both key and value, which `reference` and
        `xla` support, see `forge_kernels.latent_attention`. Unsigned integers store the bits of
        `kv_dtype`. Entries beyond a sequence's `kv_lens` and in unused blocks are never used: they
        and their scales may be NaN.
      block_tables: i32[S, max_blocks], the blocks of each sequence in order. Entries beyond its
        length are ignored.
      kv_lens: i32[S], tokens of each sequence in the cache, including this step's.
      cu_q_lens: i32[S + 1], where each sequence's rows start in `q`; the last is the number of
        rows.
      num_seqs: i32[], the number of sequences; array entries beyond it are ignored.
      sm_scale: the factor on the scores.
      kv_dtype: the type whose bits `kv` stores, only for uint16 (bfloat16 or float16) and uint8
        (float8_e4m3fn).
      max_q_len: an upper bound of the rows of a sequence; a lower bound compiles less code. Rows
        beyond it may be zero.
      implementation: `reference` is slow and static. `xla` computes only the tiles that the
        sequences have. `cpu` is the C++ kernels for bfloat16 queries, if they are loaded
        (`forge_kernels.cpu`). `mosaic` is the Pallas kernels for NVIDIA GPUs from sm_80 on. `auto`
        is `mosaic` on such a GPU if it supports the shapes and types, else `xla`.
      uniform: compute every row in the same way. At fixed array shapes, its bits then do not depend
        on other rows and sequences, nor on `cu_q_lens`. `reference` and `cpu` always do this.
      window: how many keys a query attends to at most, including its own. Keys that all rows of a
        sequence have passed are not used either, but for `mosaic` they must be numbers.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`, after `sm_scale` (Gemma 2, arXiv
        2408.00118, section 2).
      sinks: f32[H], a learned logit per query head. It adds `exp(sink)` to the denominator of the
        softmax and has no value. `sm_scale` and `soft_cap` do not apply to it (gpt-oss, arXiv
        2508.10925, section 2.2).

    Returns:
      [T, H, D] of q's type. Rows from `cu_q_lens[num_seqs]` on are zero, or undefined with `cpu`.

    Raises:
      ValueError: shapes do not match, the implementation does not exist, or a window or soft cap is
        not positive.
      TypeError: types do not match, or the implementation does not support them.
      NotImplementedError: a gradient was requested with respect to `kv` that is not float32.

    The gradient with respect to q, `sinks` and float32 `kv` is that of the reference, whatever the
    implementation (`backward.py`). With `reference` and float32 `kv`, JAX differentiates the code
    itself, also forward and repeatedly. For keys and values that the same call writes, see
    `rotate_write_attend`.

    The cache is PagedAttention's (Kwon et al. 2023, section 4.1). The softmax is the online one
    (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022, section 3.1).
    """
    kv_dtype = kv_float(kv, kv_dtype)
    scoring: dict[str, Any] = {"sm_scale": sm_scale, "window": window, "soft_cap": soft_cap}
    options: dict[str, Any] = {
        "kv_dtype": kv_dtype,
        "max_q_len": max_q_len,
        "implementation": implementation,
        "uniform": uniform,
        **scoring,
    }
    batch = block_tables, kv_lens, cu_q_lens, num_seqs

    def attend(q, kv, sinks, *batch):
        return attention_without_gradient(q, kv, *batch, sinks=sinks, **options)

    if implementation == "reference" and kv_dtype == jnp.float32:
        return attend(q, kv, sinks, *batch)
    if kv_dtype != jnp.float32:
        kv = jax.tree.map(refuse_gradient, kv)

    def forward(q, kv, sinks, *batch):
        return zero_padding(attend(q, kv, sinks, *batch), batch), (q, kv, sinks, batch)

    def backward(kept, slope):
        q, kv, sinks, batch = kept
        by = attention_backward(slope, q, kv, *batch, kv_dtype=kv_dtype, sinks=sinks, **scoring)
        by_kv = by.kv if kv_dtype == jnp.float32 else None
        return by.q.astype(q.dtype), by_kv, by.sinks, *(None for _ in batch)

    differentiable = jax.custom_vjp(attend)
    differentiable.defvjp(forward, backward)
    return differentiable(q, kv, sinks, *batch)


def zero_padding(out: jax.Array, batch: tuple[jax.Array, ...]) -> jax.Array:
    """Return out, [T, ...], with zeros in rows of no sequence, which implementations may not write.

    Undefined rows could make a sum over all rows NaN, such as a weight's gradient.
    """
    _, _, cu_q_lens, num_seqs = batch
    return zero_from(out, cu_q_lens[num_seqs])


def attention_without_gradient(  # noqa: PLR0913
    q: jax.Array,
    kv: jax.Array | QuantizedKV,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    kv_dtype: jnp.dtype,
    max_q_len: int | None,
    implementation: Implementation,
    uniform: bool,
    sm_scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Compute `ragged_paged_attention` with the selected implementation."""
    _check_shapes(q, kv, block_tables, kv_lens, cu_q_lens, num_seqs)
    _check_sinks(sinks, q.shape[1])
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"attention implementation must be one of {known}, got {implementation!r}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive, got {soft_cap}")
    arrays = (q, kv, block_tables, kv_lens, cu_q_lens, num_seqs)
    scoring: dict[str, Any] = {
        "sm_scale": sm_scale,
        "window": window,
        "soft_cap": soft_cap,
        "sinks": sinks,
    }
    if implementation == "reference":
        return reference_attention(*arrays, kv_dtype=kv_dtype, **scoring)
    if kv.shape[1] == 1 and implementation in ("cpu", "mosaic"):
        raise TypeError(f"{implementation} does not support a cache with one plane {kv.shape}")
    if implementation == "cpu":
        _check_cpu(q, kv, kv_dtype)
        return cpu_attention(*arrays, **scoring)
    tokens = q.shape[0]
    max_q_len = tokens if max_q_len is None else min(max_q_len, tokens)
    if implementation == "mosaic" or (implementation == "auto" and _auto_is_mosaic(q, kv)):
        return _mosaic(*arrays, max_q_len=max_q_len, uniform=uniform, **scoring)
    return _xla_attention(
        *arrays, kv_dtype=kv_dtype, max_q_len=max_q_len, uniform=uniform, **scoring
    )


def rotate_and_write[KV: jax.Array | QuantizedKV](
    qkv: jax.Array,
    kv: KV,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    *,
    interleaved: bool = False,
    num_tokens: jax.Array | None = None,
    kv_dtype: DTypeLike | None = None,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, KV]:
    """Rotate queries and keys by their positions, and write keys and values to the cache.

    Args:
      qkv: float[T, H + 2K, D], the heads of the queries, then keys, then values.
      kv: dtype[N, 2, K, bs, D] or a `QuantizedKV`, see `write_kv`.
      cos, sin: f32[T, pairs], see `forge_kernels.rope.apply_rope`.
      slot_mapping: i32[T], see `write_kv`.
      interleaved: see `forge_kernels.rope.apply_rope`.
      num_tokens: i32[], a promise that the caller ignores rows from there on.
      kv_dtype: see `ragged_paged_attention`.
      implementation: see `ragged_paged_attention`.

    Returns:
      (q float[T, H, D], kv).

    Raises:
      TypeError: types do not match.
      ValueError: shapes do not match.
    """
    K = kv.shape[2]
    H = qkv.shape[1] - 2 * K
    T, D = qkv.shape[0], kv.shape[4]
    if H < 1 or qkv.shape[2] != D:
        raise ValueError(f"heads of qkv {qkv.shape} do not fit a cache {kv.shape}")
    fits = cos.ndim == 2 and cos.shape[0] == T and 2 * cos.shape[1] <= D
    if not fits or cos.shape != sin.shape or slot_mapping.shape != (T,):
        raise ValueError(
            f"cos {cos.shape}, sin {sin.shape} and slot_mapping {slot_mapping.shape} do not fit "
            f"{T} tokens and heads of {D}"
        )
    if implementation == "cpu":
        _check_cpu(qkv, kv, kv_float(kv, kv_dtype))
    if implementation == "cpu" and isinstance(kv, jax.Array):  # XLA rounds rows to 8 bits
        count = jnp.full((), qkv.shape[0], jnp.int32) if num_tokens is None else num_tokens
        rotated: Any = cpu_rotate_write(
            qkv, cos, sin, slot_mapping, count, kv, interleaved=interleaved
        )
        return rotated
    q, k, v = qkv[:, :H], qkv[:, H : H + K], qkv[:, H + K :]
    q, k = (apply_rope(x, cos, sin, interleaved=interleaved) for x in (q, k))
    return q, write_kv(kv, k, v, slot_mapping, kv_dtype=kv_dtype)


def write_kv[KV: jax.Array | QuantizedKV](
    kv: KV,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    kv_dtype: DTypeLike | None = None,
) -> KV:
    """Write the keys and values of T tokens to their slots in the cache.

    Args:
      kv: dtype[N, 2, K, bs, D], or a `QuantizedKV` of 8 bits. The caller must donate it to avoid a
        copy.
      k: float[T, K, D].
      v: float[T, K, D].
      slot_mapping: i32[T], `block * bs + offset`. `N * bs` drops the row. All others must be
        different, and -1 must not occur, because XLA would wrap it to the last slot.
      kv_dtype: see `ragged_paged_attention`.

    Returns:
      `kv` with the rows written.

    Raises:
      TypeError: types do not match.
      ValueError: shapes do not match.
      NotImplementedError: a gradient was requested, but `kv` is not float32. To attend to the rows
        in the same call, use `rotate_write_attend`.
    """
    if k.shape != v.shape:
        raise ValueError(f"keys {k.shape} and values {v.shape} do not fit each other")
    return write_vectors(kv, jnp.stack([k, v], axis=1), slot_mapping, kv_dtype=kv_dtype)


def write_vectors[KV: jax.Array | QuantizedKV](
    kv: KV, rows: jax.Array, slot_mapping: jax.Array, *, kv_dtype: DTypeLike | None = None
) -> KV:
    """Write float[T, planes, K, D], all vectors of T tokens, to their slots; see `write_kv`."""
    kv_dtype = kv_float(kv, kv_dtype)
    if rows.ndim != 4 or (rows.shape[1:3], rows.shape[3]) != (kv.shape[1:3], kv.shape[4]):
        raise ValueError(f"vectors {rows.shape} do not fit a cache {kv.shape}")
    if slot_mapping.shape != rows.shape[:1]:
        raise ValueError(f"slot_mapping {slot_mapping.shape} does not fit {len(rows)} tokens")
    if kv_dtype != jnp.float32:
        rows = refuse_gradient(rows)
    written: Any
    if isinstance(kv, QuantizedKV):
        data, scale = quantize_rows(rows, kv_dtype)
        written = QuantizedKV(
            _scatter(kv.data, _stored(data, kv.dtype), slot_mapping),
            _scatter(kv.scale, scale, slot_mapping),
        )
    else:
        written = _scatter(kv, _stored(rows.astype(kv_dtype), kv.dtype), slot_mapping)
    return written


def _stored(rows: jax.Array, storage: jnp.dtype) -> jax.Array:
    return lax.bitcast_convert_type(rows, storage) if storage in _BITS else rows


def _scatter(pool: jax.Array, rows: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """Scatter rows [T, planes, K, ...] into pool [N, planes, K, bs, ...]."""
    num_blocks, block_size = pool.shape[0], pool.shape[3]
    if rows.shape[0] == 1:
        # XLA:CPU turns a scatter of one row into a slice update, which copies the pool.
        rows = jnp.pad(rows, ((0, 1), *((0, 0),) * (rows.ndim - 1)))
        slot_mapping = jnp.pad(slot_mapping, (0, 1), constant_values=num_blocks * block_size)
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    return pool.at[block, :, :, offset].set(rows, mode="drop", unique_indices=True)


def kv_storage_dtype(kv_dtype: DTypeLike, platform: str) -> jnp.dtype:
    """Return the array type that stores a cache of `kv_dtype` on `platform` ("cpu", "gpu").

    To scatter a row into a pool of 16-bit or 8-bit floats, XLA:CPU converts the whole pool. The
    same bits as unsigned integers are scattered in place. On CPUs, bfloat16 and float16 are
    therefore stored as uint16, and float8_e4m3fn as uint8.
    """
    kv_dtype = jnp.dtype(kv_dtype)
    if kv_dtype not in (*_FLOATS, *LARGEST):
        raise TypeError(
            "the type of a KV cache must be float32, bfloat16, float16, int8 or float8_e4m3fn, "
            f"got {kv_dtype}"
        )
    for bits, meanings in _BITS.items():
        if platform == "cpu" and kv_dtype in meanings:
            return bits
    return kv_dtype


def kv_shape_dtype(
    shape: tuple[int, ...], storage: DTypeLike
) -> jax.ShapeDtypeStruct | QuantizedKV:
    """Return shape and type of one layer's cache [N, 2, K, bs, D], stored as `storage`.

    Returns:
      The description of its array (see `kv_storage_dtype`), or a `QuantizedKV` of two for 8 bits.
    """
    data: Any = jax.ShapeDtypeStruct(shape, storage)
    if data.dtype.itemsize > 1:
        return data
    scale: Any = jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
    return QuantizedKV(data, scale)


def refuse_gradient(x: jax.Array) -> jax.Array:
    """Return x, and raise NotImplementedError if it is differentiated."""
    return _refused(x) if jnp.issubdtype(x.dtype, jnp.floating) else x


@jax.custom_jvp
def _refused(x: jax.Array) -> jax.Array:
    return x


@_refused.defjvp
def _(primals, tangents):
    raise NotImplementedError(
        "gradients pass through a KV cache only if it is float32: create it with dtype=jnp.float32"
    )


def kv_float(kv: jax.Array | QuantizedKV, kv_dtype: DTypeLike | None) -> jnp.dtype:
    """Return the type of the numbers in `kv`, however they are stored."""
    if isinstance(kv, QuantizedKV):
        known, form = (*LARGEST, jnp.dtype(jnp.uint8)), "the data of a QuantizedKV"
        if kv.scale.dtype != jnp.float32:
            raise TypeError(f"the scale of a QuantizedKV must be float32, got {kv.scale.dtype}")
        if kv.scale.shape != kv.shape[:-1]:
            raise ValueError(
                f"scale {kv.scale.shape} does not fit the data {kv.shape} of a QuantizedKV"
            )
    else:
        known, form = (*_FLOATS, jnp.dtype(jnp.uint16)), "kv that is not a QuantizedKV"
    if kv.dtype not in known:
        raise TypeError(f"{form} must be {_names(known)}, got {kv.dtype}")
    if kv.dtype in _BITS:
        meanings = _BITS[kv.dtype]
        if kv_dtype is None or jnp.dtype(kv_dtype) not in meanings:
            raise TypeError(
                f"kv is stored as {kv.dtype}: kv_dtype must be {_names(meanings)}, got {kv_dtype}"
            )
        return jnp.dtype(kv_dtype)
    if kv_dtype is not None and jnp.dtype(kv_dtype) != kv.dtype:
        raise TypeError(f"kv_dtype must be {kv.dtype} like kv, got {jnp.dtype(kv_dtype)}")
    return kv.dtype


def _names(dtypes: tuple[jnp.dtype, ...]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)


def _check_cpu(q: jax.Array, kv: jax.Array | QuantizedKV, kv_dtype: jnp.dtype) -> None:
    """Raise TypeError if the CPU kernels do not support these arrays."""
    reason = unsupported(q.shape[2], kv_dtype, "cpu")
    if reason is None and q.dtype != jnp.bfloat16:
        reason = f"queries must be bfloat16, not {q.dtype}"
    if reason is None and kv_dtype != jnp.int8 and kv.dtype not in _BITS:
        reason = f"{kv_dtype} must be stored as its bits, not as {kv.dtype}"
    if reason is not None:
        raise TypeError(f"the CPU kernels do not support this attention: {reason}")


def _mosaic(q: jax.Array, kv: jax.Array | QuantizedKV, *rest: jax.Array, **options) -> jax.Array:
    device = current_gpu() or HOPPER
    reason = _mosaic_unsupported(q, kv, device)
    if reason is not None:
        raise TypeError(f"the GPU kernels do not support this attention: {reason}")
    attention, calls = _mosaic_modules()
    return attention.jitted_attention(
        q, kv, *rest, device=device, interpret=calls.interpreter(), **options
    )


def _auto_is_mosaic(q: jax.Array, kv: jax.Array | QuantizedKV) -> bool:
    # On CPUs, including a GPU's host, bits are stored as unsigned integers.
    device = current_gpu()
    if kv.dtype in _BITS or device is None or kv.shape[1] == 1:
        return False
    reason = _mosaic_unsupported(q, kv, device)
    if reason is not None:
        _say_once(f"attention runs in plain XLA, without the GPU kernels: {reason}")
    return reason is None


def _mosaic_unsupported(q: jax.Array, kv: jax.Array | QuantizedKV, device: Gpu) -> str | None:
    heads, head_dim = q.shape[1:]
    attention, _ = _mosaic_modules()
    return attention.unsupported(
        heads, kv.shape[2], head_dim, kv.shape[3], q.dtype, kv.dtype, device
    )


def _mosaic_modules():
    # Pallas takes a second to import, and CPUs do not need it.
    from forge_kernels.attention import mosaic_calls, mosaic_gpu

    return mosaic_gpu, mosaic_calls


@functools.cache
def _say_once(message: str) -> None:
    log.warning(message)


def _check_sinks(sinks: jax.Array | None, heads: int) -> None:
    if sinks is None:
        return
    if sinks.shape != (heads,):
        raise ValueError(f"sinks must be [{heads}], one per query head, got {sinks.shape}")
    if sinks.dtype != jnp.float32:
        raise TypeError(f"sinks must be float32, got {sinks.dtype}")


def _check_shapes(q, kv, block_tables, kv_lens, cu_q_lens, num_seqs) -> None:
    if q.ndim != 3 or len(kv.shape) != 5 or kv.shape[1] not in (1, 2) or block_tables.ndim != 2:
        raise ValueError(
            "q must be [T, H, D], kv [N, 2 or 1, K, bs, D] and block_tables [S, max_blocks], got "
            f"{q.shape}, {kv.shape} and {block_tables.shape}"
        )
    if q.shape[2] != kv.shape[4] or q.shape[1] % kv.shape[2]:
        raise ValueError(f"heads of q {q.shape} do not fit those of kv {kv.shape}")
    seqs = block_tables.shape[0]
    if kv_lens.shape != (seqs,) or cu_q_lens.shape != (seqs + 1,) or num_seqs.shape != ():
        raise ValueError(
            f"block_tables has {seqs} rows, but the shapes are kv_lens {kv_lens.shape}, cu_q_lens "
            f"{cu_q_lens.shape}, num_seqs {num_seqs.shape}"
        )
