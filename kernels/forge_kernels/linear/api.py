"""The linear layer with what stands before and after it in a decoder: norm, SwiGLU, residual.

A plain matrix is multiplied by XLA, in the form that it runs fast on every backend, and so is a
`QuantizedWeight`; a `PackedWeight` by the CPU kernels, which do all of it in one pass over it.
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
    """x times the transpose of w, summed in float32: `residual + swiglu(norm(x) w^T)`.

    Args:
      x: float[T, K_in].
      w: float[N_out, K_in] of x's type, or a weight of another type, whose `matmul` computes the
        product. With a packed one x is bfloat16.
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
    weight = w if isinstance(w, Weight) else PlainWeight(w)
    return weight.matmul(
        x, norm=norm, residual=residual, swiglu=swiglu, num_rows=num_rows, out_dtype=out_dtype
    )
