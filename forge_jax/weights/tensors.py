"""The tensors of a quantised matrix: which there must be, and what they hold.

Every layout becomes the same: values [N, K], a scale for each row and group of columns, and where
there are zeros, as many of those. Nothing is multiplied here; the values are the checkpoint's.
Layouts of single methods are in `methods/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol, cast

import numpy as np

from forge_jax.errors import CheckpointError
from forge_jax.weights.stored import FLOAT8_E4M3, FLOATS, StoredTensor, TensorSource

Values = Literal["int8", "fp8", "int4"]
INT8, INT32, INT64 = np.dtype(np.int8), np.dtype(np.int32), np.dtype(np.int64)
MIDDLE = 8  # of values from 0 to 15: the zero of those that have none of their own


@dataclass(frozen=True, eq=False)
class Matrix:
    """What a checkpoint holds of one matrix [N, K], or of several, one below the other."""

    values: np.ndarray  # int8, FP8; or uint8, 4 bits: (value - zero) * scale, the zero 8 by default
    scale: np.ndarray  # f32[N, G]
    zero: np.ndarray | None  # u8[N, G]
    order: np.ndarray | None  # i32[K]: which column of x each column of the values multiplies
    input_scale: np.float32 | None  # of static activations

    def rows(self, at: np.ndarray) -> Matrix:
        """Some rows, i64[n], or all of them in another order."""
        zero = None if self.zero is None else self.zero[at]
        return replace(self, values=self.values[at], scale=self.scale[at], zero=zero)


@dataclass(frozen=True)
class Wanted:
    """A tensor that a module must have, or may."""

    name: str
    shapes: tuple[tuple[int, ...], ...]  # any of them
    dtypes: tuple[np.dtype, ...]
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How one kind of matrices [N, K] is stored, and what becomes of the rows they multiply.

    Attributes:
      layout: which tensors there are, and how values lie in them.
      values: what a value is. FP8 is E4M3 (Micikevicius et al. 2022, arXiv:2209.05433).
      block: (rows, columns) that share a scale; None: all.
      zeros: whether a value is `(stored - zero) * scale`, with a zero for each scale.
      ordered: the group of a column stands in a tensor (GPTQ's desc_act).
      activations: rows of x are rounded to this type, with a scale for each row, or in FP8 blocks
        for each row and block; `static`: with the scale that the checkpoint has for the matrix.
      scale_name: of the tensor.
      zero_offset: what is added to a stored zero.
    """

    layout: Layout
    values: Values
    block: tuple[int | None, int | None]
    zeros: bool = False
    ordered: bool = False
    activations: Literal["int8", "fp8"] | None = None
    static: bool = False
    scale_name: str = "weight_scale"
    zero_offset: int = 0


class Layout(Protocol):
    """Which tensors the matrix of a module is stored in, and how."""

    @property
    def name(self) -> str: ...

    @property
    def order_name(self) -> str | None:
        """The tensor with the group of each column, where a scheme may be ordered."""
        ...

    def wanted(self, scheme: Scheme, module: str, shape: tuple[int, int]) -> list[Wanted]:
        """The tensors of a matrix [N, K]."""
        ...

    def read(self, scheme: Scheme, shape: tuple[int, int], read: ModuleReader) -> Matrix:
        """The matrix, with its columns as they are stored, and their order."""
        ...


def check_matrix(
    scheme: Scheme, module: str, shape: tuple[int, int], stored: Mapping[str, TensorSource]
) -> list[str]:
    """What is wrong with the tensors of a quantised matrix [N, K], by their headers."""
    outputs, inputs = shape
    group = scheme.block[1] or inputs
    if scheme.values == "int4" and (inputs % group or inputs % 8 or outputs % 8):
        return [
            f"{module} [{outputs}, {inputs}] cannot be divided into groups of {group} columns and "
            "words of 8 values"
        ]
    faults = []
    for wanted in scheme.layout.wanted(scheme, module, shape):
        found = stored.get(wanted.name)
        if found is None:
            if not wanted.optional:
                faults.append(f"tensor {wanted.name} is missing")
            continue
        if found.shape not in wanted.shapes:
            faults.append(
                f"tensor {wanted.name} has shape {found.shape}, not "
                + " or ".join(map(str, wanted.shapes))
            )
        if found.dtype not in wanted.dtypes:
            faults.append(f"tensor {wanted.name} is {found.dtype}, not {wanted.dtypes[0]}")
        if not isinstance(found, StoredTensor):
            faults.append(f"tensor {wanted.name} is of a format that holds no such tensors")
    return faults


def read_matrices(
    scheme: Scheme, modules: Mapping[str, tuple[int, int]], stored: Mapping[str, TensorSource]
) -> Matrix:
    """The matrices of several modules, [N, K] each, one below the other.

    Of static activations the largest scale counts: it was calibrated on the same rows.

    Raises:
      CheckpointError: values that contradict the config, or each other.
    """
    matrices = {name: _read(scheme, name, shape, stored) for name, shape in modules.items()}
    (first_name, first), *others = matrices.items()
    for name, other in others:
        if first.order is None or other.order is None:
            assert first.order is other.order
        elif not np.array_equal(first.order, other.order):
            raise CheckpointError(
                f"the groups (g_idx) of {name} are not those of {first_name}: matrices that are "
                "computed together must have the same"
            )
    parts = matrices.values()
    scales = [each.input_scale for each in parts if each.input_scale is not None]
    zeros = [each.zero for each in parts if each.zero is not None]
    return Matrix(
        values=np.concatenate([each.values for each in parts]),
        scale=np.concatenate([each.scale for each in parts]),
        zero=np.concatenate(zeros) if zeros else None,
        order=first.order,
        input_scale=max(scales) if scales else None,
    )


