"""Attention to keys and values that the same call writes: the unit that gradients pass through.

A cache of 16 or 8 bits does not carry gradients: on CPUs, it is an array of integers. The write and
the attention therefore have one gradient. It leads from the results to the rows of this call, not
through the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from forge_kernels.attention.api import (
    Implementation,
    kv_float,
    ragged_paged_attention,
    refuse_gradient,
    rotate_and_write,
    zero_padding,
)
from forge_kernels.attention.backward import attention_backward
from forge_kernels.attention.quantized import QuantizedKV
from forge_kernels.rope import apply_rope


def rotate_write_attend[KV: jax.Array | QuantizedKV](  # noqa: PLR0913
    qkv: jax.Array,
    kv: KV,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    interleaved: bool = False,
    num_tokens: jax.Array | None = None,
    kv_dtype: DTypeLike | None = None,
    implementation: Implementation = "auto",
    sinks: jax.Array | None = None,
    **options: Any,
) -> tuple[KV, jax.Array]:
    """Rotate queries and keys, write keys and values to the cache, and attend.

    The results are those of `rotate_and_write` and `ragged_paged_attention`, to the bit. The
    gradient is that of the reference, whatever the implementation:

    - It leads to `qkv`, the rows that this call writes, to `sinks`, and to `cos` and `sin`.
    - If the cache is float32, it also leads to `kv` and from the returned cache. So it passes
      through any number of calls.
    - In any other cache, keys and values of earlier calls are constants, and the returned cache is
      one for later calls.
    - Rounding to the type of the cache counts as the identity (a straight-through estimator).

    It supports reverse mode, once. With `reference` and a float32 cache, JAX differentiates the
    code itself, also forward and repeatedly. The memory for the gradient is a float32 copy of the
    layer's cache, and one tile of scores.

    Args:
      qkv, kv, cos, sin, slot_mapping, interleaved, num_tokens: see `rotate_and_write`.
      block_tables, kv_lens, cu_q_lens, num_seqs, sinks: see `ragged_paged_attention`.
      kv_dtype: see `ragged_paged_attention`.
      implementation: see `ragged_paged_attention`.
      options: the other options of `ragged_paged_attention`.

    Returns:
      (kv, float[T, H, D]).

    Raises:
      TypeError: types do not match.
      ValueError: shapes do not match.
      NotImplementedError: a gradient was requested with respect to `kv` that is not float32.
    """
    H = qkv.shape[1] - 2 * kv.shape[2]

    def write(kv: KV, slots: jax.Array, qkv: jax.Array, *rotation: jax.Array):
        cos, sin, *count = rotation
        with jax.named_scope("rope_write"):
            q, kv = rotate_and_write(
                qkv,
                kv,
                cos,
                sin,
                slots,
                interleaved=interleaved,
                num_tokens=count[0] if count else None,
                kv_dtype=kv_dtype,
                implementation=implementation,
            )
        return kv, q

    def rotated(qkv: jax.Array, cos: jax.Array, sin: jax.Array, *_: jax.Array):
        turned = apply_rope(qkv[:, : H + kv.shape[2]], cos, sin, interleaved=interleaved)
        k, v = turned[:, H:], qkv[:, H + kv.shape[2] :]
        return turned[:, :H], jnp.stack([k, v], axis=1)

    # An argument that the implementation ignores would stay in the lowered program.
    takes_count = implementation == "cpu" and isinstance(kv, jax.Array)
    count = (num_tokens,) if num_tokens is not None and takes_count else ()
    arrays = (qkv, cos, sin, *count)
    batch = block_tables, kv_lens, cu_q_lens, num_seqs
    options |= {"kv_dtype": kv_dtype, "implementation": implementation}
    return write_then_attend(write, rotated, arrays, kv, slot_mapping, batch, sinks, options)


def write_then_attend[KV: jax.Array | QuantizedKV](
    write: Callable[..., tuple[KV, jax.Array]],
    inputs_of: Callable[..., tuple[jax.Array, jax.Array]],
    arrays: tuple[jax.Array, ...],
    kv: KV,
    slot_mapping: jax.Array,
    batch: tuple[jax.Array, ...],
    sinks: jax.Array | None,
    options: dict[str, Any],
) -> tuple[KV, jax.Array]:
    """Return (kv, out) of a write and the attention after it, with the gradient of both.

    The gradient is that of `rotate_write_attend`.

    Args:
      write: returns the cache and the queries for (kv, slot_mapping, *arrays).
      inputs_of: returns the queries [T, H, D] and the rows [T, planes, K, D] that `write` writes,
        for `arrays`. JAX differentiates it.
      arrays: the floats come first; the gradient leads to them.
      kv: the cache.
      slot_mapping: i32[T].
      batch: block_tables, kv_lens, cu_q_lens and num_seqs.
      sinks: f32[H], or None.
      options: the other options of `ragged_paged_attention`.
    """
    kv_dtype = kv_float(kv, options["kv_dtype"])
    carries = kv_dtype == jnp.float32

    def served(arrays, kv, sinks, slots, batch):
        kv, q = write(kv, slots, *arrays)
        with jax.named_scope("attention"):
            return kv, ragged_paged_attention(q, kv, *batch, sinks=sinks, **options)

    if carries and options.get("implementation") == "reference":
        return served(arrays, kv, sinks, slot_mapping, batch)

    def forward(arrays, kv, sinks, slots, batch):
        kv, out = served(arrays, kv, sinks, slots, batch)
        return (kv, zero_padding(out, batch)), (arrays, kv, sinks, slots, batch)

    def backward(kept, slopes):
        arrays, kv, sinks, slots, batch = kept
        by_kv, slope = slopes
        scoring = {name: options.get(name) for name in ("window", "soft_cap")}
        scale = options["sm_scale"]
        (q, _), inputs_vjp = jax.vjp(_in_float32(inputs_of), *arrays)
        by = attention_backward(
            slope, q, kv, *batch, sm_scale=scale, kv_dtype=kv_dtype, sinks=sinks, **scoring
        )
        total = by.kv + by_kv if carries else by.kv
        block, offset = slots // kv.shape[3], slots % kv.shape[3]
        by_rows = total.at[block, :, :, offset].get(mode="fill", fill_value=0)
        by_arrays = inputs_vjp((by.q, by_rows))
        by_old = None
        if carries:
            by_old = total.at[block, :, :, offset].set(0, mode="drop", unique_indices=True)
        return by_arrays, by_old, by.sinks, None, None

    differentiable = jax.custom_vjp(served)
    differentiable.defvjp(forward, backward)
    if carries:
        return differentiable(arrays, kv, sinks, slot_mapping, batch)
    kv = jax.tree.map(refuse_gradient, kv)
    kv, out = differentiable(arrays, kv, sinks, slot_mapping, batch)
    return jax.tree.map(lax.stop_gradient, kv), out


def _in_float32(inputs_of: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of the same arrays whose results, and thus gradients, are float32."""

    def of(*arrays: jax.Array):
        return inputs_of(
            *(
                array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array
                for array in arrays
            )
        )

    return of
