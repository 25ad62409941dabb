"""Sums over the devices of a mesh, in a fixed order."""

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.devices import current_gpu

# With True as value, sums over GPUs that are traced in this context have a fixed order.
sums_in_order = jax.make_user_context(default_value=False)


def ordered_sum(x: jax.Array, axis: str) -> jax.Array:
    """Return the sum of float[..., d] over the devices of a mesh axis, on each of them.

    On CPU devices, and on GPUs with `sums_in_order`, every element is added in the order of the
    devices, in float32. Its bits therefore depend neither on its position nor on the number of
    processes. XLA's all-reduce does this only on CPU devices of one process. Otherwise, it uses the
    rings of Gloo or NCCL, in which each part of the array begins at another device. The sum of two
    devices has no order.
    """
    num_devices = lax.axis_size(axis)
    in_rings = jax.process_count() > 1 if current_gpu() is None else sums_in_order.value
    if num_devices == 2 or not in_rings:
        return lax.psum(x, axis)
    if x.shape[-1] % num_devices:
        return _in_order(lax.all_gather(x, axis))
    # Each device adds its share of the elements. This moves as many bytes as a ring.
    shares = x.reshape(*x.shape[:-1], num_devices, -1)
    total = _in_order(lax.all_to_all(shares, axis, x.ndim - 1, 0))
    return lax.all_gather(total, axis, axis=x.ndim - 1, tiled=True)


def _in_order(parts: jax.Array) -> jax.Array:
    """Add float[N, ...] from first to last."""
    first, *others = parts
    total = first.astype(jnp.float32)
    for part in others:
        total = total + part.astype(jnp.float32)
    return total.astype(parts.dtype)
