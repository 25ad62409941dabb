"""`Backoff`: how long the supervisor waits before it launches an engine process.

A process that dies after it has computed something is replaced at once. One that dies before, over
and over, would otherwise keep the machine busy with nothing but launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_S = 0.2
LONGEST_S = 5.0
EARLY_S = 60.0  # an idle process that dies later had served


class Backoff:
    """Counts the processes that failed one after the other, and doubles the pause with each.

    A process fails if it dies before it says hello, or within `EARLY_S` of that without having put
    out a token. Any other process resets the count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._failures = 0
        self.begin()

    def begin(self) -> None:
        """A process serves from now on."""
        self._begun_s = self._clock()
        self._useful = False

    def progress(self) -> None:
        """It has put out tokens."""
        self._useful = True

    def died(self) -> None:
        """A process that served has died."""
        if self._useful or self._clock() - self._begun_s >= EARLY_S:
            self._failures = 0
        else:
            self._failures += 1

    def launch_failed(self) -> None:
        """A process could not be started, or died before it served."""
        self._failures += 1

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next launch: 0 unless the last process failed."""
        if not self._failures:
            return 0.0
        return min(FIRST_S * 2.0 ** min(self._failures - 1, 10), LONGEST_S)
