"""A process-wide count of XLA compilations, taken from JAX's monitoring events."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_lock = threading.Lock()
_count = 0
_num_expected = 0  # compilations under `expected`, included in `_count`
_here = threading.local()  # `expected` is True while this thread is in that context
_listening = False


def _on_duration(event: str, duration_secs: float, **_: object) -> None:
    global _count, _num_expected
    if event == _EVENT:
        with _lock:
            _count += 1
            _num_expected += getattr(_here, "expected", False)


def total() -> int:
    """Return the compilations, including persistent cache reads, since this was first called."""
    global _listening
    with _lock:
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_on_duration)
            _listening = True
        return _count


@contextlib.contextmanager
def expected() -> Iterator[None]:
    """Exclude this thread's compilations in the body from `SinceReady`."""
    _here.expected = True
    try:
        yield
    finally:
        _here.expected = False


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
