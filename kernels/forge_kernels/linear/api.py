"""The linear layer fused with its neighbors in a decoder: norm, SwiGLU and residual.

XLA multiplies a plain matrix, in the form that is fast on every backend, and a `QuantizedWeight`.
The CPU kernels multiply a `PackedWeight` and do everything in one pass over it.
"""

import jax
from jax.typing import DTypeLike

from forge_kernels.linear.composed import MixedMatrix, OrderedWeight
from forge_kernels.linear.cpu_ffi import PackedWeight
from forge_kernels.linear.plain import PlainWeight
from forge_kernels.linear.quantized import QuantizedWeight

Weight = PlainWeight | PackedWeight | QuantizedWeight | OrderedWeight | MixedMatrix


def linear(
    x: jax.Array,
    w: jax.Array | Weight,
    *,
    norm: tuple[jax.Array, float] | None = None,
    residual: jax.Array | None = None,
    swiglu: bool = False,
    num_rows: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Return `residual + swiglu(norm(x) w^T)`, summed in float32.

    Args:
      x: float[T, K_in].
      w: float[N_out, K_in] of x's type, or a weight of another type, whose `matmul` computes the
        product. A packed weight needs bfloat16 x.
      norm: (weight float[K_in], eps) of an RMS norm that is applied to x first.
      residual: [T, N_out] of x's type, added to the result; not together with `swiglu`.
      swiglu: the first half of the N_out columns gates the second: silu(gate) * up (Shazeer 2020).
        A packed w must have been packed as `paired`.
      num_rows: i32[], a promise that the caller ignores rows from there on; they are undefined.
      out_dtype: type of the result; x's by default.

    Returns:
      [T, N_out] of `out_dtype`; [T, N_out / 2] with `swiglu`.

    Raises:
      TypeError: types do not match. XLA:CPU has no fast product of two types, and the kernels
        support only bfloat16, with bfloat16 or float32 results.
      ValueError: shapes or options do not match.
    """
    weight = w if isinstance(w, Weight) else PlainWeight(w)
    return weight.matmul(
        x, norm=norm, residual=residual, swiglu=swiglu, num_rows=num_rows, out_dtype=out_dtype
    )
