"""The embedding lookup."""

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_jvp
def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of an embedding table.

    16-bit floats are gathered as their bits: XLA:CPU would convert the whole table to float32 to
    gather from it. Gradients pass as through a plain lookup.

    Args:
      table: float[V, d].
      tokens: i32[T], each in [0, V); what is outside is clipped to it.

    Returns:
      [T, d] of the table's type.
    """
    if table.dtype.itemsize != 2:
        return table.at[tokens].get(mode="clip")
    bits = lax.bitcast_convert_type(table, jnp.uint16)
    return lax.bitcast_convert_type(bits.at[tokens].get(mode="clip"), table.dtype)


@embed.defjvp
def _embed_jvp(primals, tangents):
    table, tokens = primals
    table_tangent, _ = tangents
    return embed(table, tokens), table_tangent.at[tokens].get(mode="clip")
