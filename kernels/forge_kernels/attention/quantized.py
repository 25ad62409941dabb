"""Keys and values in 8 bits, with one scale per token and head.

A row is divided by its largest magnitude, so that the 8 bits are used whatever the model's range,
and what a row is stored as depends on nothing but the row. A row that is not finite has a NaN for a
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
SMALLEST_SCALE = 1e-37  # below, the inverse would overflow
# A scale of so few bits times 8 bits is exact in float32, and a row that has been through here once
# gets the same scale again.
SCALE_MANTISSA_BITS = 15


class QuantizedKV(NamedTuple):
    """One layer's cache: what a key or value is, is `data * scale`.

    data: int8, float8_e4m3fn or uint8 (the bits of float8_e4m3fn) [N, 2, K, bs, D].
    scale: f32[N, 2, K, bs].
    """

    data: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the data, as if the cache were one array."""
        return self.data.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of the data."""
        return self.data.dtype


def quantize_rows(rows: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """float[..., D] -> (dtype[..., D], f32[...]): the nearest multiples of each row's scale.

    `dtype` is int8 or float8_e4m3fn. The scale of a row of zeros is zero, and so is that of a row
    whose largest magnitude is below about 1e-35. The scale of a row with a NaN or an infinity is
    NaN, and its data may be anything.
    """
    dtype = jnp.dtype(dtype)
    largest = LARGEST[dtype]
    rows = rows.astype(jnp.float32)
    # Times the inverse: a division by a constant is rounded in one way or another by XLA.
    scale = jnp.abs(rows).max(axis=-1) * (1.0 / largest)
    scale = lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=SCALE_MANTISSA_BITS)
    inverse = jnp.where(scale > SMALLEST_SCALE, 1.0 / scale, 0.0)
    scaled = jnp.clip(rows * inverse[..., None], -largest, largest)
    if dtype == jnp.int8:
        scaled = jnp.round(scaled)
    scale = jnp.where(scale > SMALLEST_SCALE, scale, 0.0 * scale)  # 0 * NaN is NaN
    return scaled.astype(dtype), jnp.where(scale < jnp.inf, scale, jnp.nan)


def dequantize_rows(data: jax.Array, scale: jax.Array) -> jax.Array:
    """The inverse: f32[..., D]. `data` may be uint8, the bits of float8_e4m3fn."""
    if data.dtype == jnp.uint8:
        data = lax.bitcast_convert_type(data, jnp.float8_e4m3fn)
    return data.astype(jnp.float32) * scale[..., None]
