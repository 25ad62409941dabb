"""The tensors of a quantised matrix: which there must be, and what they hold.

Every layout becomes the same: values [N, K], a scale for each row and group of columns, and where
there are zeros, as many of those. Nothing is multiplied here; the values are the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from forge_jax.errors import CheckpointError
from forge_jax.weights.quantization import Scheme
from forge_jax.weights.stored import FLOAT8_E4M3, FLOATS, StoredTensor, TensorSource

INT8, INT32, INT64 = np.dtype(np.int8), np.dtype(np.int32), np.dtype(np.int64)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each four bits, from the lowest
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
class _Wanted:
    name: str
    shapes: tuple[tuple[int, ...], ...]  # any of them
    dtypes: tuple[np.dtype, ...]
    optional: bool = False


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
    for wanted in _wanted(scheme, module, shape):
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


def _wanted(scheme: Scheme, module: str, shape: tuple[int, int]) -> list[_Wanted]:
    outputs, inputs = shape
    groups = -(-inputs // (scheme.block[1] or inputs))
    scale = f"{module}.{scheme.scale_name}"
    if scheme.layout in ("gptq", "awq"):
        packed = (inputs // 8, outputs) if scheme.layout == "gptq" else (inputs, outputs // 8)
        wanted = [
            _Wanted(f"{module}.qweight", (packed,), (INT32,)),
            _Wanted(f"{module}.qzeros", ((groups, outputs // 8),), (INT32,)),
            _Wanted(scale, ((groups, outputs),), FLOATS),
        ]
        if scheme.layout == "gptq":
            name, optional = f"{module}.g_idx", not scheme.ordered
            wanted.append(_Wanted(name, ((inputs,),), (INT32, INT64), optional))
        return wanted
    rows = scheme.block[0]
    one = ((), (1,), (1, 1))
    if rows is None:
        scales = one
    elif rows == 1:
        scales = ((outputs, groups), (outputs,)) if groups == 1 else ((outputs, groups),)
    else:
        scales = ((-(-outputs // rows), groups),)
    wanted = [_Wanted(scale, scales, FLOATS)]
    if scheme.static:
        wanted.append(_Wanted(f"{module}.input_scale", one, FLOATS))
    if scheme.layout == "plain":
        dtype = FLOAT8_E4M3 if scheme.values == "fp8" else INT8
        zeros = _Wanted(f"{module}.weight_zero_point", scales, (INT8, FLOAT8_E4M3), optional=True)
        return [_Wanted(f"{module}.weight", (shape,), (dtype,)), *wanted, zeros]
    wanted += [
        _Wanted(f"{module}.weight_packed", ((outputs, inputs // 8),), (INT32,)),
        _Wanted(f"{module}.weight_shape", ((2,),), (INT64, INT32), optional=True),
    ]
    if scheme.zeros:
        wanted.append(_Wanted(f"{module}.weight_zero_point", ((outputs // 8, groups),), (INT32,)))
    name, optional = f"{module}.weight_g_idx", not scheme.ordered
    wanted.append(_Wanted(name, ((inputs,),), (INT32, INT64), optional))
    return wanted


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
    name = "g_idx" if scheme.layout == "gptq" else "weight_g_idx"
    return _order(scheme, shape, _Reader(module, stored), name)


class _Reader:
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
    read = _Reader(module, stored)
    match scheme.layout:
        case "plain":
            matrix = _read_plain(scheme, shape, read)
        case "packed":
            matrix = _read_packed(scheme, shape, read)
        case "gptq":
            matrix = _read_gptq(scheme, shape, read)
        case "awq":
            values = unpack(read("qweight"), axis=1, order=AWQ_ORDER).T
            zero = unpack(read("qzeros"), axis=1, order=AWQ_ORDER).T
            matrix = Matrix(values, _float32(read(scheme.scale_name)).T, zero, None, None)
    if matrix.order is None:
        return matrix
    return Matrix(matrix.values[:, matrix.order], matrix.scale, matrix.zero, matrix.order, None)


def _read_plain(scheme: Scheme, shape: tuple[int, int], read: _Reader) -> Matrix:
    if read.has("weight_zero_point") and np.any(_float32(read("weight_zero_point")) != 0):
        raise read.error("weight_zero_point", "it is not 0, though `symmetric` is true")
    rows = scheme.block[0]
    scale = _float32(read(scheme.scale_name)).reshape(-1, _groups(scheme, shape))
    if rows is None:
        scale = np.repeat(scale, shape[0], axis=0)
    elif rows > 1:
        scale = np.repeat(scale, rows, axis=0)[: shape[0]]
    input_scale = None
    if scheme.static:
        input_scale = np.float32(_float32(read("input_scale")).item())
        if not (np.isfinite(input_scale) and input_scale > 0):
            raise read.error("input_scale", f"{input_scale} is no positive number")
    return Matrix(np.asarray(read("weight")), scale, None, None, input_scale)


def _read_packed(scheme: Scheme, shape: tuple[int, int], read: _Reader) -> Matrix:
    if read.has("weight_shape") and tuple(read("weight_shape")) != shape:
        raise read.error("weight_shape", f"it is {read('weight_shape').tolist()}, not {shape}")
    values = unpack(read("weight_packed"), axis=1)
    zero = unpack(read("weight_zero_point"), axis=0) if scheme.zeros else None
    scale = _float32(read(scheme.scale_name)).reshape(shape[0], -1)
    return Matrix(values, scale, zero, _order(scheme, shape, read, "weight_g_idx"), None)


def _read_gptq(scheme: Scheme, shape: tuple[int, int], read: _Reader) -> Matrix:
    values = unpack(read("qweight"), axis=0).T
    stored = unpack(read("qzeros"), axis=1).T
    if scheme.zero_offset and np.any(stored == 15):
        # What was written as 0 less 1; some read it as 16, some as 0, some carry into the next.
        raise read.error("qzeros", "there are zeros less 1 of 15, which are read in several ways")
    zero = stored + np.uint8(scheme.zero_offset)
    if not scheme.zeros:
        if np.any(zero != MIDDLE):
            raise read.error("qzeros", f"there are zeros other than {MIDDLE}, though `sym` is true")
        zero = None
    scale = _float32(read(scheme.scale_name)).T
    return Matrix(values, scale, zero, _order(scheme, shape, read, "g_idx"), None)


def _order(scheme: Scheme, shape: tuple[int, int], read: _Reader, name: str) -> np.ndarray | None:
    """The columns in the order of their groups, i32[K]; None: they are in order."""
    inputs = shape[1]
    group = scheme.block[1] or inputs
    if not read.has(name):
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


def _groups(scheme: Scheme, shape: tuple[int, int]) -> int:
    return -(-shape[1] // (scheme.block[1] or shape[1]))


def _float32(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(np.float32)
