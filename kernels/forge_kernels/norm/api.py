"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) and LayerNorm (Ba et al. 2016,
arXiv:1607.06450), rounded where Hugging Face's norms round."""

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.collectives import ordered_sum


def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    *,
    offset: float = 0.0,
    in_float32: bool = False,
    axis_name: str | None = None,
) -> jax.Array:
    """Divide by the root mean square over the last axis, computed in float32.

    Args:
      x: float[..., d].
      weight: float[d] or float[H, d], of x's type.
      eps: added to the mean square.
      offset: added to the weight, in float32 (1 in Gemma).
      in_float32: multiply by the weight before the cast back to x's type, as with an offset;
        otherwise after it, as in Llama.
      axis_name: a mesh axis whose devices have equal parts of the last axis, to average over.

    Returns:
      [..., d] of x's type.
    """
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    if axis_name is not None:
        mean = ordered_sum(mean, axis_name) / lax.axis_size(axis_name)
    y = x32 * lax.rsqrt(mean + eps)
    if offset or in_float32:
        scale = offset + weight.astype(jnp.float32)
        return (y * jnp.broadcast_to(scale, y.shape)).astype(x.dtype)
    return jnp.broadcast_to(weight, y.shape) * y.astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """Subtract the mean over the last axis and divide by the standard deviation, in float32.

    Args:
      x: float[..., d].
      weight: float[d] or float[H, d], of x's type.
      bias: the same, or None.
      eps: added to the variance.

    Returns:
      [..., d] of x's type, rounded once, after the bias.
    """
    x32 = x.astype(jnp.float32)
    centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
    y = centered * lax.rsqrt(variance + eps)
    y = y * jnp.broadcast_to(weight.astype(jnp.float32), y.shape)
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(jnp.float32), y.shape)
    return y.astype(x.dtype)
