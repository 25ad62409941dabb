"""The linear layer, in the form that XLA runs fast on every backend."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def linear(x: jax.Array, w: jax.Array, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """x times the transpose of w, summed in float32.

    Args:
      x: float[T, K_in].
      w: float[N_out, K_in], of x's type.
      out_dtype: type of the result; x's by default.

    Returns:
      [T, N_out] of `out_dtype`.

    Raises:
      TypeError: x and w differ in type (XLA:CPU has no fast product for that).
    """
    if x.dtype != w.dtype:
        raise TypeError(f"linear of {x.dtype} activations with {w.dtype} weights")
    rows = x.shape[0]
    if rows == 1 and x.dtype.itemsize == 2:
        # XLA:CPU computes a 16-bit matrix-vector product 10 times slower than one of two rows.
        x = jnp.pad(x, ((0, 1), (0, 0)))
    contract = (((1,), (1,)), ((), ()))
    y = lax.dot_general(x, w, contract, preferred_element_type=jnp.float32)
    return y[:rows].astype(out_dtype or x.dtype)
