"""The choice between XLA and the GPU kernel for a few rows, and derivatives of the kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from forge_kernels.linear.tiles import DEPTH, GROUPS, MOST_ROWS, TILE

if TYPE_CHECKING:
    from forge_kernels.linear.quantized import Quantization, QuantizedWeight

Plain = Callable[[jax.Array, "QuantizedWeight", jax.Array | None], jax.Array]


def supports(quantization: Quantization, rows: int, dtype: DTypeLike) -> bool:
    """Return True if the kernel multiplies so many rows of this type by such a matrix."""
    kept = quantization
    if not kept.fused or kept.values not in DEPTH:
        return False
    depth, blocks = DEPTH[kept.values], kept.blocks
    return (
        rows <= MOST_ROWS
        and dtype in (jnp.bfloat16, jnp.float16)
        and not kept.zeros
        and kept.activations is None
        and kept.experts is None
        and kept.group in GROUPS[kept.values]
        and (blocks is None or blocks.size % depth == 0 or depth % blocks.size == 0)
        # Four int8 scales are converted at once.
        and (kept.group_scale is None or depth // kept.group % 4 == 0)
        and kept.outputs % (2 * TILE) == 0
        and kept.inputs % depth == 0
    )


def few_rows_linear(
    x: jax.Array,
    w: QuantizedWeight,
    residual: jax.Array | None,
    plain: Plain,
    *,
    swiglu: bool,
    out_dtype: DTypeLike,
    capability: tuple[int, int],
) -> jax.Array:
    """Return `residual + swiglu(x w^T)`, by the kernel on a GPU.

    Args:
      x: bf16 or f16[T, K_in].
      w: a matrix that `supports` accepts.
      residual: [T, N_out] of x's type, or None.
      plain: computes the same in plain XLA: on CPUs, and for derivatives.
      swiglu: as in `linear`.
      out_dtype: type of the result.
      capability: the GPU's compute capability.

    Returns:
      [T, N_out] of `out_dtype`; [T, N_out / 2] with `swiglu`.
    """
    # Pallas takes a second to import, and CPUs do not need it.
    from forge_kernels.linear import mosaic_gpu

    kernel = functools.partial(
        mosaic_gpu.jitted_product, swiglu=swiglu, out_dtype=out_dtype, capability=capability
    )

    @jax.custom_jvp
    def product(x: jax.Array, w: QuantizedWeight, residual: jax.Array | None) -> jax.Array:
        return lax.platform_dependent(x, w, residual, cpu=plain, default=kernel)

    @product.defjvp
    def derivative(primals, tangents):
        return product(*primals), jax.jvp(plain, primals, tangents)[1]

    return product(x, w, residual)
