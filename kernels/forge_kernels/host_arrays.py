"""Memory for host arrays that XLA:CPU adopts without a copy, in huge pages where Linux has them.

A step reads all weights, which need fewer entries of the TLB in huge pages. NumPy requests huge
pages for arrays of 4 MiB or more. Smaller arrays share slabs here.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from typing import Any

import numpy as np

ALIGNMENT = 64  # bytes; XLA:CPU adopts a host buffer with this alignment instead of copying it
OWN_BYTES = 4 << 20  # arrays from this size get their own memory from NumPy

_SLAB_BYTES = 32 << 20
_HUGE_PAGE_BYTES = 2 << 20


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an uninitialized array that XLA:CPU can adopt without a copy."""
    dtype = np.dtype(dtype)
    return _own(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def empty_weight(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return memory like `aligned_empty` for an array that lives as long as the model. Thread-safe.

    A small array shares a slab, whose memory is freed with the last of its arrays.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size >= OWN_BYTES:
        return aligned_empty(shape, dtype)
    return _slabs.take(size).view(dtype).reshape(shape)


def _own(size: int) -> np.ndarray:
    return _aligned(np.empty(size + ALIGNMENT, np.uint8), ALIGNMENT)[:size]


def _aligned(raw: np.ndarray, alignment: int) -> np.ndarray:
    return raw[-raw.ctypes.data % alignment :]


class _Slabs:
    """Hands out parts of the current slab in order. It keeps no other slab."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = np.empty(0, np.uint8)  # the current slab's unused part

    def take(self, size: int) -> np.ndarray:
        with self._lock:
            if size > len(self._rest):
                self._rest = _new_slab()
            taken = self._rest[:size]
            self._rest = self._rest[-(-size // ALIGNMENT) * ALIGNMENT :]
        return taken


def _new_slab() -> np.ndarray:
    """Return unused memory. Its pages are taken on first use."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return _own(_SLAB_BYTES)
    size = _SLAB_BYTES + _HUGE_PAGE_BYTES  # to start at a huge page
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return _aligned(np.frombuffer(memory, np.uint8), _HUGE_PAGE_BYTES)


_slabs = _Slabs()
