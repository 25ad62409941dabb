"""Sums over the devices of a mesh, in a fixed order."""

import jax
import jax.numpy as jnp
from jax import lax


def ordered_sum(x: jax.Array, axis: str) -> jax.Array:
    """Return the sum of float[...] over the devices of a mesh axis, on each of them.

    On CPU devices, every element is added in the order of the devices, in float32. Its bits
    therefore depend neither on its position nor on the number of processes. XLA's all-reduce does
    this only within one process. Between processes, it uses Gloo's ring, in which each part of the
    array begins at another process.
    """
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return lax.psum(x, axis)
    first, *others = lax.all_gather(x, axis)
    total = first.astype(jnp.float32)
    for part in others:
        total = total + part.astype(jnp.float32)
    return total.astype(x.dtype)
