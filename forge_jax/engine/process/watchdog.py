"""`Watchdog`: decides when an engine process counts as frozen.

Two things can hang. A process that is stopped, or whose interpreter is held, sends no heartbeat. A
process whose device does not answer goes on sending them, and reports that its step has not come
back. Both are counted here, in seconds during which this process itself ran: after the host was
suspended, the time that nobody ran is no evidence against the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.25  # between two looks
LOOKED_S = 2 * LOOK_S  # that one look counts at most, however long ago the last one was
STALL_S = 1.0  # a step that takes less is none: it may have been another one a heartbeat before
MAX_PATIENCE = 8


class Watchdog:
    """Watches one process after the other; `look` is called every `LOOK_S`.

    After a replacement because of a step, the next step may take twice as long, up to
    `MAX_PATIENCE` times the timeout, until there are tokens. So a step that is merely slow gets
    through.

    Args:
      timeout_s: seconds without a heartbeat, or without a completed step while there is work; 0:
        nothing is ever frozen.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic):
        self.timeout_s = timeout_s
        self._clock = clock
        self._patience = 1
        self.begin()

    def begin(self) -> None:
        """Watch another process from now on."""
        self._silent_s = 0.0  # since the last message
        self._stalled_s = 0.0  # since the last completed step
        self._reported_s = 0.0  # the process's own figure of the latter
        self._looked_s = self._clock()

    def beat(self, stalled_s: float = 0.0) -> None:
        """Take a heartbeat, and for how long the process says that no step has come back."""
        self._silent_s = 0.0
        if stalled_s < STALL_S or stalled_s < self._reported_s:
            self._stalled_s = 0.0
        self._reported_s = stalled_s

    def progress(self) -> None:
        """Take tokens: a step has come back."""
        self.beat()
        self._patience = 1

    def look(self, allowance: float = 1.0) -> str | None:
        """Return why the process counts as frozen; None if it does not.

        Args:
          allowance: by how much the timeout is multiplied now.
        """
        now_s = self._clock()
        elapsed_s = min(now_s - self._looked_s, LOOKED_S)
        self._looked_s = now_s
        self._silent_s += elapsed_s
        if self._reported_s >= STALL_S:
            self._stalled_s += elapsed_s
        limit_s = self.timeout_s * allowance
        if limit_s <= 0.0:
            return None
        if self._silent_s > limit_s:
            return f"has sent nothing for {self._silent_s:.0f} s"
        if self._stalled_s > limit_s * self._patience:
            self._patience = min(2 * self._patience, MAX_PATIENCE)
            return f"has completed no step for {self._stalled_s:.0f} s"
        return None
