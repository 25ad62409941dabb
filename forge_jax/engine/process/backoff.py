"""`Backoff`: the pause before the supervisor launches an engine process.

A process that dies after it has produced output is replaced at once. If a process keeps dying
early, launches without a pause would keep the machine busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_S = 0.2
LONGEST_S = 5.0
LONGEST_UNAVAILABLE_S = 60.0  # while no request waits for the process
EARLY_S = 60.0  # an idle process that dies later counts as useful


class Backoff:
    """A count of consecutive failed processes, each of which doubles the pause.

    A process fails if it dies before `Hello`, or within `EARLY_S` after it without any output. Any
    other process resets the count.

    Attributes:
      longest_s: maximum pause. `begin` resets it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._failures = 0
        self.longest_s = LONGEST_S
        self.begin()

    def begin(self) -> None:
        """Record that a process serves from now on."""
        self._begun_s = self._clock()
        self._useful = False
        self.longest_s = LONGEST_S

    def progress(self) -> None:
        self._useful = True

    def died(self) -> None:
        if self._useful or self._clock() - self._begun_s >= EARLY_S:
            self._failures = 0
        else:
            self._failures += 1

    def launch_failed(self) -> None:
        """Record that a process could not be started, or died before it served."""
        self._failures += 1

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next launch: 0 unless the last process failed."""
        if not self._failures:
            return 0.0
        return min(FIRST_S * 2.0 ** min(self._failures - 1, 10), self.longest_s)
