"""Plain weights: a matrix of floats as in checkpoints, multiplied by XLA."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from forge_kernels.linear.operands import MatmulOptions, Operands, around, check


@dataclass(frozen=True)
class PlainWeight:
    """A matrix of floats, or those of experts; a pytree of one array."""

    weight: jax.Array  # float[N_out, K_in], or float[E, N_out, K_in]

    @classmethod
    def abstract(
        cls, outputs: int, inputs: int, dtype: DTypeLike, experts: int | None = None
    ) -> PlainWeight:
        """Return the weight with a shape and a type for the array."""
        shape = (outputs, inputs) if experts is None else (experts, outputs, inputs)
        return cls(cast(Any, jax.ShapeDtypeStruct(shape, dtype)))

    def matmul(self, x: jax.Array, **options: Unpack[MatmulOptions]) -> jax.Array:
        """Return x times the transpose of the matrix; see `linear`. XLA computes all rows."""
        w, given = self.weight, Operands(**options)
        dtype, (outputs, inputs) = jnp.dtype(given.out_dtype or x.dtype), w.shape
        check(x, given, kind=str(w.dtype), dtype=w.dtype, shape=(outputs, inputs))

        def product(x: jax.Array) -> jax.Array:
            return _multiply(x, w, dtype)

        return around(x, product, given)


jax.tree_util.register_dataclass(PlainWeight, data_fields=["weight"], meta_fields=[])


# Traced and lowered once for all layers of a model.
@functools.partial(jax.jit, static_argnums=2)
def _multiply(x: jax.Array, w: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """Multiply float[T, K_in] by float[N_out, K_in] to [T, N_out], summed in float32."""
    contract = (((1,), (1,)), ((), ()))

    def by_way_of_float32(x: jax.Array, w: jax.Array) -> jax.Array:
        rows = x.shape[0]
        if rows == 1 and x.dtype.itemsize == 2:
            # XLA:CPU is 10 times slower at a 16-bit matrix-vector product than at two rows.
            x = jnp.pad(x, ((0, 1), (0, 0)))
        y = lax.dot_general(x, w, contract, preferred_element_type=jnp.float32)[:rows]
        return y.astype(out_dtype)

    def directly(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot_general(x, w, contract, preferred_element_type=out_dtype)

    # XLA:CPU is 10 times slower with 16-bit results. On GPUs, cuBLAS would write float32 to memory.
    return lax.platform_dependent(x, w, cpu=by_way_of_float32, default=directly)
