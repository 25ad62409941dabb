"""Work on the host by several threads: reading and packing, which hold no lock of Python's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from forge_kernels.cpu.library import num_threads


def for_each[T](work: Callable[[T], None], items: Sequence[T]) -> None:
    """Calls `work` once with each item, and waits for all; the first exception is raised."""
    if len(items) < 2:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(min(len(items), num_threads())) as pool:
        for _ in pool.map(work, items):
            pass
