"""Products with weights as functions that JAX differentiates: matrices of floats in float32."""

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.linear.cpu_ffi import PackedWeight
from forge_kernels.linear.operands import MatrixWeight
from forge_kernels.linear.quantized import QuantizedWeight, float_rows
from forge_kernels.linear.unpacked import unpacked


def float_product(x: jax.Array, w: jax.Array | MatrixWeight, precision: lax.Precision) -> jax.Array:
    """Multiply f32[T, K_in] by the transpose of one matrix to f32[T, N_out], without rounding x."""
    if isinstance(w, PackedWeight):
        w = unpacked(w.weight, w.scale, w.packing)
    elif isinstance(w, QuantizedWeight):
        w = float_rows(w)
    assert isinstance(w, jax.Array)
    return jnp.matmul(x, w.astype(jnp.float32).T, precision=precision)
