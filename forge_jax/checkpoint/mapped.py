"""Arrays of a converted folder mapped from the page cache, without a copy in memory.

On a virtual machine, memory that has been idle may have to come from the host first, at a tenth of
the disk's speed. The page cache is already present. It is used only if the kernel maps it with huge
pages, because small pages would slow down reading the matrices in every step.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from forge_jax.weights.stored import StoredTensor, shorter
from forge_kernels.threads import for_each

HUGE_PAGE = 2 * 2**20
LEAST_SHARE = 0.9  # share of the bytes that must be in huge pages
_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14
_SMAPS = Path("/proc/self/smaps")
_RANGE = re.compile(rb"([0-9a-f]+)-[0-9a-f]+ ")


def map_arrays(stored: Mapping[str, StoredTensor]) -> dict[str, np.ndarray]:
    """Return read-only views of the arrays of at least one huge page: all of them or none.

    Data that is not in the page cache is read by several threads. Truncating a file while a view of
    it exists ends the process (SIGBUS).

    Raises:
      CheckpointError: a file is shorter than its array.
    """
    large = [name for name, tensor in stored.items() if _num_bytes(tensor) >= HUGE_PAGE]
    if not _SMAPS.exists():  # not Linux
        return {}
    views = {name: _view(stored[name]) for name in large}
    failed: list[bool] = []

    def populate(view: np.ndarray) -> None:
        _advise(view, mmap.MADV_HUGEPAGE)  # applies to the mapping; the kernel may refuse
        if not _advise(view, _POPULATE_READ):
            failed.append(True)

    for_each(populate, list(views.values()))
    total = sum(view.nbytes for view in views.values())
    if failed or huge_bytes(views.values()) < LEAST_SHARE * total:
        return {}
    return views


def huge_bytes(views: Collection[np.ndarray]) -> int:
    """Return how many bytes of the views are mapped in huge pages."""
    starts = {view.ctypes.data for view in views}
    found, is_ours = 0, False
    for line in _SMAPS.read_bytes().splitlines():
        begin = _RANGE.match(line)
        if begin is not None:
            is_ours = int(begin[1], 16) in starts
        elif is_ours and line.startswith((b"FilePmdMapped:", b"ShmemPmdMapped:")):
            found += int(line.split()[1]) * 1024
    return found


def _view(tensor: StoredTensor) -> np.ndarray:
    try:
        return tensor.read().view(np.ndarray)
    except ValueError as error:  # NumPy raises it if the file is too short
        raise shorter(tensor.file) from error


def _num_bytes(tensor: StoredTensor) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * tensor.dtype.itemsize


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _advise(view: np.ndarray, advice: int) -> bool:
    """Call madvise without holding the GIL, unlike `mmap.madvise`."""
    address, size = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.nbytes)
    return _libc().madvise(address, size, ctypes.c_int(advice)) == 0
