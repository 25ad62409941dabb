"""Matrices made of stored tensors, readable by any range of rows."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forge_jax.models.weight_map import Tensor
from forge_jax.weights.stored import ArrayTensor, StoredTensor, TensorSource
from forge_kernels.host_arrays import aligned_empty
from forge_kernels.linear.files import TYPES, Stretch
from forge_kernels.threads import for_each

CHUNK_BYTES = 4 * 2**20  # written by a thread before it takes the next chunk


class _ChosenRows:
    """Some rows of a tensor in another order; `order` has the stored row of each."""

    def __init__(self, source: TensorSource, order: np.ndarray):
        self.dtype, self.shape = source.dtype, (len(order), *source.shape[1:])
        self._source, self._order = source, order

    def read_rows(self, out: np.ndarray, first: int) -> None:
        order = self._order[first : first + len(out)]
        if not isinstance(self._source, StoredTensor):  # a call may decode the whole matrix
            begin, end = int(order.min()), int(order.max()) + 1
            rows = np.empty((end - begin, *self.shape[1:]), out.dtype)
            self._source.read_rows(rows, begin)
            out[...] = rows[order - begin]
            return
        breaks = np.flatnonzero(np.diff(order) != 1) + 1
        for begin, end in itertools.pairwise([0, *breaks.tolist(), len(order)]):
            self._source.read_rows(out[begin:end], int(order[begin]))


class StoredMatrix:
    """Tensors stacked vertically, [N, K], or vectors joined, [N].

    A tensor with an axis of experts contributes the rows of all experts, or of `experts` alone.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        stored: Mapping[str, TensorSource],
        experts: range | None = None,
    ):
        self._sources: list[TensorSource] = []
        self._starts: list[int] = []  # the first row to read of each source
        num_rows = []
        for part in parts:
            source = stored[part.name]
            if part.transpose:
                assert isinstance(source, StoredTensor | ArrayTensor), part
                assert len(source.shape) > 1, part
                source = source.transposed()
            order = part.stored_rows()
            if order is not None:
                source = _ChosenRows(source, order)
            rows, start = math.prod(source.shape[:-1] or source.shape), 0
            if experts is not None and len(source.shape) == 3:
                of_expert = rows // source.shape[0]
                rows, start = len(experts) * of_expert, experts.start * of_expert
            self._sources.append(source)
            self._starts.append(start)
            num_rows.append(rows)
        self._ends = list(itertools.accumulate(num_rows))
        columns = self._sources[0].shape[1:][-1:]
        self.shape: tuple[int, ...] = (self._ends[-1], *columns)

    def read_rows(self, out: np.ndarray, first: int) -> None:
        """Copy the rows from `first` on into `out`, cast to its type."""
        done = 0
        while done < len(out):
            row = first + done
            index = bisect.bisect_right(self._ends, row)
            begin = self._ends[index - 1] if index else 0
            some = out[done : done + self._ends[index] - row]
            self._sources[index].read_rows(some, self._starts[index] + row - begin)
            done += len(some)

    def stretches(self, dtype: np.dtype | None = None) -> list[Stretch] | None:
        """Return the file ranges that hold all rows in order; None if a tensor needs converting.

        Args:
          dtype: the type that all numbers must have; None accepts any type that is rounded to
            bfloat16 as it is read.
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
        """Return all rows in memory that XLA:CPU can adopt; `shape` may add the axis of experts."""
        host = aligned_empty(shape, dtype)
        rows = host.reshape(self.shape)
        row_bytes = rows.itemsize * math.prod(self.shape[1:])
        step = max(1, CHUNK_BYTES // max(row_bytes, 1))

        def read_some(first: int) -> None:
            self.read_rows(rows[first : first + step], first)

        for_each(read_some, range(0, len(rows), step))
        return host
