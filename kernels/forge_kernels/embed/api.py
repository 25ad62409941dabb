"""The embedding lookup."""

from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from forge_kernels.linear import (
    MatrixWeight,
    MixedMatrix,
    OrderedWeight,
    PackedWeight,
    PlainWeight,
    QuantizedWeight,
)
from forge_kernels.linear.cpu_ffi import packed_embed
from forge_kernels.linear.quantized import quantized_rows


def embed(
    table: jax.Array | MatrixWeight,
    tokens: jax.Array,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Return rows of an embedding table.

    16-bit floats are gathered as their bits, because XLA:CPU would convert the whole table to
    float32 first. Gradients are those of a plain lookup.

    Args:
      table: float[V, d], a quantized matrix in blocks, or the packed matrix of a head that the
        model shares with its embedding.
      tokens: i32[T]; values outside of [0, V) are clipped.
      dtype: the type of the result for a matrix in blocks.

    Returns:
      [T, d] of the table's type; bfloat16 for a packed table.
    """
    if isinstance(table, QuantizedWeight):
        if table.quantization.blocks is None or dtype is None:
            raise TypeError("an embedding must not be a quantized matrix that is not in blocks")
        return quantized_rows(table, tokens, dtype)
    if isinstance(table, PackedWeight):
        return packed_embed(table, tokens)
    if isinstance(table, PlainWeight):
        table = table.weight
    if isinstance(table, OrderedWeight | MixedMatrix):
        raise TypeError(f"an embedding must not be a {type(table).__name__}")
    return _rows(cast(jax.Array, table), tokens)


@jax.custom_jvp
def _rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    if table.dtype.itemsize != 2:
        return table.at[tokens].get(mode="clip")
    bits = lax.bitcast_convert_type(table, jnp.uint16)
    return lax.bitcast_convert_type(bits.at[tokens].get(mode="clip"), table.dtype)


@_rows.defjvp
def _rows_jvp(primals, tangents):
    table, tokens = primals
    table_tangent, _ = tangents
    return _rows(table, tokens), table_tangent.at[tokens].get(mode="clip")
