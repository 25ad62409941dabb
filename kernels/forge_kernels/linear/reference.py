"""The linear layer computed in float32 throughout: the oracle."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def reference_linear(
    x: jax.Array,  # float[T, K_in]
    w: jax.Array,  # float[N_out, K_in]
    *,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:  # out_dtype[T, N_out]
    y = jnp.matmul(x.astype(jnp.float32), w.astype(jnp.float32).T, precision=lax.Precision.HIGHEST)
    return y.astype(out_dtype or x.dtype)
