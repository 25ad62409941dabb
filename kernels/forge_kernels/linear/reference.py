"""The linear layer in float32 throughout, the oracle of the tests."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def reference_linear(
    x: jax.Array,  # float[T, K_in]
    w: jax.Array,  # float[N_out, K_in]
    *,
    norm: tuple[jax.Array, float] | None = None,
    residual: jax.Array | None = None,
    swiglu: bool = False,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:  # out_dtype[T, N_out]
    dtype = x.dtype
    x = x.astype(jnp.float32)
    if norm is not None:
        weight, eps = norm
        x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
        x = x * weight.astype(jnp.float32)[None]
    y = jnp.matmul(x, w.astype(jnp.float32).T, precision=lax.Precision.HIGHEST)
    if swiglu:
        gate, up = jnp.split(y, 2, axis=-1)
        y = jax.nn.silu(gate) * up
    if residual is not None:
        y = residual.astype(jnp.float32) + y
    return y.astype(out_dtype or dtype)
