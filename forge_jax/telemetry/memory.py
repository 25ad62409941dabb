"""The available memory of the host (cgroup-aware) and of a device."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import jax

_CGROUP = Path("/sys/fs/cgroup")

# The environment variables of JAX's GPU allocator, and its default, as fractions of a device.
_ALLOCATOR_FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_DEFAULT_FRACTION = 0.75

# XLA's limit on pinned host memory in GiB, and its default.
_PINNED_LIMIT, _PINNED_DEFAULT_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64

# Part of a GPU's published memory that its allocator can give out; the driver keeps the rest.
_USABLE = 0.96

_described: contextvars.ContextVar[int | None] = contextvars.ContextVar("described", default=None)


_sharers = 1  # processes among which the available memory of the host is divided


def share_host_memory(processes: int) -> None:
    """Leave room in `available_host_bytes` for other processes that are going to load as much."""
    global _sharers
    _sharers = processes


def available_host_bytes() -> int:
    """Return the bytes that can be allocated without swapping, within the container's limit."""
    return host_bytes()[0] // _sharers


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


def reserve_device_memory(fraction: float) -> None:
    """Let JAX's GPU allocator use this fraction of a device, unless the environment sets another.

    It has no effect after JAX has started its GPU backend. CUDA graphs, NCCL's buffers and other
    processes use the rest of the memory.
    """
    if not any(os.environ.get(name) for name in _ALLOCATOR_FRACTION):
        os.environ[_ALLOCATOR_FRACTION[0]] = str(fraction)


def reserve_pinned_memory(gib: float) -> None:
    """Let XLA pin `gib` GiB of host memory for this project, unless the environment sets a limit.

    XLA's limit is 64 GiB, of which it uses a part itself. It takes the memory when it needs it. The
    function has no effect after JAX has started its GPU backend.
    """
    if gib:
        os.environ.setdefault(_PINNED_LIMIT, str(int(gib) + _PINNED_DEFAULT_GIB))


def share_of_device(limit: int, fraction: float) -> int:
    """Return the bytes that are this fraction of a GPU's memory, at most the allocator's limit.

    Args:
      limit: the allocator's limit in bytes, itself a fraction of the device.
      fraction: share of the device's memory.
    """
    return min(limit, int(limit / _allocator_fraction() * fraction))


def _allocator_fraction() -> float:
    found = [os.environ.get(name) for name in _ALLOCATOR_FRACTION]
    return next((float(text) for text in found if text), _DEFAULT_FRACTION)


@contextlib.contextmanager
def described_memory(num_bytes: int) -> Iterator[None]:
    """Use the size of a GPU that this process does not have, as `device_bytes` returns it."""
    token = _described.set(int(num_bytes * _USABLE))
    try:
        yield
    finally:
        _described.reset(token)


def device_bytes(device: jax.Device) -> tuple[int, int] | None:
    """Return an accelerator's memory limit and used memory in bytes.

    The result is None if the device has no memory statistics, as on CPU.
    """
    described = _described.get()
    if described is not None:
        return int(described * _allocator_fraction()), 0
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
