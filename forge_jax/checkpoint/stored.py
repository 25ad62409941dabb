"""What all file formats give: where each tensor of a checkpoint lies, and how to read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

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

    def read_into(self, out: np.ndarray, *, expert: int | None = None) -> None:
        """Writes the values into `out[shape]`, cast to its type.

        Args:
          expert: of a tensor of three axes, this place of the first alone: `out[shape[1:]]`.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies; `read` maps it. Whoever makes one has checked it against the file."""

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

    def read_into(self, out: np.ndarray, *, expert: int | None = None) -> None:
        values = self.read()
        if expert is not None and values.ndim == 3:
            values = values[expert]
        np.copyto(out, values, casting="unsafe")


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one of a tensor that is not empty."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2 = np.dtype(ml_dtypes.float8_e5m2)
FLOATS = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
