"""Keys and values in 8 bits, with one scale per token and head.

A row is divided by its largest magnitude, so that the 8 bits are used whatever the model's range,
and what a row is stored as depends on nothing but the row. A row that holds a NaN has a NaN for a
scale: the fault is kept, and stays the row's own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

# The largest magnitude that is used of each type; float8_e4m3fn has neither infinities nor room
# to round up at its end, so nothing is stored beyond it.
LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}


class QuantizedKV(NamedTuple):
    """One layer's cache: what a key or value is, is `data * scale`.

    data: int8, float8_e4m3fn or uint8 (the bits of float8_e4m3fn) [N, 2, K, bs, D].
    scale: f32[N, 2, K, bs].
    """

    data: jax.Array
    scale: jax.Array


def quantize_rows(rows: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """float[..., D] -> (dtype[..., D], f32[...]): the nearest multiples of each row's scale.

    A row of zeros has scale 0.
    """
    dtype = jnp.dtype(dtype)
    rows = rows.astype(jnp.float32)
    scale = jnp.abs(rows).max(axis=-1) / LARGEST[dtype]
    # A scale of zero, or one so small that its inverse overflows, is a row of zeros.
    inverse = jnp.where(scale > 1e-37, 1.0 / scale, 0.0)
    scaled = jnp.clip(rows * inverse[..., None], -LARGEST[dtype], LARGEST[dtype])
    if dtype == jnp.int8:
        scaled = jnp.round(scaled)
    return scaled.astype(dtype), jnp.where(scale > 1e-37, scale, scale * 0.0)


def dequantize_rows(data: jax.Array, scale: jax.Array) -> jax.Array:
    """The inverse: f32[..., D]. `data` may be uint8, the bits of float8_e4m3fn."""
    if data.dtype == jnp.uint8:
        data = lax.bitcast_convert_type(data, jnp.float8_e4m3fn)
    return data.astype(jnp.float32) * scale[..., None]
