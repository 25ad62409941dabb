"""Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685) with several adapters in one batch."""

import jax
import jax.numpy as jnp

from forge_kernels.linear import linear


def lora(x: jax.Array, a: jax.Array, b: jax.Array, place: jax.Array) -> jax.Array:
    """Return each row's adapter contribution, `(x a^T) b^T`, or 0 for a row without an adapter.

    All places multiply all rows, and everything but a row's own place is replaced by zero in
    between. Shapes and the order of summation are therefore the same in every batch, and the bits
    of a row depend only on its own adapter. `b` must be finite everywhere, because 0 * NaN is NaN.

    Args:
      x: float[T, K_in].
      a: [P, r, K_in] of x's type, one matrix for each of P places.
      b: [N_out, P, r] of x's type, with the adapter's scaling in it.
      place: i32[T], the place of each row from 1 on; 0: none.

    Returns:
      [T, N_out] of x's type, each product summed in float32.

    Raises:
      ValueError: shapes do not match.
    """
    places, rank, inputs = a.shape
    if b.shape[1:] != (places, rank) or place.shape != x.shape[:1]:
        raise ValueError(
            f"shapes do not match: x {x.shape}, a {a.shape}, b {b.shape}, place {place.shape}"
        )
    inner = linear(x, a.reshape(places * rank, inputs))
    own = place[:, None] == (1 + jnp.arange(places * rank) // rank)[None]
    return linear(jnp.where(own, inner, 0), b.reshape(len(b), places * rank))
