"""Weights that stay quantized as in the checkpoint, in 8 or 4 bits, for plain XLA everywhere.

Rows of a matrix are divided into groups that share a scale (and a zero). Values are converted to
floats where they are multiplied: a tile of rows at a time on a CPU, in the compiler's fusion
elsewhere. The result for a row of x depends on that row only. If activations are rounded too, each
row has its own scales.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from forge_kernels.blocks import Blocks
from forge_kernels.derivatives import with_derivative_of
from forge_kernels.devices import current_gpu
from forge_kernels.host_arrays import aligned_empty
from forge_kernels.linear.blocks import MIDDLE, Read
from forge_kernels.linear.few_rows import few_rows_linear, supports
from forge_kernels.linear.operands import MatmulOptions, Operands, around, check
from forge_kernels.norm import rms_norm
from forge_kernels.threads import for_each

Values = Literal["int8", "fp8", "int4", "mxfp4"]
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX = 448.0
TILE = 256  # rows of a matrix that XLA:CPU converts to floats at once
PART = 2**15  # the same elsewhere
CHUNK = 2**20  # values per thread and call
# For each type of x, the rounding and summation of a product of float32 operands.
ALGORITHMS = {
    jnp.dtype(jnp.bfloat16): lax.DotAlgorithmPreset.BF16_BF16_F32,
    jnp.dtype(jnp.float16): lax.DotAlgorithmPreset.F16_F16_F32,
}


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The storage of one matrix [outputs, inputs].

    Attributes:
      values: int8, FP8 (E4M3), int4 or MXFP4. FP8 is stored as its bits, because XLA:CPU would
        convert a whole array to floats to read a part of it. Values of int4 are from 0 to 15, and
        MXFP4 is stored as its bits (E2M1), two per byte. The low bits have the first half of a
        group, the high bits the second. MXFP4 has scales of 8 bits, which are powers of two.
      outputs: rows of the matrix.
      inputs: columns of the matrix.
      group: values of a row that share a scale; the last group may be shorter, except for int4.
      zeros: True if each group has its own zero; without it, the zero of int4 is 8.
      activations: the type that rows of x are rounded to. Each row has a scale, or each group of a
        row if there are several.
      static: True if activations are rounded to one given scale instead.
      axis: a mesh axis whose devices have parts of the inputs, all covered by the scale of a row of
        x. None if whole rows or whole groups are local.
      blocks: blocks of a GGUF matrix, whose scales are float16 factors and int8 numbers.
      experts: the number of matrices; all arrays have a leading axis of experts.
      fused: True if XLA converts the values inside its matrix products, as on GPUs. In that case,
        int4 values minus 8 are stored in JAX's own type, because XLA does not unpack bytes there.
    """

    values: Values
    outputs: int
    inputs: int
    group: int
    zeros: bool = False
    activations: Literal["int8", "fp8"] | None = None
    static: bool = False
    axis: str | None = None
    blocks: Blocks | None = None
    experts: int | None = None
    fused: bool = False

    @classmethod
    def of_blocks(
        cls,
        blocks: Blocks,
        outputs: int,
        inputs: int,
        experts: int | None = None,
        fused: bool = False,
    ) -> Quantization:
        return cls(
            values="int4" if blocks.values == "int4" else "int8",
            outputs=outputs,
            inputs=inputs,
            group=blocks.group,
            blocks=blocks.in_bytes,
            experts=experts,
            fused=fused,
        )

    @property
    def one(self) -> Quantization:
        """The storage of one expert's matrix."""
        return dataclasses.replace(self, experts=None)

    @property
    def groups(self) -> int:
        return -(-self.inputs // self.group)

    @property
    def native(self) -> bool:
        """True if the weight is in JAX's own 4-bit type instead of two values per byte."""
        return self.fused and self.values == "int4"

    @property
    def weight(self) -> jax.ShapeDtypeStruct:
        if self.native:
            return self._shape((self.outputs, self.inputs), jnp.int4)
        width = self.inputs // 2 if self.values in ("int4", "mxfp4") else self.inputs
        dtype = jnp.int8 if self.values == "int8" else jnp.uint8
        return self._shape((self.outputs, width), dtype)

    @property
    def combined(self) -> bool:
        """True if the two levels of scales are multiplied when the matrix is loaded.

        For 4-bit values, two levels would add about a third to the instructions of the GPU kernel
        for few rows (`mosaic_gpu`). One level costs two more bytes per group, with minima. Rounding
        the product changes a value by 2**-11 of itself at most, or 2**-25 if larger.
        """
        blocks = self.blocks
        return self.native and blocks is not None and blocks.two_levels and blocks.minima

    @property
    def scale(self) -> jax.ShapeDtypeStruct:
        """The scales; for blocks, their factors."""
        if self.blocks is not None:
            return self._factor
        dtype = jnp.uint8 if self.values == "mxfp4" else jnp.float32
        return self._shape((self.outputs, self.groups), dtype)

    @property
    def group_scale(self) -> jax.ShapeDtypeStruct | None:
        return self._by_group if self.blocks is not None else None

    @property
    def minimum(self) -> jax.ShapeDtypeStruct | None:
        return self._factor if self.blocks is not None and self.blocks.minima else None

    @property
    def group_minimum(self) -> jax.ShapeDtypeStruct | None:
        return self._by_group if self.minimum is not None else None

    @property
    def _factor(self) -> jax.ShapeDtypeStruct:
        assert self.blocks is not None
        size = self.blocks.group if self.combined else self.blocks.size
        return self._shape((self.outputs, self.inputs // size), jnp.float16)

    @property
    def _by_group(self) -> jax.ShapeDtypeStruct | None:
        assert self.blocks is not None
        if not self.blocks.two_levels or self.combined:
            return None
        return self._shape((self.outputs, self.groups), jnp.int8)

    @property
    def zero(self) -> jax.ShapeDtypeStruct | None:
        if not self.zeros:
            return None
        return self._shape((self.outputs, self.groups), jnp.uint8)

    @property
    def input_scale(self) -> jax.ShapeDtypeStruct | None:
        return self._shape((1,), jnp.float32) if self.static else None

    def _shape(self, one: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        experts = () if self.experts is None else (self.experts,)
        return jax.ShapeDtypeStruct((*experts, *one), dtype)


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix in 8 or 4 bits, or those of experts; a pytree of the arrays of `quantization`."""

    weight: jax.Array
    scale: jax.Array
    zero: jax.Array | None
    input_scale: jax.Array | None
    quantization: Quantization
    group_scale: jax.Array | None = None
    minimum: jax.Array | None = None
    group_minimum: jax.Array | None = None

    @classmethod
    def abstract(cls, quantization: Quantization) -> QuantizedWeight:
        """Return the weight with shapes and types for arrays."""
        shapes: dict[str, Any] = {name: getattr(quantization, name) for name in ARRAYS}
        return cls(**shapes, quantization=quantization)

    def matmul(self, x: jax.Array, **options: Unpack[MatmulOptions]) -> jax.Array:
        """Return x times the transpose of the matrix; see `linear`. XLA computes all rows."""
        kept, given = self.quantization, Operands(**options)
        dtype = jnp.dtype(given.out_dtype or x.dtype)
        check(x, given, kind=kept.values, dtype=x.dtype, shape=(kept.outputs, kept.inputs))

        gpu = current_gpu()

        def smooth(x: jax.Array, w: QuantizedWeight) -> jax.Array:
            exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
            y = jnp.matmul(x.astype(jnp.float32), float_rows(w).T, precision=exact)
            return y.astype(dtype)

        def plain(x: jax.Array, w: QuantizedWeight, residual: jax.Array | None) -> jax.Array:
            def kernel(x: jax.Array, w: QuantizedWeight) -> jax.Array:
                return quantized_product(x, w, dtype, fp8_cores=gpu is not None and gpu.has_fp8)

            def product(x: jax.Array) -> jax.Array:
                return with_derivative_of(smooth, kernel)(x, w)

            return around(x, product, given._replace(norm=None, residual=residual))

        if given.norm is not None:
            with jax.named_scope("norm"):
                x = rms_norm(x, *given.norm)
        if gpu is None or not supports(kept, len(x), x.dtype):
            return plain(x, self, given.residual)
        with jax.named_scope("product"):
            return few_rows_linear(
                x,
                self,
                given.residual,
                plain,
                swiglu=given.swiglu,
                out_dtype=dtype,
                capability=gpu.capability,
            )


ARRAYS = ("weight", "scale", "zero", "input_scale", "group_scale", "minimum", "group_minimum")
jax.tree_util.register_dataclass(
    QuantizedWeight, data_fields=list(ARRAYS), meta_fields=["quantization"]
)


def pack_int4(values: np.ndarray, group: int) -> np.ndarray:
    """Pack uint8[N, K] from 0 to 15 as uint8[N, K / 2], in the order of `Quantization.values`."""
    halves = values.reshape(len(values), -1, 2, group // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(values), -1)


def unpack_int4(packed: np.ndarray, group: int) -> np.ndarray:
    """Invert `pack_int4`."""
    halves = packed.reshape(len(packed), -1, 1, group // 2)
    return np.concatenate([halves & 15, halves >> 4], axis=2).reshape(len(packed), -1)


def native_int4(values: np.ndarray) -> np.ndarray:
    """Return values from 0 to 15 as int4, minus 8: the storage of `Quantization.native`."""
    return (values.astype(np.int8) - np.int8(MIDDLE)).astype(ml_dtypes.int4)


def arrange_blocks(read: Read, quantization: Quantization) -> dict[str, np.ndarray]:
    """Return the arrays of a matrix in blocks, made on the host from some rows at a time."""
    assert quantization.blocks is not None
    four, minima = quantization.values == "int4", quantization.blocks.minima
    shapes = {name: getattr(quantization, name) for name in ARRAYS}
    out = {
        name: aligned_empty(shape.shape, shape.dtype)
        for name, shape in shapes.items()
        if shape is not None
    }
    step = max(1, CHUNK // quantization.inputs)

    def work(first: int) -> None:
        rows = read(np.arange(first, min(first + step, quantization.outputs)))
        rows = rows.with_one_level() if quantization.combined else rows
        values = rows.values
        if four:
            values = (values if minima else values + np.int8(MIDDLE)).view(np.uint8)
            native = quantization.native
            values = native_int4(values) if native else pack_int4(values, quantization.group)
        arrays = (values, rows.factor, rows.scale, rows.minimum_factor, rows.minimum)
        names = ("weight", "scale", "group_scale", "minimum", "group_minimum")
        for name, array in zip(names, arrays, strict=True):
            if array is not None:
                out[name][first : first + step] = array

    for_each(work, range(0, quantization.outputs, step))
    return out


# Traced and lowered once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("out_dtype", "fp8_cores"))
def quantized_product(
    x: jax.Array, w: QuantizedWeight, out_dtype: DTypeLike, *, fp8_cores: bool = False
) -> jax.Array:
    """Multiply float[T, K_in] by the transpose of w, summed in float32, to out_dtype[T, N_out].

    Args:
      fp8_cores: True to multiply FP8 by FP8 on a GPU, if x is rounded to one scale per row.
    """
    x, row_scale = _round_rows(x, w)
    both_fp8 = w.quantization.values == w.quantization.activations == "fp8"
    in_fp8 = fp8_cores and both_fp8 and w.quantization.groups == 1
    on_gpu = fp8_product if in_fp8 else _in_fusions
    y = lax.platform_dependent(x, w, cpu=_in_tiles, default=on_gpu)
    return (y if row_scale is None else y * row_scale).astype(out_dtype)


def expert_product(x: jax.Array, w: QuantizedWeight, expert: jax.Array) -> jax.Array:
    """Multiply float[T, K_in] by the transpose of one expert's matrix to f32[T, N_out].

    For CPUs: a tile of the matrix at a time is read and converted to floats.
    """
    one = w.quantization.one

    def flat(array: jax.Array) -> jax.Array:  # the rows of all experts, stacked
        return array.reshape(-1, *array.shape[2:])

    scale = None if w.input_scale is None else w.input_scale[expert]
    rows = dataclasses.replace(_map_rows(w, flat), quantization=one, input_scale=scale)
    x, row_scale = _round_rows(x, rows)
    y = _in_tiles(x, rows, expert * one.outputs)
    return y if row_scale is None else y * row_scale


def products_by_expert(x: jax.Array, w: QuantizedWeight, *, in_fusions: bool = False) -> jax.Array:
    """Multiply float[T, K_in], or float[E, T, K_in] per expert, by all of w to f32[E, T, N_out].

    Args:
      in_fusions: False to convert the matrices to floats first, or in reductions.
    """

    def product(x: jax.Array, w: QuantizedWeight) -> jax.Array:
        w = dataclasses.replace(w, quantization=w.quantization.one)
        x, row_scale = _round_rows(x, w)
        y = _in_fusions(x, w) if in_fusions else _product(x, w)
        return y if row_scale is None else y * row_scale

    return jax.vmap(product, in_axes=(None if x.ndim == 2 else 0, 0))(x, w)


def products_by_pair(x: jax.Array, w: QuantizedWeight, experts: jax.Array) -> jax.Array:
    """Multiply each row of x by its own expert's matrix, for GPUs.

    XLA:GPU computes products of single rows as reductions. It fuses the selection of the matrices
    and their conversion into them, so each row's matrix is read once and nothing else is written.

    Args:
      x: float[R, K_in].
      w: the matrices of all experts.
      experts: i32[R].

    Returns:
      f32[R, N_out].
    """
    w = jax.tree.map(lambda array: array.at[experts].get(mode="clip"), w)
    w = dataclasses.replace(w, quantization=dataclasses.replace(w.quantization, experts=len(x)))
    return products_by_expert(x[:, None], w)[:, 0]


def fp8_product(x: jax.Array, w: QuantizedWeight) -> jax.Array:
    """Multiply rows of FP8 values by w, with a scale per row, on FP8 tensor cores.

    XLA:GPU computes it by cuBLASLt or Triton. `HIGHEST` excludes sums of less precision than
    float32, which Hopper's tensor cores offer. It does not change the operands.

    Args:
      x: float[T, K_in], FP8 values.
      w: without groups.

    Returns:
      f32[T, N_out].
    """
    values = lax.bitcast_convert_type(w.weight, FP8)
    sums = lax.dot_general(
        x.astype(FP8),
        values,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return sums * w.scale[:, 0][None]


def _in_fusions(x: jax.Array, w: QuantizedWeight) -> jax.Array:
    """Multiply without a matrix of floats in memory if XLA:GPU supports it, else in parts."""
    quantization = w.quantization
    whole_groups = quantization.inputs % quantization.group == 0
    if quantization.fused and not _has_groups(w):
        return _product(x, w)
    if quantization.fused and whole_groups and x.dtype in ALGORITHMS:
        return _fused_product(x, w)
    return _in_parts(x, w)


def _has_groups(w: QuantizedWeight) -> bool:
    """Return True if a row has several scales, or zeros or minima to add."""
    return w.quantization.groups > 1 or w.zero is not None or w.minimum is not None


def _in_parts(x: jax.Array, w: QuantizedWeight) -> jax.Array:
    """Multiply in parts to bound the floats of a vocabulary; without a loop, for GPUs."""
    outputs = w.quantization.outputs
    if outputs <= PART:
        return _product(x, w)
    parts: list[jax.Array] = []
    for start in range(0, outputs, PART):
        end = min(start + PART, outputs)
        part = _map_rows(w, lambda array, start=start, end=end: array[start:end])
        if parts:  # the floats of a part are freed before those of the next are made
            scale, parts[-1] = lax.optimization_barrier((part.scale, parts[-1]))
            part = dataclasses.replace(part, scale=scale)
        parts.append(_product(x, part))
    return jnp.concatenate(parts, axis=1)


def _in_tiles(x: jax.Array, w: QuantizedWeight, first: jax.Array | int = 0) -> jax.Array:
    """Multiply by the rows of w from `first` on, in tiles; w may contain other matrices too."""
    rows, outputs = x.shape[0], w.quantization.outputs
    if rows == 1 and x.dtype.itemsize < 4:
        x = jnp.pad(x, ((0, 1), (0, 0)))  # XLA:CPU is 10 times slower with one row

    def tile_of(start: jax.Array | int, size: int) -> QuantizedWeight:
        if size == len(w.weight):
            return w
        at = first + start
        return _map_rows(w, lambda array: lax.dynamic_slice_in_dim(array, at, size))

    if x.dtype == jnp.int8 or outputs <= TILE:  # few or no values are converted to floats
        return _product(x, tile_of(0, outputs))[:rows]

    def add_tile(start: jax.Array | int, size: int, y: jax.Array) -> jax.Array:
        tile = tile_of(start, size)
        return lax.dynamic_update_slice_in_dim(y, _product(x, tile), start, axis=1)

    y = jnp.zeros((len(x), outputs), jnp.float32)
    whole = outputs // TILE
    y = lax.fori_loop(0, whole, lambda i, y: add_tile(i * TILE, TILE, y), y)
    if outputs % TILE:
        y = add_tile(whole * TILE, outputs % TILE, y)
    return y[:rows]


def _map_rows(w: QuantizedWeight, some: Callable[[jax.Array], jax.Array]) -> QuantizedWeight:
    """Apply `some` to all arrays of rows.

    float16 is passed as its bits, because XLA:CPU would convert all of it.
    """

    def taken(array: jax.Array) -> jax.Array:
        if array.dtype != jnp.float16:
            return some(array)
        bits = some(lax.bitcast_convert_type(array, jnp.uint16))
        return lax.bitcast_convert_type(bits, jnp.float16)

    arrays = {name: getattr(w, name) for name in ARRAYS if name != "input_scale"}
    rows = {name: None if array is None else taken(array) for name, array in arrays.items()}
    return dataclasses.replace(w, **rows, input_scale=None)


def quantized_rows(w: QuantizedWeight, rows: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return rows i32[T] of a matrix in blocks as dtype[T, K_in], rounded once."""
    assert w.quantization.blocks is not None

    def kernel(w: QuantizedWeight, rows: jax.Array) -> jax.Array:
        return float_rows(_map_rows(w, lambda array: array.at[rows].get(mode="clip"))).astype(dtype)

    def smooth(w: QuantizedWeight, rows: jax.Array) -> jax.Array:
        taken = jax.tree.map(lambda array: array.at[rows].get(mode="clip"), w)
        return float_rows(taken).astype(dtype)

    return with_derivative_of(smooth, kernel)(w, rows)


def float_rows(w: QuantizedWeight) -> jax.Array:
    """Return some rows of a matrix as f32[n, K_in]."""
    quantization = w.quantization
    scale, minimum = _scales(w)
    if quantization.native:
        values, minimum = w.weight, _centered_minimum(w, scale, minimum)
    elif quantization.values in ("int4", "mxfp4"):
        halves = jnp.stack([w.weight & 15, w.weight >> 4], axis=-2)
        split = halves.reshape(len(scale), 2, quantization.groups, -1).swapaxes(1, 2)
        bits = split.reshape(len(scale), -1)
        if quantization.values == "mxfp4":
            values = mxfp4_values(bits)
        else:
            values = bits.astype(jnp.float32) - (_zero(w) if w.zero is None else _zeros(w))
    elif quantization.values == "fp8":
        values = lax.bitcast_convert_type(w.weight, FP8)
    else:
        values = w.weight.astype(jnp.float32)
    return _floats(values, scale, minimum, quantization.group)


def _zeros(w: QuantizedWeight) -> jax.Array:
    """Return f32[n, K], the zero of each value."""
    assert w.zero is not None
    return jnp.repeat(w.zero.astype(jnp.float32), w.quantization.group, axis=1)


def convertible(w: QuantizedWeight) -> bool:
    """Return True if `float_matrices` and `rounded_rows` support this storage."""
    quantization = w.quantization
    rounded_by_group = quantization.activations is None or quantization.groups > 1
    return quantization.fused and rounded_by_group


def float_matrices(w: QuantizedWeight, dtype: DTypeLike) -> jax.Array:
    """Return the matrices of experts as dtype[E, N_out, K_in], each value rounded once."""
    quantization = w.quantization
    rows = _map_rows(w, lambda array: array.reshape(-1, array.shape[-1]))
    scale, minimum = _scales(rows)
    minimum = _centered_minimum(rows, scale, minimum)
    values = rows.weight
    if quantization.values == "fp8":
        values = lax.bitcast_convert_type(values, FP8)
    floats = _floats(values, scale, minimum, quantization.group)
    return floats.astype(dtype).reshape(*w.weight.shape[:2], quantization.inputs)


def rounded_rows(x: jax.Array, w: QuantizedWeight) -> jax.Array:
    """Return float[T, K_in] with each group of a row rounded as w's activations."""
    rounded, row_scale = _round_rows(x, w)
    assert row_scale is None
    return rounded


def _scales(w: QuantizedWeight) -> tuple[jax.Array, jax.Array | None]:
    """Return the scales, f32[n, G], and the minima if there are any."""
    blocks = w.quantization.blocks
    if blocks is None:
        of_mxfp4 = w.quantization.values == "mxfp4"
        return powers_of_two(w.scale) if of_mxfp4 else w.scale, None

    def combined(factor: jax.Array, by_group: jax.Array | None) -> jax.Array:
        wide = factor.astype(jnp.float32)
        if by_group is None:
            return wide
        wide = jnp.repeat(wide, blocks.size // blocks.group, axis=1)
        return wide * by_group.astype(jnp.float32)

    scale = combined(w.scale, w.group_scale)
    return scale, None if w.minimum is None else combined(w.minimum, w.group_minimum)


def mxfp4_values(bits: jax.Array) -> jax.Array:
    """Return E2M1 values, u8 from 0 to 15, as float32: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and -0 to -6."""
    bits = bits.astype(jnp.int32)
    magnitude = bits & 7
    # Twice the value is an integer. From 2 on, the last bit follows the leading one.
    doubled = jnp.where(magnitude < 2, magnitude, ((magnitude & 1) | 2) << (magnitude >> 1) >> 1)
    return jnp.where(bits < 8, doubled, -doubled).astype(jnp.float32) * 0.5


def powers_of_two(exponents: jax.Array) -> jax.Array:
    """Return 2^(e - 127) for E8M0 scales e: u8[...], as float32."""
    bits = exponents.astype(jnp.int32)
    # Zero has no exponent bits, so it is the smallest normal number, halved.
    power = lax.bitcast_convert_type(jnp.maximum(bits, 1) << 23, jnp.float32)
    return jnp.where(bits == 0, power * 0.5, power)


def _zero(w: QuantizedWeight) -> int:
    """Return the number to subtract from 4-bit values that have no zeros."""
    return 0 if w.minimum is not None else MIDDLE


def _floats(
    values: jax.Array,  # [n, K]
    scale: jax.Array,  # f32[n, G]
    minimum: jax.Array | None,
    group: int,
) -> jax.Array:  # f32[n, K]
    width = values.shape[1]

    def of_columns(array: jax.Array) -> jax.Array:
        return jnp.repeat(array, group, axis=1)[:, :width]

    floats = values.astype(jnp.float32) * of_columns(scale)
    return floats if minimum is None else floats + of_columns(minimum)


def _product(x: jax.Array, w: QuantizedWeight) -> jax.Array:
    """Multiply x [T, K], rounded or not, by some rows of w [n, K] to f32[T, n]."""
    quantization = w.quantization
    if x.dtype == jnp.int8:
        return _dot(x, w.weight, jnp.int32).astype(jnp.float32) * w.scale[:, 0][None]
    group = quantization.group
    scale, minimum = _scales(w)
    if quantization.values == "int8":
        return _scaled_product(x, w.weight, scale, minimum, group)
    if quantization.values == "fp8":
        return _scaled_product(x, lax.bitcast_convert_type(w.weight, FP8), scale, None, group)
    if quantization.native:
        minimum = _centered_minimum(w, scale, minimum)
        return _scaled_product(x, w.weight, scale, minimum, group)
    # One dot for each half of the bytes, so that nothing has to be interleaved.
    halves = x.reshape(len(x), quantization.groups, 2, group // 2)
    zero = jnp.full((1, 1), _zero(w), jnp.uint8) if w.zero is None else w.zero
    zero = jnp.repeat(zero.astype(jnp.int8), group // 2 if zero.shape[1] > 1 else 1, axis=1)
    parts = []
    for half, bits in enumerate((w.weight & 15, w.weight >> 4)):
        part = halves[:, :, half].reshape(len(x), -1)
        of_mxfp4 = quantization.values == "mxfp4"
        values = mxfp4_values(bits) if of_mxfp4 else bits.astype(jnp.int8) - zero
        parts.append(_scaled_product(part, values, scale, minimum, group // 2))
    return parts[0] + parts[1]


def _fused_product(x: jax.Array, w: QuantizedWeight) -> jax.Array:
    """Multiply bfloat16 or float16 x as `_product` does, in a form that XLA:GPU fuses.

    XLA fuses conversions and multiplications of an operand into its Triton GEMM, if scales are
    broadcast [n, G] -> [n, G, g] -> [n, K]. It does not fuse additions, bit operations or a
    conversion to bfloat16 after a product of floats. So the values are scaled in float32, and the
    GEMM rounds its operands. Zeros and minima are multiplied by the sums of x over groups.
    """
    quantization = w.quantization
    values = lax.bitcast_convert_type(w.weight, FP8) if quantization.values == "fp8" else w.weight
    scale, minimum = _scales(w)
    shape = (*scale.shape, quantization.group)
    by_column = jnp.broadcast_to(scale[:, :, None], shape).reshape(values.shape)
    algorithm, x = ALGORITHMS[x.dtype], x.astype(jnp.float32)
    y = lax.dot_general(
        x,
        values.astype(jnp.float32) * by_column,
        (((1,), (1,)), ((), ())),
        precision=algorithm,
        preferred_element_type=jnp.float32,
    )
    minimum = _centered_minimum(w, scale, minimum)
    if minimum is None:
        return y
    sums = x.reshape(len(x), quantization.groups, quantization.group).sum(axis=2)
    return y + jnp.dot(sums, minimum.T, precision=lax.Precision.HIGHEST)


def _centered_minimum(
    w: QuantizedWeight, scale: jax.Array, minimum: jax.Array | None
) -> jax.Array | None:
    """Return f32[n, G] to add to each stored value times its scale; None if it is zero."""
    if w.zero is not None:
        return (MIDDLE - w.zero.astype(jnp.float32)) * scale
    if minimum is not None and w.quantization.native:
        return minimum + MIDDLE * scale
    return minimum


def _scaled_product(
    x: jax.Array,  # [T, K]
    w: jax.Array,  # [n, K] of values
    scale: jax.Array,  # f32[n, G], for groups of `group` columns
    minimum: jax.Array | None,  # f32[n, G]
    group: int,
) -> jax.Array:  # f32[T, n]
    if scale.shape[1] == 1 and minimum is None:
        # Any type of x represents the values exactly.
        return _dot(x, w.astype(x.dtype), jnp.float32) * scale[:, 0][None]
    return _dot(x, _floats(w, scale, minimum, group).astype(x.dtype), jnp.float32)


def _dot(x: jax.Array, w: jax.Array, dtype: DTypeLike) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


# ---- the rows of x -----------------------------------------------------------------------------


def _round_rows(x: jax.Array, w: QuantizedWeight) -> tuple[jax.Array, jax.Array | None]:
    """Return x as it is multiplied, and the scale of its products, f32[T, 1]."""
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
        # Non-finite values stay so instead of being clipped to the largest value.
        scale = jnp.where(jnp.isfinite(scale), w.input_scale, jnp.nan)
    if quantization.activations == "int8":
        low = -128.0 if quantization.static else -127.0
        return jnp.clip(lax.round(x32 / scale, _TO_EVEN), low, 127.0).astype(jnp.int8), scale
    return round_to_fp8(x32 / scale).astype(x.dtype), scale


_TO_EVEN = lax.RoundingMethod.TO_NEAREST_EVEN


def _row_scale(x: jax.Array, most: float, axis: str | None = None) -> jax.Array:
    """Return the scales f32[..., 1] that map the largest values to `most`; NaN if a row has one."""
    top = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    if axis is not None:
        with jax.named_scope("row_scale"):
            # Some libraries ignore NaN in a maximum, so each device keeps its own NaN.
            top = jnp.where(jnp.isnan(top), top, lax.pmax(top, axis))
    return jnp.where(top == 0, 1.0, top / most)


def round_to_fp8(x: jax.Array) -> jax.Array:
    """Round float32 to the nearest FP8 (E4M3) value, at most 448, as float32.

    It uses arithmetic, because XLA may remove a conversion to FP8 and back.
    """
    x = jnp.clip(x, -FP8_MAX, FP8_MAX)
    bits = lax.bitcast_convert_type(x, jnp.int32)
    smallest = (127 - 6) << 23  # the exponent below which values are spaced evenly
    exponent = jnp.maximum(bits & 0x7F800000, smallest)
    step = lax.bitcast_convert_type(exponent - (3 << 23), jnp.float32)
    return lax.round(x / step, _TO_EVEN) * step
