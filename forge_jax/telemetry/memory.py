"""The available memory of the host (cgroup-aware) and of a device."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import jax

_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes() -> int:
    """Return the bytes that can be allocated without swapping, within the container's limit."""
    return host_bytes()[0]


def host_bytes() -> tuple[int, int]:
    """Return the available and total memory in bytes, within the container's limit."""
    memory = psutil.virtual_memory()
    available, total = memory.available, memory.total
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = int((_CGROUP / "memory.current").read_text())
            available = min(available, int(limit) - used)
            total = min(total, int(limit))
    except (OSError, ValueError):
        pass  # Without cgroup v2, only the host's values apply.
    return max(available, 0), total


def device_bytes(device: jax.Device) -> tuple[int, int] | None:
    """Return an accelerator's memory limit and used memory in bytes.

    The result is None if the device has no memory statistics, as on CPU.
    """
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"], stats.get("bytes_in_use", 0)


def give_back_freed_memory() -> None:
    """Return freed memory to the operating system; a start frees hundreds of megabytes.

    glibc keeps freed memory for later allocations. Other C libraries lack `malloc_trim`.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
