"""Matrices of which any rows can be read, from the tensors that they are made of."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forge_jax.models.weight_map import Tensor
from forge_jax.weights.stored import StoredTensor, TensorSource
from forge_kernels.linear.files import TYPES, Stretch
from forge_kernels.linear.panels import aligned_empty
from forge_kernels.threads import for_each

CHUNK_BYTES = 4 * 2**20  # that a thread writes before it takes the next ones


class StoredMatrix:
    """Tensors one below the other, [N, K], or vectors one behind the other, [N].

    Of tensors with an axis of experts the rows of all are below each other, or of one expert.
    """

    def __init__(
        self, parts: Sequence[Tensor], stored: Mapping[str, TensorSource], expert: int | None = None
    ):
        self._sources: list[TensorSource] = []
        self._starts: list[int] = []  # the row of each source that comes first
        num_rows = []
        for part in parts:
            source = stored[part.name]
            if part.transpose:
                assert isinstance(source, StoredTensor) and len(source.shape) == 2, part
                source = source.transposed()
            rows, start = math.prod(source.shape[:-1] or source.shape), 0
            if expert is not None and len(source.shape) == 3:
                rows //= source.shape[0]
                start = expert * rows
            self._sources.append(source)
            self._starts.append(start)
            num_rows.append(rows)
        self._ends = list(itertools.accumulate(num_rows))
        columns = self._sources[0].shape[1:][-1:]
        self.shape: tuple[int, ...] = (self._ends[-1], *columns)

    def read_rows(self, out: np.ndarray, first: int) -> None:
        """Writes the rows from the number `first` on into `out`, cast to its type."""
        done = 0
        while done < len(out):
            row = first + done
            index = bisect.bisect_right(self._ends, row)
            begin = self._ends[index - 1] if index else 0
            some = out[done : done + self._ends[index] - row]
            self._sources[index].read_rows(some, self._starts[index] + row - begin)
            done += len(some)

    def stretches(self, dtype: np.dtype | None = None) -> list[Stretch] | None:
        """Where all of it lies in files, row after row; None if it does not.

        Args:
          dtype: of all numbers; None: any that is rounded to bfloat16 where it is read.
        """
        found, begin = [], 0
        for source, start, end in zip(self._sources, self._starts, self._ends, strict=True):
            if not isinstance(source, StoredTensor) or source.strides is not None:
                return None
            if source.dtype not in (TYPES if dtype is None else (dtype,)):
                return None
            row_bytes = math.prod(self.shape[1:]) * source.dtype.itemsize
            offset = source.offset + start * row_bytes
            found.append(Stretch(source.file, source.dtype, offset, end - begin))
            begin = end
        return found

    def read(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """All of it, in memory that XLA:CPU can adopt; `shape` may tell the axis of experts."""
        host = aligned_empty(shape, dtype)
        rows = host.reshape(self.shape)
        row_bytes = rows.itemsize * math.prod(self.shape[1:])
        step = max(1, CHUNK_BYTES // max(row_bytes, 1))

        def read_some(first: int) -> None:
            self.read_rows(rows[first : first + step], first)

        for_each(read_some, range(0, len(rows), step))
        return host
