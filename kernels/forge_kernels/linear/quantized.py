"""Weights that stay as a quantised checkpoint has them, in 8 or 4 bits, for plain XLA everywhere.

Rows of a matrix are divided into groups that share a scale (and a zero). They become floats where
they are multiplied: on a CPU a tile of rows at a time, elsewhere in the compiler's fusion. What a
row of x gives depends on that row alone: where activations are rounded, too, each row has scales
of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import DTypeLike

Values = Literal["int8", "fp8", "int4"]
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX = 448.0
TILE = 256  # rows of a matrix that XLA:CPU makes floats of at a time


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How one matrix [outputs, inputs] is kept.

    Attributes:
      values: int8; FP8 (E4M3) as its bits, for XLA:CPU would make floats of all of an array to take
        a part of it; or int4: from 0 to 15, two in a byte, the first half of a group in the low
        bits and the second in the high ones.
      group: values of a row that share a scale; the last may be shorter, but of int4.
      zeros: whether each group has a zero of its own; without, that of int4 is 8.
      activations: the rows of x are rounded to that type, to the scale of each row, or with several
        groups, of each group of each row; `static`: to one scale that is given.
      axis: of a mesh whose devices have parts of the inputs, so that the scale of a row of x is
        that of its parts on all of them; None: the rows are here, or their groups are.
    """

    values: Values
    outputs: int
    inputs: int
    group: int
    zeros: bool = False
    activations: Literal["int8", "fp8"] | None = None
    static: bool = False
    axis: str | None = None

    @property
    def groups(self) -> int:
        return -(-self.inputs // self.group)

    @property
    def weight(self) -> jax.ShapeDtypeStruct:
        width = self.inputs // 2 if self.values == "int4" else self.inputs
        dtype = jnp.int8 if self.values == "int8" else jnp.uint8
        return jax.ShapeDtypeStruct((self.outputs, width), dtype)

    @property
    def scale(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.outputs, self.groups), jnp.float32)

    @property
    def zero(self) -> jax.ShapeDtypeStruct | None:
        if not self.zeros:
            return None
        return jax.ShapeDtypeStruct((self.outputs, self.groups), jnp.uint8)

    @property
    def input_scale(self) -> jax.ShapeDtypeStruct | None:
        return jax.ShapeDtypeStruct((1,), jnp.float32) if self.static else None


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix in 8 or 4 bits: a pytree whose leaves have the shapes that `quantization` says."""

    weight: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    input_scale: jax.Array | None
    quantization: Quantization


jax.tree_util.register_dataclass(
    QuantizedWeight,
    data_fields=["weight", "scale", "zero", "input_scale"],
    meta_fields=["quantization"],
)


def pack_int4(values: np.ndarray, group: int) -> np.ndarray:
    """uint8[N, K], from 0 to 15 -> uint8[N, K / 2], as `Quantization.values` says."""
    halves = values.reshape(len(values), -1, 2, group // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(values), -1)


def unpack_int4(packed: np.ndarray, group: int) -> np.ndarray:
    """What `pack_int4` was given."""
    halves = packed.reshape(len(packed), -1, 1, group // 2)
    return np.concatenate([halves & 15, halves >> 4], axis=2).reshape(len(packed), -1)


# Traced and lowered once for all the layers of a model.
@functools.partial(jax.jit, static_argnames="out_dtype")
def quantized_product(x: jax.Array, w: QuantizedWeight, out_dtype: DTypeLike) -> jax.Array:
    """float[T, K_in] times the transpose of w, summed in float32 -> out_dtype[T, N_out]."""
    x, row_scale = _round_rows(x, w)
    y = lax.platform_dependent(x, w, cpu=_in_tiles, default=_product)
    return (y if row_scale is None else y * row_scale).astype(out_dtype)


def _in_tiles(x: jax.Array, w: QuantizedWeight) -> jax.Array:
    rows, outputs = x.shape[0], w.quantization.outputs
    if rows == 1 and x.dtype.itemsize < 4:
        x = jnp.pad(x, ((0, 1), (0, 0)))  # XLA:CPU is 10 times slower at one row
    if x.dtype == jnp.int8 or outputs <= TILE:  # nothing becomes floats, or little
        return _product(x, w)[:rows]

    def add_tile(start: jax.Array | int, size: int, y: jax.Array) -> jax.Array:
        arrays = (w.weight, w.scale, w.zero)
        weight, scale, zero = (
            None if array is None else lax.dynamic_slice_in_dim(array, start, size)
            for array in arrays
        )
        assert weight is not None and scale is not None
        tile = QuantizedWeight(weight, scale, zero, None, w.quantization)
        return lax.dynamic_update_slice_in_dim(y, _product(x, tile), start, axis=1)

    y = jnp.zeros((len(x), outputs), jnp.float32)
    whole = outputs // TILE
    y = lax.fori_loop(0, whole, lambda i, y: add_tile(i * TILE, TILE, y), y)
    if outputs % TILE:
        y = add_tile(whole * TILE, outputs % TILE, y)
    return y[:rows]


def _product(x: jax.Array, w: QuantizedWeight) -> jax.Array:
    """x [T, K] in its own or a quantised type, some rows of w [n, K] -> f32[T, n]."""
    quantization = w.quantization
    if x.dtype == jnp.int8:
        return _dot(x, w.weight, jnp.int32).astype(jnp.float32) * w.scale[:, 0]
    group = quantization.group
    if quantization.values == "int8":
        return _scaled_product(x, w.weight, w.scale, group)
    if quantization.values == "fp8":
        return _scaled_product(x, lax.bitcast_convert_type(w.weight, FP8), w.scale, group)
    # A dot for each half of the bytes: nothing has to be interleaved.
    halves = x.reshape(len(x), quantization.groups, 2, group // 2)
    zero = jnp.full((1, 1), 8, jnp.uint8) if w.zero is None else w.zero
    zero = jnp.repeat(zero.astype(jnp.int8), group // 2 if zero.shape[1] > 1 else 1, axis=1)
    parts = []
    for half, bits in enumerate((w.weight & 15, w.weight >> 4)):
        part = halves[:, :, half].reshape(len(x), -1)
        parts.append(_scaled_product(part, bits.astype(jnp.int8) - zero, w.scale, group // 2))
    return parts[0] + parts[1]


def _scaled_product(x: jax.Array, w: jax.Array, scale: jax.Array, group: int) -> jax.Array:
    """[T, K], values [n, K], f32[n, G] for groups of `group` columns -> f32[T, n]."""
    if scale.shape[1] == 1:
        # The values are exact in any type of x.
        return _dot(x, w.astype(x.dtype), jnp.float32) * scale[:, 0]
    width = w.shape[1]
    scale = jnp.repeat(scale, group, axis=1)[:, :width]
    return _dot(x, (w.astype(jnp.float32) * scale).astype(x.dtype), jnp.float32)


def _dot(x: jax.Array, w: jax.Array, dtype: DTypeLike) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


# ---- the rows of x -----------------------------------------------------------------------------


def _round_rows(x: jax.Array, w: QuantizedWeight) -> tuple[jax.Array, jax.Array | None]:
    """x as it is multiplied, and what its products are then scaled by, f32[T, 1]."""
    quantization = w.quantization
    if quantization.activations is None:
        return x, None
    x32 = x.astype(jnp.float32)
    most = 127.0 if quantization.activations == "int8" else FP8_MAX
    if quantization.groups > 1:
        padding = quantization.groups * quantization.group - quantization.inputs
        blocks = jnp.pad(x32, ((0, 0), (0, padding)))
        blocks = blocks.reshape(len(x), quantization.groups, quantization.group)
        scale = _row_scale(blocks, most)
        blocks = round_to_fp8(blocks / scale) * scale
        return blocks.reshape(len(x), -1)[:, : quantization.inputs].astype(x.dtype), None
    scale = _row_scale(x32, most, quantization.axis)
    if w.input_scale is not None:
        # What is not finite stays so, instead of being cut to the largest value.
        scale = jnp.where(jnp.isfinite(scale), w.input_scale, jnp.nan)
    if quantization.activations == "int8":
        low = -128.0 if quantization.static else -127.0
        return jnp.clip(lax.round(x32 / scale, _TO_EVEN), low, 127.0).astype(jnp.int8), scale
    return round_to_fp8(x32 / scale).astype(x.dtype), scale


_TO_EVEN = lax.RoundingMethod.TO_NEAREST_EVEN


def _row_scale(x: jax.Array, most: float, axis: str | None = None) -> jax.Array:
    """f32[..., K] -> f32[..., 1]: what makes `most` of the largest value; NaN if there is one."""
    top = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    if axis is not None:
        with jax.named_scope("row_scale"):
            # Some libraries leave NaN out of a maximum: whose own it is keeps it.
            top = jnp.where(jnp.isnan(top), top, lax.pmax(top, axis))
    return jnp.where(top == 0, 1.0, top / most)


def round_to_fp8(x: jax.Array) -> jax.Array:
    """float32 rounded to the nearest FP8 (E4M3) value, at most 448, as float32.

    By arithmetic: XLA may leave out a conversion there and back.
    """
    x = jnp.clip(x, -FP8_MAX, FP8_MAX)
    bits = lax.bitcast_convert_type(x, jnp.int32)
    smallest = (127 - 6) << 23  # the exponent below which values are spaced evenly
    exponent = jnp.maximum(bits & 0x7F800000, smallest)
    step = lax.bitcast_convert_type(exponent - (3 << 23), jnp.float32)
    return lax.round(x / step, _TO_EVEN) * step
