"""Arrays of a converted folder where the page cache has them, without a copy in memory.

On a virtual machine memory that nobody has used for a while may have to come from the host first,
at a tenth of the disk's speed. The page cache is there already. It is used only where the system
maps its huge pages: through small ones, the matrices are read more slowly in every step.
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
LEAST_SHARE = 0.9  # of the bytes, that must be in huge pages
_POPULATE_READ = 22  # MADV_POPULATE_READ, of Linux 5.14
_SMAPS = Path("/proc/self/smaps")
_RANGE = re.compile(rb"([0-9a-f]+)-[0-9a-f]+ ")


def map_arrays(stored: Mapping[str, StoredTensor]) -> dict[str, np.ndarray]:
    """Read-only views of the files of the arrays that fill a huge page; of all of them, or of none.

    What is not in the page cache is read, by several threads. As long as a view lives, a file that
    is cut off ends the process (SIGBUS).

    Raises:
      CheckpointError: a file is shorter than its array.
    """
    large = [name for name, tensor in stored.items() if _num_bytes(tensor) >= HUGE_PAGE]
    if not _SMAPS.exists():  # not Linux
        return {}
    views = {name: _view(stored[name]) for name in large}
    failed: list[bool] = []

    def populate(view: np.ndarray) -> None:
        _advise(view, mmap.MADV_HUGEPAGE)  # of the mapping; it may be refused
        if not _advise(view, _POPULATE_READ):
            failed.append(True)

    for_each(populate, list(views.values()))
    total = sum(view.nbytes for view in views.values())
    if failed or huge_bytes(views.values()) < LEAST_SHARE * total:
        return {}
    return views


def huge_bytes(views: Collection[np.ndarray]) -> int:
    """How much of them is mapped in huge pages."""
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
    except ValueError as error:  # numpy's, of a file that is too short
        raise shorter(tensor.file) from error


def _num_bytes(tensor: StoredTensor) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * tensor.dtype.itemsize


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _advise(view: np.ndarray, advice: int) -> bool:
    """Unlike `mmap.madvise`, without Python's lock."""
    address, size = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.nbytes)
    return _libc().madvise(address, size, ctypes.c_int(advice)) == 0
