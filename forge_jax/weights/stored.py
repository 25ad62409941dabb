"""What all file formats give: where each tensor of a checkpoint lies, and how to read it."""

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

MAX_TENSORS = 200_000  # in one file; the largest known checkpoints have that many in all
MAX_DIMENSIONS = 32
MAX_NAME = 4096  # bytes


class TensorSource(Protocol):
    """A tensor of a checkpoint under Hugging Face's name, which is read when it is wanted."""

    @property
    def dtype(self) -> np.dtype:
        """Of its values."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_rows(self, out: np.ndarray, first: int) -> None:
        """Writes the rows from the number `first` on into `out`, cast to its type.

        Several threads may call it at the same time.

        Args:
          out: [rows, columns]; of a vector [rows]. Of a tensor of three axes the first two are one.

        Raises:
          CheckpointError: the file ends before them.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies. Whoever makes one has checked it against the file.

    `read` maps it. Rows that are to be copied are not mapped: asking the system for each page of a
    file takes longer than copying it, and a file that has been cut off meanwhile would end the
    process.
    """

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # bytes, from the start of the file
    strides: tuple[int, ...] | None = None  # in elements; None: row-major

    def read(self) -> np.ndarray:
        """A read-only view of the file. The mapping lives as long as the view."""
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
        """The same numbers with the axes in the opposite order."""
        strides = self.strides
        if strides is None:
            strides = tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        return replace(self, shape=self.shape[::-1], strides=strides[::-1])

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


def shorter(file: Path) -> CheckpointError:
    """The error of a file that has been cut off since it was checked."""
    return CheckpointError(f"{file} is shorter than it was: download it again")


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one of a tensor that is not empty."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2 = np.dtype(ml_dtypes.float8_e5m2)
FLOATS = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
