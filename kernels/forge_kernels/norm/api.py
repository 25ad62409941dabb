"""RMSNorm (Zhang and Sennrich 2019), rounded where Hugging Face's LlamaRMSNorm rounds."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Divides by the root mean square over the last axis, computed in float32.

    The quotient is cast back to x's type before it is multiplied with the weight.

    Args:
      x: float[..., d].
      weight: float[d], of x's type.
      eps: added to the mean square.

    Returns:
      [..., d] of x's type.
    """
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return weight * (x32 * scale).astype(x.dtype)
