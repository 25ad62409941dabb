"""Multithreaded work on the host, such as reading and packing, that does not hold the GIL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from forge_kernels.cpu.library import num_threads


def for_each[T](work: Callable[[T], None], items: Sequence[T]) -> None:
    """Call `work` with each item, wait for all calls, and raise the first exception."""
    if len(items) < 2:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(min(len(items), num_threads())) as pool:
        for _ in pool.map(work, items):
            pass
