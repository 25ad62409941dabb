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
    """Rows of an embedding table.

    16-bit floats are gathered as their bits: XLA:CPU would convert the whole table to float32 to
    gather from it. Gradients pass as through a plain lookup.

    Args:
      table: float[V, d], or the packed matrix of a head that the model shares with its embedding.
        Or a quantised one in blocks.
      tokens: i32[T], each in [0, V); what is outside is clipped to it.
      dtype: of what comes of a quantised one.

    Returns:
      [T, d] of the table's type; bfloat16 of a packed one.
    """
    if isinstance(table, QuantizedWeight):
        if table.quantization.blocks is None or dtype is None:
            raise TypeError("rows of a quantised matrix that is not in blocks")
        return quantized_rows(table, tokens, dtype)
    if isinstance(table, PackedWeight):
        return packed_embed(table, tokens)
    if isinstance(table, PlainWeight):
        table = table.weight
    if isinstance(table, OrderedWeight | MixedMatrix):
        raise TypeError(f"rows of a {type(table).__name__}")
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
