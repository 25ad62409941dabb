"""Products with adapters in plain XLA: with those of all places, or with each row's own."""

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.linear import linear


def all_places(
    x: jax.Array,  # float[T, K]
    a: jax.Array,  # [P, r, K] of x's type
    b: jax.Array,  # [N, P, r] of x's type
    place: jax.Array,  # i32[T], from 1; 0: none
) -> jax.Array:  # [T, N] of x's type
    """Multiply all rows by all adapters, in two products, and mask the other adapters."""
    places, rank, inputs = a.shape
    inner = linear(x, a.reshape(places * rank, inputs))
    own = place[:, None] == (1 + jnp.arange(places * rank) // rank)[None]
    return linear(jnp.where(own, inner, 0), b.reshape(len(b), places * rank))


def own_places(
    x: jax.Array,  # float[T, K]
    a: jax.Array,  # [P, r, K] of x's type
    b: jax.Array,  # [N, P, r] of x's type
    place: jax.Array,  # i32[T], from 1; 0: none
) -> jax.Array:  # [T, N] of x's type
    """Multiply each row by its own adapter, for GPUs and few rows.

    XLA:GPU fuses the selection of the matrices into the products, which it computes as reductions.
    Rows without an adapter read the first one.
    """
    own = jnp.maximum(place - 1, 0)
    inner = _products(x, a[own])
    out = _products(inner, b.swapaxes(0, 1)[own])
    return jnp.where((place > 0)[:, None], out, 0)


def _products(x: jax.Array, matrices: jax.Array) -> jax.Array:
    """Multiply each row of x, [T, K], by its own matrix, [T, N, K]; sum in float32."""
    sums = lax.dot_general(
        x[:, None], matrices, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
    return sums[:, 0].astype(x.dtype)
