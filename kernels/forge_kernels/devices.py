"""The GPU that kernels are compiled for, and how a process describes one that it does not have."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax

OLDEST = (8, 0)  # compute capability that the kernels need
# Bytes of shared memory per multiprocessor, from NVIDIA's CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability". A block can use all but 1 KiB.
SHARED_KIB = {(8, 0): 164, (8, 7): 164, (9, 0): 228, (10, 0): 228, (10, 3): 228, (11, 0): 228}
LEAST_SHARED_KIB = 100


class Gpu(NamedTuple):
    capability: tuple[int, int]
    cores: int  # multiprocessors

    @property
    def has_wgmma(self) -> bool:
        """True if it has Hopper's tensor cores, which no other GPU has."""
        return self.capability[0] == 9

    @property
    def has_fp8(self) -> bool:
        """True if its tensor cores multiply FP8."""
        return self.capability >= (8, 9)

    @property
    def copies_to_barriers(self) -> bool:
        """True if barriers can wait for copies to shared memory."""
        return self.capability[0] >= 9

    @property
    def shared_bytes(self) -> int:
        """Shared memory per multiprocessor."""
        return 1024 * SHARED_KIB.get(self.capability, LEAST_SHARED_KIB)


HOPPER = Gpu((9, 0), 132)  # an H100 or H200 (SXM)

_described: contextvars.ContextVar[Gpu | None] = contextvars.ContextVar("described", default=None)


@contextlib.contextmanager
def described(device: Gpu) -> Iterator[None]:
    """Compile what is traced in this context for `device`."""
    token = _described.set(device)
    try:
        yield
    finally:
        _described.reset(token)


def current_gpu() -> Gpu | None:
    """Return the GPU of `described` or of this process, or None without one that has kernels."""
    device = _described.get() or _first_gpu()
    return device if device is not None and device.capability >= OLDEST else None


@functools.cache
def _first_gpu() -> Gpu | None:
    device = jax.devices()[0]
    if device.platform != "gpu" or not hasattr(device, "compute_capability"):
        return None
    major, _, minor = device.compute_capability.partition(".")
    if not (major.isdigit() and minor.isdigit()):  # another vendor's GPU
        return None
    return Gpu((int(major), int(minor)), device.core_count)
