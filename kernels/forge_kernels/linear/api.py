"""The linear layer with what stands before and after it in a decoder: norm, SwiGLU, residual.

A plain matrix is multiplied by XLA, in the form that it runs fast on every backend, and so is a
`QuantizedWeight`; a `PackedWeight` by the CPU kernels, which do all of it in one pass over it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from forge_kernels.linear.cpu_ffi import packed_linear
from forge_kernels.linear.packed import PackedWeight
from forge_kernels.linear.quantized import QuantizedWeight, quantized_product
from forge_kernels.norm import rms_norm

Weight = jax.Array | PackedWeight | QuantizedWeight


def linear(
    x: jax.Array,
    w: Weight,
    *,
    norm: tuple[jax.Array, float] | None = None,
    residual: jax.Array | None = None,
    swiglu: bool = False,
    num_rows: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """x times the transpose of w, summed in float32: `residual + swiglu(norm(x) w^T)`.

    Args:
      x: float[T, K_in].
      w: float[N_out, K_in] of x's type, or a packed one (then x is bfloat16), or a quantised one.
      norm: (weight float[K_in], eps): x is RMS-normalised first.
      residual: [T, N_out] of x's type, added to the result; not together with `swiglu`.
      swiglu: the first half of the N_out columns gates the second: silu(gate) * up (Shazeer 2020).
        A packed w must have been packed as `paired`.
      num_rows: i32[], a promise that rows from there on are not needed: they may hold anything.
      out_dtype: type of the result; x's by default.

    Returns:
      [T, N_out] of `out_dtype`; [T, N_out / 2] with `swiglu`.

    Raises:
      TypeError: types that do not go together: XLA:CPU has no fast product of two types, and the
        kernels know bfloat16 and, as a result, float32.
      ValueError: shapes or options that do not fit together.
    """
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    _check(x, w, norm, residual, swiglu, out_dtype)
    if isinstance(w, PackedWeight):
        return packed_linear(
            x,
            w,
            norm=norm,
            residual=residual,
            swiglu=swiglu,
            num_rows=num_rows,
            out_dtype=out_dtype,
        )
    if norm is not None:
        with jax.named_scope("norm"):
            x = rms_norm(x, *norm)
    with jax.named_scope("product"):
        is_plain = not isinstance(w, QuantizedWeight)
        y = _multiply(x, w, out_dtype) if is_plain else quantized_product(x, w, out_dtype)
    if swiglu:
        with jax.named_scope("swiglu"):
            gate, up = jnp.split(y, 2, axis=-1)
            return jax.nn.silu(gate) * up
    if residual is None:
        return y
    with jax.named_scope("residual"):
        return residual + y


# Traced and lowered once for all the layers of a model.
@functools.partial(jax.jit, static_argnums=2)
def _multiply(x: jax.Array, w: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """float[T, K_in], float[N_out, K_in] -> [T, N_out] of `out_dtype`, summed in float32."""
    contract = (((1,), (1,)), ((), ()))

    def by_way_of_float32(x: jax.Array, w: jax.Array) -> jax.Array:
        rows = x.shape[0]
        if rows == 1 and x.dtype.itemsize == 2:
            # XLA:CPU computes a 16-bit matrix-vector product 10 times slower than one of two rows.
            x = jnp.pad(x, ((0, 1), (0, 0)))
        y = lax.dot_general(x, w, contract, preferred_element_type=jnp.float32)[:rows]
        return y.astype(out_dtype)

    def directly(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot_general(x, w, contract, preferred_element_type=out_dtype)

    # XLA:CPU is 10 times slower at 16-bit results. On GPUs cuBLAS would write float32 to memory.
    return lax.platform_dependent(x, w, cpu=by_way_of_float32, default=directly)


def _check(
    x: jax.Array,
    w: Weight,
    norm: tuple[jax.Array, float] | None,
    residual: jax.Array | None,
    swiglu: bool,
    out_dtype: jnp.dtype,
) -> None:
    packed = isinstance(w, PackedWeight)
    if isinstance(w, PackedWeight):
        outputs, inputs, dtype = w.packing.outputs, w.packing.inputs, jnp.dtype(jnp.bfloat16)
        kind = f"packed ({w.packing.format})"
    elif isinstance(w, QuantizedWeight):
        outputs, inputs, dtype = w.quantization.outputs, w.quantization.inputs, x.dtype
        kind = w.quantization.values
    else:
        (outputs, inputs), dtype, kind = w.shape, w.dtype, str(w.dtype)
    if x.dtype != dtype:
        raise TypeError(f"linear of {x.dtype} activations with {kind} weights")
    if packed and out_dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"linear with a packed weight gives bfloat16 or float32, not {out_dtype}")
    for name, array in (("norm", norm and norm[0]), ("residual", residual)):
        if array is not None and array.dtype != x.dtype:
            raise TypeError(f"linear of {x.dtype} activations with a {name} of {array.dtype}")
    if x.ndim != 2 or x.shape[1] != inputs:
        raise ValueError(f"linear of x {x.shape} with a weight [{outputs}, {inputs}]")
    if norm is not None and norm[0].shape != (inputs,):
        raise ValueError(f"a norm {norm[0].shape} for rows of {inputs}")
    if isinstance(w, PackedWeight) and swiglu != w.packing.paired:
        raise ValueError("swiglu needs a weight that was packed as paired, and only it does")
    if swiglu and residual is not None:
        raise ValueError("linear takes swiglu or a residual, not both")
    if residual is not None and residual.shape != (x.shape[0], outputs):
        raise ValueError(f"residual {residual.shape} for a result [{x.shape[0]}, {outputs}]")
