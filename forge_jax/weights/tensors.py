"""The tensors of a quantized matrix: which ones are required, and their contents.

Every layout becomes the same: values [N, K], a scale for each row and group of columns, and as many
zeros if there are any. The values are the checkpoint's, not multiplied. Layouts of single methods
are in `methods/`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol, cast

import numpy as np

from forge_jax.errors import CheckpointError
from forge_jax.weights.stored import FLOAT8_E4M3, FLOATS, ArrayTensor, StoredTensor, TensorSource

Values = Literal["int8", "fp8", "int4", "mxfp4"]
INT8, INT32, INT64 = np.dtype(np.int8), np.dtype(np.int32), np.dtype(np.int64)
UINT8 = np.dtype(np.uint8)
MIDDLE = 8  # middle of the values from 0 to 15: the zero of schemes without zeros


@dataclass(frozen=True, eq=False)
class Matrix:
    """The contents of one matrix [N, K], or of several, stacked."""

    # int8, FP8, or 4 bits in uint8, which mean (value - zero) * scale, where zero is 8 by default.
    # MXFP4 is its bits in uint8, and its scales are exponents in uint8.
    values: np.ndarray
    scale: np.ndarray  # f32[N, G]
    zero: np.ndarray | None  # u8[N, G]
    order: np.ndarray | None  # i32[K], the column of x that each column of the values multiplies
    input_scale: np.float32 | None  # scale of static activations

    def rows(self, at: np.ndarray) -> Matrix:
        """Return some rows, i64[n], or all of them in another order."""
        zero = None if self.zero is None else self.zero[at]
        return replace(self, values=self.values[at], scale=self.scale[at], zero=zero)


@dataclass(frozen=True)
class Wanted:
    """A required or optional tensor of a module."""

    name: str
    shapes: tuple[tuple[int, ...], ...]  # the allowed ones
    dtypes: tuple[np.dtype, ...]
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a kind of matrix [N, K] is stored, and how the rows that it multiplies are rounded.

    Attributes:
      layout: the tensors, and the arrangement of values in them.
      values: the type of a value. FP8 is E4M3 (Micikevicius et al. 2022, arXiv:2209.05433), MXFP4
        is E2M1 with scales that are powers of two (OCP Microscaling Formats 1.0).
      block: (rows, columns) that share a scale; None: all.
      zeros: True if a value is `(stored - zero) * scale`, with a zero for each scale.
      ordered: True if a tensor has the group of each column (GPTQ's desc_act).
      activations: the type that rows of x are rounded to, with a scale per row, or per row and
        block in FP8 blocks.
      static: True if activations are rounded with a scale in the checkpoint instead.
      scale_name: the name of the scale's tensor.
      zero_offset: a number to add to a stored zero.
      stacked: True if tensors have the matrices of all experts of a layer.
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
    stacked: bool = False


class Layout(Protocol):
    """The tensors that a module's matrix is stored in, and how to read them."""

    @property
    def name(self) -> str: ...

    @property
    def order_name(self) -> str | None:
        """The tensor with the group of each column, if a scheme can be ordered."""
        ...

    def wanted(self, scheme: Scheme, module: str, shape: tuple[int, int]) -> list[Wanted]:
        """Return the tensors of a matrix [N, K]."""
        ...

    def read(self, scheme: Scheme, shape: tuple[int, int], read: ModuleReader) -> Matrix:
        """Return the matrix, with its columns as they are stored, and their order."""
        ...


def check_matrix(
    scheme: Scheme,
    module: str,
    shape: tuple[int, int],
    stored: Mapping[str, TensorSource],
    experts: int | None = None,
) -> list[str]:
    """Return the faults of the tensors of a quantized matrix [N, K], from their headers.

    If the scheme is stacked, the tensors have the matrices of so many experts.
    """
    outputs, inputs = shape
    group = scheme.block[1] or inputs
    if scheme.values == "int4" and (inputs % group or inputs % 8 or outputs % 8):
        return [
            f"{module} [{outputs}, {inputs}] cannot be divided into groups of {group} columns and "
            "words of 8 values"
        ]
    if scheme.values == "mxfp4" and inputs % group:
        return [f"{module} has {inputs} columns, which are not a multiple of {group}"]
    faults, first = [], () if experts is None else (experts,)
    for wanted in scheme.layout.wanted(scheme, module, shape):
        found = stored.get(wanted.name)
        if found is None:
            if not wanted.optional:
                faults.append(f"tensor {wanted.name} is missing")
            continue
        shapes = [(*first, *each) for each in wanted.shapes]
        if found.shape not in shapes:
            faults.append(
                f"tensor {wanted.name} has shape {found.shape}, not "
                + " or ".join(map(str, shapes))
            )
        if found.dtype not in wanted.dtypes:
            faults.append(f"tensor {wanted.name} is {found.dtype}, not {wanted.dtypes[0]}")
        if not scheme.stacked and not isinstance(found, StoredTensor | ArrayTensor):
            faults.append(f"tensor {wanted.name} cannot be stored in this file format")
    return faults


