"""Counts XLA compilations, process-wide, from JAX's own monitoring events."""

from __future__ import annotations

import threading

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_lock = threading.Lock()
_count = 0
_listening = False


def _on_duration(event: str, duration_secs: float, **_: object) -> None:
    global _count
    if event == _EVENT:
        with _lock:
            _count += 1


def total() -> int:
    """Compilations (or reads of the persistent cache) since the first call of this function."""
    global _listening
    with _lock:
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_on_duration)
            _listening = True
        return _count


class SinceReady:
    """Compilations since an engine was ready: 0 until then, and ever after if all is well."""

    def __init__(self) -> None:
        self._at_ready: int | None = None
        total()

    def ready(self) -> None:
        """Counts from now on, or from an earlier call."""
        if self._at_ready is None:
            self._at_ready = total()

    def __call__(self) -> int:
        return 0 if self._at_ready is None else total() - self._at_ready
