"""How much memory there is to use: of the host (cgroup-aware) and of a device."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import jax

_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes() -> int:
    """Memory that can still be taken without swapping, within the container's limit."""
    return host_bytes()[0]


def host_bytes() -> tuple[int, int]:
    """(available, total) memory, within the container's limit."""
    memory = psutil.virtual_memory()
    available, total = memory.available, memory.total
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = int((_CGROUP / "memory.current").read_text())
            available = min(available, int(limit) - used)
            total = min(total, int(limit))
    except (OSError, ValueError):
        pass  # no cgroup v2: the host's own figure stands
    return max(available, 0), total


def device_bytes(device: jax.Device) -> tuple[int, int] | None:
    """(limit, in use) of an accelerator; None where the device does not tell, as the CPU."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"], stats.get("bytes_in_use", 0)


def give_back_freed_memory() -> None:
    """Returns to the system what has been freed: a start leaves hundreds of megabytes behind.

    glibc keeps freed memory for the next allocation; other C libraries have no such function.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