def read_order(
    scheme: Scheme, module: str, shape: tuple[int, int], stored: Mapping[str, TensorSource]
) -> np.ndarray | None:
    """That of a matrix alone, see `Matrix.order`."""
    return read_column_order(scheme, shape, ModuleReader(module, stored))


class ModuleReader:
    """The tensors of one module."""

    def __init__(self, module: str, stored: Mapping[str, TensorSource]):
        self.module, self.stored = module, stored

    def has(self, name: str) -> bool:
        return f"{self.module}.{name}" in self.stored

    def __call__(self, name: str) -> np.ndarray:
        return cast(StoredTensor, self.stored[f"{self.module}.{name}"]).read()

    def error(self, name: str, fault: str) -> CheckpointError:
        return CheckpointError(f"tensor {self.module}.{name}: {fault}")


def _read(
    scheme: Scheme, module: str, shape: tuple[int, int], stored: Mapping[str, TensorSource]
) -> Matrix:
    matrix = scheme.layout.read(scheme, shape, ModuleReader(module, stored))
    if matrix.order is None:
        return matrix
    return Matrix(matrix.values[:, matrix.order], matrix.scale, matrix.zero, matrix.order, None)


@dataclass(frozen=True)
class PlainLayout:
    """Values as they are, int8 or FP8."""

    name = "plain"
    order_name = None

    def wanted(self, scheme: Scheme, module: str, shape: tuple[int, int]) -> list[Wanted]:
        dtype = FLOAT8_E4M3 if scheme.values == "fp8" else INT8
        scales = scale_tensors(scheme, module, shape)
        zeros = Wanted(
            f"{module}.weight_zero_point", scales[0].shapes, (INT8, FLOAT8_E4M3), optional=True
        )
        return [Wanted(f"{module}.weight", (shape,), (dtype,)), *scales, zeros]

    def read(self, scheme: Scheme, shape: tuple[int, int], read: ModuleReader) -> Matrix:
        if read.has("weight_zero_point") and np.any(float32(read("weight_zero_point")) != 0):
            raise read.error("weight_zero_point", "it is not 0, though `symmetric` is true")
        rows = scheme.block[0]
        scale = float32(read(scheme.scale_name)).reshape(-1, num_groups(scheme, shape))
        if rows is None:
            scale = np.repeat(scale, shape[0], axis=0)
        elif rows > 1:
            scale = np.repeat(scale, rows, axis=0)[: shape[0]]
        input_scale = None
        if scheme.static:
            input_scale = np.float32(float32(read("input_scale")).item())
            if not (np.isfinite(input_scale) and input_scale > 0):
                raise read.error("input_scale", f"{input_scale} is no positive number")
        return Matrix(np.asarray(read("weight")), scale, None, None, input_scale)


PLAIN = PlainLayout()


def scale_tensors(scheme: Scheme, module: str, shape: tuple[int, int]) -> list[Wanted]:
    """The scales of the values, and of static activations."""
    (outputs, _), groups, rows = shape, num_groups(scheme, shape), scheme.block[0]
    one = ((), (1,), (1, 1))
    if rows is None:
        shapes = one
    elif rows == 1:
        shapes = ((outputs, groups), (outputs,)) if groups == 1 else ((outputs, groups),)
    else:
        shapes = ((-(-outputs // rows), groups),)
    wanted = [Wanted(f"{module}.{scheme.scale_name}", shapes, FLOATS)]
    if scheme.static:
        wanted.append(Wanted(f"{module}.input_scale", one, FLOATS))
    return wanted


def read_column_order(
    scheme: Scheme, shape: tuple[int, int], read: ModuleReader
) -> np.ndarray | None:
    """The columns in the order of their groups, i32[K]; None: they are in order."""
    inputs, name = shape[1], scheme.layout.order_name
    group = scheme.block[1] or inputs
    if name is None or not read.has(name):
        return None
    groups = read(name)
    if not scheme.ordered:
        # Some writers leave -1 where nothing is ordered.
        if np.any(groups != np.arange(inputs) // group) and np.any(groups != -1):
            raise read.error(
                name, "columns are not in the order of groups, though the config says so"
            )
        return None
    if groups.min() < 0 or groups.max() >= inputs // group:
        raise read.error(name, f"a group is not from 0 to {inputs // group - 1}")
    if np.any(np.bincount(groups, minlength=inputs // group) != group):
        raise read.error(name, f"a group has not {group} columns")
    return np.argsort(groups, kind="stable").astype(np.int32)


def unpack(words: np.ndarray, *, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """int32 words of 8 values along `axis` of two -> uint8, from 0 to 15.

    `order`: the place of each 4 bits of a word, from the lowest.
    """
    words = np.ascontiguousarray(words).view(np.uint32)
    rows, columns = words.shape
    if axis == 0:
        out = np.empty((rows, 8, columns), np.uint8)
        places = [out[:, place] for place in order]
    else:
        out = np.empty((rows, columns, 8), np.uint8)
        places = [out[:, :, place] for place in order]
    for bits, place in enumerate(places):
        place[...] = words >> np.uint32(4 * bits) & np.uint32(15)
    return out.reshape(rows * 8, columns) if axis == 0 else out.reshape(rows, columns * 8)


def num_groups(scheme: Scheme, shape: tuple[int, int]) -> int:
    return -(-shape[1] // (scheme.block[1] or shape[1]))


def float32(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(np.float32)
