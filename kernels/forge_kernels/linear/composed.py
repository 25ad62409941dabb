"""Weights made of others: several stacked matrices, or a matrix with reordered columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.derivatives import with_derivative_of
from forge_kernels.linear.operands import MatmulOptions, MatrixWeight
from forge_kernels.linear.quantized import QuantizedWeight
from forge_kernels.norm import rms_norm


@dataclass(frozen=True)
class MixedMatrix:
    """A matrix whose rows are stored in several ways; each piece is multiplied separately."""

    pieces: tuple[MatrixWeight, ...]  # stacked

    def matmul(self, x: jax.Array, **options: Unpack[MatmulOptions]) -> jax.Array:
        """Return x times the transpose of the matrix; see `linear`."""
        residual, swiglu = options.pop("residual", None), options.pop("swiglu", False)
        norm = options.get("norm")
        if norm is not None and any(isinstance(piece, QuantizedWeight) for piece in self.pieces):
            options["norm"] = None
            with jax.named_scope("norm"):
                x = rms_norm(x, *norm)
                # Without the barrier, XLA:GPU computes part of the norm again for every piece.
                x = lax.optimization_barrier(x)
        if swiglu:  # applies to gate and up before rounding, as in a single matrix
            options["out_dtype"] = jnp.float32
        y = jnp.concatenate([piece.matmul(x, **options) for piece in self.pieces], axis=1)
        if swiglu:
            gate, up = jnp.split(y, 2, axis=-1)
            y = (jax.nn.silu(gate) * up).astype(x.dtype)
        return y if residual is None else residual + y


@dataclass(frozen=True)
class OrderedWeight:
    """A matrix whose columns are stored in a different order than those of x (GPTQ's desc_act).

    A norm must be applied to x beforehand, because its weights are in the order of x.
    """

    matrix: MatrixWeight
    order: jax.Array  # i32[K_in] or i32[E, K_in], the column of x for each column of the matrix

    @classmethod
    def abstract(cls, matrix: Any, inputs: int, experts: int | None = None) -> OrderedWeight:
        """Return the weight with shapes and types for arrays."""
        shape = (inputs,) if experts is None else (experts, inputs)
        return cls(matrix, cast(Any, jax.ShapeDtypeStruct(shape, jnp.int32)))

    def matmul(self, x: jax.Array, **options: Unpack[MatmulOptions]) -> jax.Array:
        """Return x times the transpose of the matrix; see `linear`."""
        assert options.get("norm") is None, "a norm in the order of x"
        return self.matrix.matmul(_columns(x, self.order), **options)


jax.tree_util.register_dataclass(MixedMatrix, data_fields=["pieces"], meta_fields=[])
jax.tree_util.register_dataclass(OrderedWeight, data_fields=["matrix", "order"], meta_fields=[])


def _columns(x: jax.Array, order: jax.Array) -> jax.Array:
    """Return x[:, order], with 16-bit floats as bits because XLA:CPU would convert all of x."""

    def as_bits(x: jax.Array, order: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint16)[:, order], x.dtype)

    def as_floats(x: jax.Array, order: jax.Array) -> jax.Array:
        return x[:, order]

    if x.dtype.itemsize != 2:
        return as_floats(x, order)
    return with_derivative_of(as_floats, as_bits)(x, order)
