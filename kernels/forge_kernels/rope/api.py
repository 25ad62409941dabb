"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864), and ways to scale them."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def inverse_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Return f32[head_dim / 2], radians per position of each rotated pair.

    If only some of a head's numbers are rotated, `head_dim` is their count.
    """
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


def yarn_scaling(
    frequencies: np.ndarray,
    *,
    theta: float,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_max_position_embeddings: int,
    truncate: bool,
) -> np.ndarray:
    """Return YaRN's frequencies (Peng et al. 2023, arXiv:2309.00071, section 3.2).

    Pairs that turn more than `beta_fast` times within the original context are kept. Pairs that
    turn less than `beta_slow` times are interpolated. Those between are blended, linearly in the
    pair's number. The same as Hugging Face's `_compute_yarn_parameters`.

    Args:
      frequencies: f32[pairs], of `theta`.
      theta: the base, above 1.
      factor: the context's extension.
      beta_fast: turns.
      beta_slow: turns.
      original_max_position_embeddings: tokens.
      truncate: round the limits of the blended pairs to whole numbers.
    """
    pairs = len(frequencies)

    def pair_with(turns: float) -> float:
        inverse_frequency = original_max_position_embeddings / (turns * 2 * math.pi)
        return pairs * math.log(inverse_frequency) / math.log(theta)

    low, high = pair_with(beta_fast), pair_with(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high = low + 0.001 if low == high else high
    interpolated = np.clip((np.arange(pairs) - low) / (high - low), 0.0, 1.0)
    frequencies = frequencies.astype(np.float64)
    blend = frequencies / factor * interpolated + frequencies * (1 - interpolated)
    return blend.astype(np.float32)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor on cos and sin: 0.1 * mscale * ln(factor) + 1, at least 1.

    Source: Peng et al. 2023, arXiv:2309.00071, equation 22. `mscale` is DeepSeek's addition.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_tables(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin, f32[T, pairs] each, of the angles at `positions` (i32[T])."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False
) -> jax.Array:
    """Rotate the first 2 * pairs numbers of each head, computed in float32.

    Args:
      x: float[T, heads, D].
      cos, sin: f32[T, pairs]. If 2 * pairs is less than D, the other numbers are returned as they
        are (partial RoPE).
      interleaved: rotate the neighbors (2i, 2i + 1), as in the paper, instead of the pairs
        (i, i + pairs) of Hugging Face's Llama.

    Returns:
      [T, heads, D] of x's type.
    """
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs].astype(jnp.float32), x[..., 2 * pairs :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        rotated = jnp.stack(parts, axis=-1).reshape(turned.shape)
    else:
        rotated = jnp.concatenate(parts, axis=-1)
    rotated = rotated.astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated
