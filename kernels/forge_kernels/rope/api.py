"""Rotary position embeddings (Su et al. 2021) in Hugging Face's convention of two halves."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def inverse_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Return f32[head_dim / 2], radians per position of each rotated pair."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    return (theta**-exponents).astype(np.float32)


def linear_scaling(frequencies: np.ndarray, factor: float) -> np.ndarray:
    """Return frequencies for position interpolation (Chen et al. 2023): `position / factor`."""
    return (frequencies / factor).astype(np.float32)


def llama3_scaling(
    frequencies: np.ndarray,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> np.ndarray:
    """Return Llama 3.1's frequencies: slow pairs interpolated, fast ones kept, others blended.

    The same as Hugging Face's `_compute_llama3_parameters`.
    """
    frequencies = frequencies.astype(np.float64)
    turns = original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * frequencies / factor + blend * frequencies).astype(np.float32)


def rope_tables(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin, f32[T, head_dim / 2] each, of the angles at `positions` (i32[T])."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + D / 2) of each head, computed in float32.

    Args:
      x: float[T, heads, D].
      cos, sin: f32[T, D / 2].

    Returns:
      [T, heads, D] of x's type.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