def read_matrices(
    scheme: Scheme,
    modules: Mapping[str, tuple[int, int]],
    stored: Mapping[str, TensorSource],
    expert: int | None = None,
) -> Matrix:
    """Return the matrices of several modules, [N, K] each, stacked.

    If tensors have the matrices of all experts, those of `expert` are read. For static activations,
    the largest scale is used, because all were calibrated on the same rows.

    Raises:
      CheckpointError: the values contradict the config or each other.
    """
    matrices = {
        name: _read(scheme, shape, ModuleReader(name, stored, expert))
        for name, shape in modules.items()
    }
    (first_name, first), *others = matrices.items()
    for name, other in others:
        if first.order is None or other.order is None:
            assert first.order is other.order
        elif not np.array_equal(first.order, other.order):
            raise CheckpointError(
                f"the groups (g_idx) of {name} differ from those of {first_name}, but matrices "
                "that are computed together must have the same groups"
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
    """Return the order of one matrix, see `Matrix.order`."""
    return read_column_order(scheme, shape, ModuleReader(module, stored))


class ModuleReader:
    """The tensors of one module."""

    def __init__(self, module: str, stored: Mapping[str, TensorSource], expert: int | None = None):
        self.module, self.stored, self.expert = module, stored, expert

    def has(self, name: str) -> bool:
        return f"{self.module}.{name}" in self.stored

    def __call__(self, name: str) -> np.ndarray:
        return cast(StoredTensor | ArrayTensor, self.stored[f"{self.module}.{name}"]).read()

    def of_expert(self, suffix: str) -> np.ndarray:
        """Return the part of one expert of the tensor with this suffix, [E, ...]."""
        assert self.expert is not None
        found = self.stored[f"{self.module}{suffix}"]
        if isinstance(found, StoredTensor | ArrayTensor):
            return found.read()[self.expert]
        _, *inner, width = found.shape
        rows = math.prod(inner)
        out = np.empty((rows, width), found.dtype)
        found.read_rows(out, self.expert * rows)
        return out.reshape(*inner, width)

    def error(self, name: str, fault: str) -> CheckpointError:
        return CheckpointError(f"tensor {self.module}.{name}: {fault}")


def _read(scheme: Scheme, shape: tuple[int, int], read: ModuleReader) -> Matrix:
    matrix = scheme.layout.read(scheme, shape, read)
    if matrix.order is None:
        return matrix
    return Matrix(matrix.values[:, matrix.order], matrix.scale, matrix.zero, matrix.order, None)


@dataclass(frozen=True)
class PlainLayout:
    """Values that are stored unpacked, int8 or FP8."""

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
            raise read.error("weight_zero_point", "must be 0, because `symmetric` is true")
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
                raise read.error("input_scale", f"must be a positive number, got {input_scale}")
        return Matrix(np.asarray(read("weight")), scale, None, None, input_scale)


PLAIN = PlainLayout()


def scale_tensors(scheme: Scheme, module: str, shape: tuple[int, int]) -> list[Wanted]:
    """Return the scale tensors of the values and of static activations."""
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
    """Return the columns sorted by group, i32[K]; None if they are stored in that order."""
    inputs, name = shape[1], scheme.layout.order_name
    group = scheme.block[1] or inputs
    if name is None or not read.has(name):
        return None
    groups = read(name)
    if not scheme.ordered:
        # Some writers store -1 if nothing is ordered.
        if np.any(groups != np.arange(inputs) // group) and np.any(groups != -1):
            raise read.error(
                name,
                "columns must be in the order of groups, because the config does not order them",
            )
        return None
    if groups.min() < 0 or groups.max() >= inputs // group:
        raise read.error(name, f"each group must be from 0 to {inputs // group - 1}")
    if np.any(np.bincount(groups, minlength=inputs // group) != group):
        raise read.error(name, f"each group must have {group} columns")
    return np.argsort(groups, kind="stable").astype(np.int32)


def unpack(words: np.ndarray, *, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Unpack int32 words of 8 values along `axis`, 0 or 1, to uint8 from 0 to 15.

    `order` is the place of each 4 bits of a word, lowest bits first.
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
