"""Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685) with several adapters in one batch."""

import jax
from jax import lax

from forge_kernels.lora.xla import all_places, own_places


def lora(x: jax.Array, a: jax.Array, b: jax.Array, place: jax.Array) -> jax.Array:
    """Return each row's adapter contribution, `(x a^T) b^T`, or 0 for a row without an adapter.

    The bits of a row depend only on the row, its own adapter and T. On a GPU, a step with at most
    half as many rows as places reads only the places of its rows. Otherwise all places multiply all
    rows, and everything but a row's own place is replaced by zero in between. `b` must be finite
    everywhere, because 0 * NaN is NaN.

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
    places, rank, _ = a.shape
    if b.shape[1:] != (places, rank) or place.shape != x.shape[:1]:
        raise ValueError(
            f"shapes do not match: x {x.shape}, a {a.shape}, b {b.shape}, place {place.shape}"
        )
    if 2 * len(x) <= places:
        return lax.platform_dependent(x, a, b, place, cpu=all_places, default=own_places)
    return all_places(x, a, b, place)
