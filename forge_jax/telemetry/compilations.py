"""A process-wide count of XLA compilations, taken from JAX's monitoring events.

JAX reports an event in the thread that compiles.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_READ = "/jax/compilation_cache/cache_hits"
_lock = threading.Lock()
_count = 0
_num_expected = 0  # compilations under `expected`, included in `_count`
_here = threading.local()  # the `Compilations` of this thread's `expected`, while it is in one
_listening = False


@dataclass
class Compilations:
    """Compilations of a thread.

    Attributes:
      count: all of them, including reads of JAX's persistent cache.
      reads: those reads.
    """

    count: int = 0
    reads: int = 0


def _on_duration(event: str, duration_secs: float, **_: object) -> None:
    global _count, _num_expected
    if event == _EVENT:
        with _lock:
            _count += 1
            here = getattr(_here, "expected", None)
            if here is not None:
                _num_expected += 1
                here.count += 1


def _on_event(event: str, **_: object) -> None:
    here = getattr(_here, "expected", None)
    if event == _CACHE_READ and here is not None:
        here.reads += 1


def total() -> int:
    """Return the compilations, including persistent cache reads, since this was first called."""
    global _listening
    with _lock:
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_on_duration)
            jax.monitoring.register_event_listener(_on_event)
            _listening = True
        return _count


@contextlib.contextmanager
def expected() -> Iterator[Compilations]:
    """Exclude this thread's compilations in the body from `SinceReady`, and yield their count."""
    total()  # listens
    _here.expected = Compilations()
    try:
        yield _here.expected
    finally:
        _here.expected = None


def _unexpected() -> int:
    return total() - _num_expected


class SinceReady:
    """The number of unexpected compilations since an engine became ready.

    It should stay 0. Compilations under `expected` do not count.
    """

    def __init__(self) -> None:
        self._at_ready: int | None = None
        total()

    def ready(self) -> None:
        """Start to count. Later calls have no effect."""
        if self._at_ready is None:
            self._at_ready = _unexpected()

    def __call__(self) -> int:
        return 0 if self._at_ready is None else _unexpected() - self._at_ready
