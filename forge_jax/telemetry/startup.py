"""The durations of the phases of a start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StartupTimes:
    """The seconds that each phase took, and that it took to reach "serving" and "ready".

    Phases overlap (weights are read while executables compile), so they do not add up to "ready".
    Only one thread at a time may write. Any thread may read.

    Args:
      begin_s: the time of the start on `time.perf_counter`'s clock; default: now.
    """

    def __init__(self, begin_s: float | None = None):
        self._begin_s = time.perf_counter() if begin_s is None else begin_s
        self._seconds: dict[str, float] = {}

    @property
    def seconds(self) -> dict[str, float]:
        """A copy of the seconds by phase, in the order in which the phases ended."""
        return dict(self._seconds)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the body to the phase."""
        begin_s = time.perf_counter()
        yield
        self._add(name, time.perf_counter() - begin_s)

    def reached(self, name: str) -> None:
        """Record the seconds from the start until now."""
        self._seconds[name] = time.perf_counter() - self._begin_s

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
