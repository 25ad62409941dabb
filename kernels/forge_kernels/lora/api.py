"""Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685), of several adapters in one batch."""

import jax
import jax.numpy as jnp

from forge_kernels.linear import linear


def lora(x: jax.Array, a: jax.Array, b: jax.Array, place: jax.Array) -> jax.Array:
    """What each row's own adapter adds to a linear layer: `(x a^T) b^T`, 0 for a row without one.

    All places are multiplied with all rows, and what is not a row's own is replaced by zero in
    between. So shapes and order of summation are the same whoever shares the step: the bits of a
    row depend on its own adapter alone. Of the others nothing may come through, so `b` must be
    finite everywhere: 0 * NaN is NaN.

    Args:
      x: float[T, K_in].
      a: [P, r, K_in] of x's type, one matrix for each of P places.
      b: [N_out, P, r] of x's type, with the adapter's scaling in it.
      place: i32[T], whose place each row takes, from 1; 0: none.

    Returns:
      [T, N_out] of x's type, each product summed in float32.

    Raises:
      ValueError: shapes that do not fit together.
    """
    places, rank, inputs = a.shape
    if b.shape[1:] != (places, rank) or place.shape != x.shape[:1]:
        raise ValueError(f"lora of x {x.shape}, a {a.shape}, b {b.shape}, place {place.shape}")
    inner = linear(x, a.reshape(places * rank, inputs))
    own = place[:, None] == 1 + jnp.arange(places * rank) // rank
    return linear(jnp.where(own, inner, 0), b.reshape(len(b), places * rank))
