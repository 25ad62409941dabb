"""Matrices read from files and packed in C++, without holding the GIL.

While weights are read, the process traces its steps in Python. A thread that returned to Python for
each piece of a file would wait milliseconds for the GIL each time.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from forge_kernels.cpu.library import library, num_threads
from forge_kernels.host_arrays import empty_weight
from forge_kernels.linear import packed
from forge_kernels.linear.packed import FORMATS, Packing
from forge_kernels.linear.panels import PANEL
from forge_kernels.threads import for_each

TYPES = tuple(map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32)))  # as `Stored` in read.h
CHUNK_BYTES = 4 * 2**20  # part of a plain matrix, per thread and read
_PLAIN = -1


class ShortFileError(Exception):
    """A file ends before its last row."""

    def __init__(self, file: Path):
        super().__init__(f"{file} is too short")
        self.file = file


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive rows of a matrix in a file."""

    file: Path
    dtype: np.dtype
    offset: int  # bytes
    rows: int


@dataclass(frozen=True, slots=True)
class PackedInFiles:
    """Matrices [outputs, inputs] to be packed, one or those of experts, in any of `TYPES`."""

    packing: Packing
    matrices: Sequence[Sequence[Stretch]]  # each by its rows, from the first

    @property
    def num_bytes(self) -> int:
        """The bytes of the packed weight, without scales."""
        weight = self.packing.weight
        return weight.size * weight.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PlainInFiles:
    """An array of `shape`, whose rows (or numbers, for a vector) are stored in its own type."""

    shape: tuple[int, ...]
    dtype: np.dtype
    stretches: Sequence[Stretch]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Read = tuple[np.ndarray, np.ndarray | None]  # weight and scale, as returned by `pack`


def read_files(arrays: Sequence[PackedInFiles | PlainInFiles]) -> list[Read]:
    """Read all arrays with one thread per core, into memory that XLA:CPU can adopt.

    For a packing, float16 and float32 are rounded to the nearest bfloat16.

    Raises:
      ShortFileError: a file ends before the last row.
      OSError: a file cannot be opened or read.
    """
    results: list[Read] = []
    with ExitStack() as opened:
        work = _Work(opened)
        for array in arrays:
            results.append(work.add(array))
        work.run()
    return results


class _Work:
    """The tables that `forge_read_files` processes; the structs are those of `read.h`."""

    def __init__(self, opened: ExitStack):
        self._opened = opened
        self._numbers: dict[Path, int] = {}
        self._files: list[Path] = []  # one per stretch
        self._stretches: list[tuple[int, int, int, int]] = []
        self._matrices: list[tuple[int, ...]] = []
        self._num_items = 0

    def add(self, array: PackedInFiles | PlainInFiles) -> Read:
        """Return memory for an array, which `run` fills."""
        if isinstance(array, PlainInFiles):
            return self._add_plain(array), None
        packing = array.packing
        weight, scale = packed.empty(packing)
        by_matrix = weight[None] if packing.experts is None else weight
        scales = scale
        if scale is not None and packing.experts is None:
            scales = scale[None]
        assert len(array.matrices) == len(by_matrix), packing
        step = max(1, packed.CHUNK_BYTES // (PANEL * packing.inputs * 2))
        for number, stretches in enumerate(array.matrices):
            assert sum(s.rows for s in stretches) == packing.outputs, packing
            own = None if scales is None else scales[number]
            apart = 0 if own is None else own.strides[0] // own.itemsize
            self._add(
                stretches,
                rows=packing.outputs,
                columns=packing.inputs,
                paired=packing.paired,
                form=FORMATS.index(packing.format),
                memory=(by_matrix[number], own, apart),
                step=step,
                num_items=-(-packing.panels // step),
            )
        return weight, scale

    def _add_plain(self, array: PlainInFiles) -> np.ndarray:
        out = empty_weight(array.shape, array.dtype)
        assert all(s.dtype == out.dtype for s in array.stretches), array
        rows = sum(s.rows for s in array.stretches)
        if out.size:
            row_bytes = out.nbytes // rows
            assert row_bytes * rows == out.nbytes, array
            step = max(1, CHUNK_BYTES // row_bytes)
            self._add(
                array.stretches,
                rows=rows,
                columns=row_bytes,
                paired=False,
                form=_PLAIN,
                memory=(out, None, 0),
                step=step,
                num_items=-(-rows // step),
            )
        return out

    def _add(
        self,
        stretches: Sequence[Stretch],
        *,
        rows: int,
        columns: int,
        paired: bool,
        form: int,
        memory: tuple[np.ndarray, np.ndarray | None, int],
        step: int,
        num_items: int,
    ) -> None:
        out, scale, apart = memory
        first = len(self._stretches)
        for s in stretches:
            kind = 0 if form == _PLAIN else TYPES.index(s.dtype)
            self._stretches.append((self._descriptor(s.file), kind, s.offset, s.rows))
            self._files.append(s.file)
        self._num_items += num_items
        addresses = out.ctypes.data, 0 if scale is None else scale.ctypes.data
        self._matrices.append(
            (rows, columns, paired, form, *addresses, apart, first, step, self._num_items)
        )

    def _descriptor(self, file: Path) -> int:
        number = self._numbers.get(file)
        if number is None:
            number = self._numbers[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            self._opened.callback(os.close, number)
        return number

    def run(self) -> None:
        matrices = np.array(self._matrices, np.int64).reshape(-1, 10)
        stretches = np.array(self._stretches, np.int64).reshape(-1, 4)
        progress = np.array([0, -1, 0], np.int64)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (matrices, stretches, progress)]

        def work(_: int) -> None:
            count = ctypes.c_int64(len(matrices))
            library().forge_read_files(pointers[0], count, *pointers[1:])

        for_each(work, range(min(num_threads(), self._num_items)))
        _, fault, error = progress.tolist()
        if fault < 0:
            return
        file = self._files[fault]
        if not error:
            raise ShortFileError(file)
        raise OSError(error, os.strerror(error), str(file))
