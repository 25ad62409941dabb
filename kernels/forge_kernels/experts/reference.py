"""Mixtures of experts in float32, the oracle of the tests: every expert computes every row."""

import jax
import jax.numpy as jnp
from jax import lax


def reference_experts(
    x: jax.Array,  # float[T, d]
    gate_up: jax.Array,  # float[E, 2 I, d]
    down: jax.Array,  # float[E, d, I]
    experts: jax.Array,  # i32[T, k]
    weights: jax.Array,  # f32[T, k]
) -> jax.Array:  # [T, d] of x's type
    x32, exact = x.astype(jnp.float32), lax.Precision.HIGHEST
    y = jnp.zeros(x.shape, jnp.float32)
    for expert in range(len(gate_up)):
        both = jnp.matmul(x32, gate_up[expert].astype(jnp.float32).T, precision=exact)
        gate, up = jnp.split(both, 2, axis=-1)
        inner = jax.nn.silu(gate) * up
        out = jnp.matmul(inner, down[expert].astype(jnp.float32).T, precision=exact)
        weight = jnp.sum(jnp.where(experts == expert, weights, 0.0), axis=1, keepdims=True)
        chosen = jnp.any(experts == expert, axis=1, keepdims=True)
        y = jnp.where(chosen, y + weight * out, y)
    return y.astype(x.dtype)
