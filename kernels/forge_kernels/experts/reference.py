"""Mixtures of experts in float32, the oracle of the tests: every expert computes every row."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.experts.activations import swiglu


def reference_experts(
    x: jax.Array,  # float[T, d]
    gate_up: jax.Array,  # float[E, 2 I, d]
    down: jax.Array,  # float[E, d, I]
    experts: jax.Array,  # i32[T, k]
    weights: jax.Array,  # f32[T, k]
    biases: tuple[jax.Array, jax.Array] | None = None,  # float[E, 2 I], float[E, d]
    *,
    activation: Callable[[jax.Array], jax.Array] = swiglu,
) -> jax.Array:  # [T, d] of x's type
    x32, exact = x.astype(jnp.float32), lax.Precision.HIGHEST
    y = jnp.zeros(x.shape, jnp.float32)
    for expert in range(len(gate_up)):
        both = jnp.matmul(x32, gate_up[expert].astype(jnp.float32).T, precision=exact)
        if biases is not None:
            both = both + biases[0][expert].astype(jnp.float32)[None]
        out = jnp.matmul(activation(both), down[expert].astype(jnp.float32).T, precision=exact)
        if biases is not None:
            out = out + biases[1][expert].astype(jnp.float32)[None]
        weight = jnp.sum(jnp.where(experts == expert, weights, 0.0), axis=1, keepdims=True)
        chosen = jnp.any(experts == expert, axis=1, keepdims=True)
        y = jnp.where(chosen, y + weight * out, y)
    return y.astype(x.dtype)
