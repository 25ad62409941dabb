"""Keys and values in 8 bits, with one scale per token and head.

A row is divided by its largest magnitude. It then uses all 8 bits whatever the model's range, and
its stored form depends only on the row. A row that is not finite gets a NaN scale, so the fault is
kept and stays within the row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

# The largest magnitude that each type stores. float8_e4m3fn has no infinities, and a value beyond
# its end would not round to it.
LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}
SMALLEST_SCALE = 1e-37  # below this, the inverse would overflow

# With so few bits, a scale times 8 bits is exact in float32, and quantizing a row again gives the
# same scale.
SCALE_MANTISSA_BITS = 15


class QuantizedKV(NamedTuple):
    """One layer's cache, whose keys and values are `data * scale`.

    Attributes:
      data: int8, float8_e4m3fn or uint8 (the bits of float8_e4m3fn) [N, 2, K, bs, D].
      scale: f32[N, 2, K, bs].
    """

    data: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the data, as if the cache were one array."""
        return self.data.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The type of the data."""
        return self.data.dtype


def quantize_rows(rows: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Round float[..., D] to dtype[..., D] and scales f32[...], one per row.

    `dtype` is int8 or float8_e4m3fn. The scale is zero for a row of zeros, or with a largest
    magnitude below about 1e-35. The scale of a row with a NaN or an infinity is NaN, and its data
    are undefined.
    """
    dtype = jnp.dtype(dtype)
    largest = LARGEST[dtype]
    rows = rows.astype(jnp.float32)
    # Multiplied by the inverse, because XLA rounds a division by a constant in varying ways.
    scale = jnp.abs(rows).max(axis=-1) * (1.0 / largest)
    scale = lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=SCALE_MANTISSA_BITS)
    inverse = jnp.where(scale > SMALLEST_SCALE, 1.0 / scale, 0.0)
    scaled = jnp.clip(rows * inverse[..., None], -largest, largest)
    if dtype == jnp.int8:
        scaled = jnp.round(scaled)
    scale = jnp.where(scale > SMALLEST_SCALE, scale, 0.0 * scale)  # 0 * NaN is NaN
    return scaled.astype(dtype), jnp.where(scale < jnp.inf, scale, jnp.nan)


def dequantize_rows(data: jax.Array, scale: jax.Array) -> jax.Array:
    """Return data * scale as f32[..., D]. `data` may be uint8, the bits of float8_e4m3fn."""
    if data.dtype == jnp.uint8:
        data = lax.bitcast_convert_type(data, jnp.float8_e4m3fn)
    return data.astype(jnp.float32) * scale[..., None]
