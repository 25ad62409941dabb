"""Activations of experts, from the products of gates and ups [..., 2 I] to [..., I]."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


def swiglu(both: jax.Array) -> jax.Array:
    """Return silu(gate) * up (Shazeer 2020, arXiv:2002.05202); the gates come first."""
    gate, up = jnp.split(both, 2, axis=-1)
    return jax.nn.silu(gate) * up


def geglu(both: jax.Array) -> jax.Array:
    """Return gelu(gate) * up with the tanh form of GELU, from the same paper."""
    gate, up = jnp.split(both, 2, axis=-1)
    return jax.nn.gelu(gate, approximate=True) * up


@dataclass(frozen=True)
class ClampedSwiGLU:
    """The SwiGLU of gpt-oss (arXiv:2508.10925): gates and ups alternate and are clamped.

    Attributes:
      limit: the largest gate, and the largest magnitude of an up.
      alpha: the factor in the gate's sigmoid.
    """

    limit: float
    alpha: float

    def __call__(self, both: jax.Array) -> jax.Array:
        """Return (up + 1) * gate * sigmoid(alpha * gate)."""
        pairs = both.reshape(*both.shape[:-1], -1, 2)
        gate = jnp.minimum(pairs[..., 0], self.limit)
        up = jnp.clip(pairs[..., 1], -self.limit, self.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(self.alpha * gate))
