"""Stored tensors, the common result of all file formats: their position, and how to read them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from forge_jax.errors import CheckpointError

MAX_TENSORS = 200_000  # tensors per file; the largest known checkpoints have that many in total
MAX_DIMENSIONS = 32
MAX_NAME = 4096  # bytes


class TensorSource(Protocol):
    """A tensor of a checkpoint under Hugging Face's name, read on demand."""

    @property
    def dtype(self) -> np.dtype:
        """The type of the values."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_rows(self, out: np.ndarray, first: int) -> None:
        """Copy the rows from `first` on into `out`, cast to its type. Thread-safe.

        Args:
          out: [rows, columns], or [rows] for a vector. The first two of three axes count as one.
          first: the number of the first row.

        Raises:
          CheckpointError: the file ends before the rows do.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's position in a file, checked against the file's size when it was made.

    `read` maps the tensor. Rows to be copied are read without mapping, because page faults take
    longer than the copy. Access to a mapped file that was truncated would end the process.
    """

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    strides: tuple[int, ...] | None = None  # in elements; None: row-major

    def read(self) -> np.ndarray:
        """Return a read-only view of the file. The mapping lives as long as the view."""
        if math.prod(self.shape) == 0:
            return np.empty(self.shape, self.dtype)
        if self.strides is None:
            return np.memmap(self.file, self.dtype, mode="r", offset=self.offset, shape=self.shape)
        span = span_of(self.shape, self.strides)
        flat = np.memmap(self.file, self.dtype, mode="r", offset=self.offset, shape=(span,))
        strides = [stride * self.dtype.itemsize for stride in self.strides]
        return np.ndarray(self.shape, self.dtype, buffer=flat, strides=strides)

    def read_rows(self, out: np.ndarray, first: int) -> None:
        if self.strides is not None:
            self._copy_rows(out, first)
        elif out.dtype == self.dtype and out.flags.c_contiguous:
            self._read_exactly(out, first)
        else:
            values = np.empty(out.shape, self.dtype)
            self._read_exactly(values, first)
            np.copyto(out, values, casting="unsafe")

    def transposed(self) -> StoredTensor:
        """Return the tensor with its last two axes exchanged."""
        strides = self.strides
        if strides is None:
            strides = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        *outer, last, first = range(len(self.shape))
        axes = (*outer, first, last)
        shape, strides = (tuple(sizes[axis] for axis in axes) for sizes in (self.shape, strides))
        return replace(self, shape=shape, strides=strides)

    def _read_exactly(self, out: np.ndarray, first: int) -> None:
        view = memoryview(out.reshape(-1).view(np.uint8))
        columns = self.shape[-1] if len(self.shape) > 1 else 1
        at = self.offset + first * columns * self.dtype.itemsize
        number = os.open(self.file, os.O_RDONLY)
        try:
            while view:
                done = os.preadv(number, [view], at)
                if not done:
                    raise shorter(self.file)
                view, at = view[done:], at + done
        finally:
            os.close(number)

    def _copy_rows(self, out: np.ndarray, first: int) -> None:
        values = self.read()
        if values.ndim < 3:
            np.copyto(out, values[first : first + len(out)], casting="unsafe")
            return
        done = 0
        while done < len(out):
            outer, inner = divmod(first + done, values.shape[1])
            rows = values[outer, inner : inner + len(out) - done]
            np.copyto(out[done : done + len(rows)], rows, casting="unsafe")
            done += len(rows)


@dataclass(frozen=True, eq=False)
class ArrayTensor:
    """A tensor that is in memory."""

    array: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self) -> np.ndarray:
        return self.array

    def read_rows(self, out: np.ndarray, first: int) -> None:
        values = np.atleast_1d(self.array)
        if values.ndim > 2:
            values = values.reshape(-1, values.shape[-1])
        np.copyto(out, values[first : first + len(out)], casting="unsafe")

    def transposed(self) -> ArrayTensor:
        """Return the tensor with its last two axes exchanged."""
        return ArrayTensor(np.ascontiguousarray(self.array.swapaxes(-1, -2)))


def shorter(file: Path) -> CheckpointError:
    """Return the error for a file that was truncated after it was checked."""
    return CheckpointError(f"{file} is shorter than when it was checked: download it again")


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements a nonempty tensor spans from the first to the last."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2 = np.dtype(ml_dtypes.float8_e5m2)
FLOATS = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
