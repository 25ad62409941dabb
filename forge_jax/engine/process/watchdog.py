"""`Watchdog`: decides when an engine process counts as frozen.

There are two cases. A process that is stopped, or whose interpreter is blocked, sends no heartbeat.
A process whose device hangs still sends heartbeats, which report that its step has not completed.
Both are measured in seconds during which this process itself ran. After the host was suspended, the
suspended time is therefore not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.25  # interval between calls of `look`
LOOKED_S = 2 * LOOK_S  # maximum time that one `look` counts
STALL_S = 1.0  # shorter times are no stall: the previous heartbeat may have reported another step
MAX_PATIENCE = 8


class Watchdog:
    """A watchdog for one process after the other. Call `look` every `LOOK_S`.

    If a process is replaced because of a step, the timeout of the next step doubles, up to
    `MAX_PATIENCE` times the original, until tokens arrive. A step that is merely slow therefore
    completes.

    Args:
      timeout_s: seconds without a heartbeat, or without a completed step while there is work, after
        which a process is frozen. 0 disables the watchdog.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic):
        self.timeout_s = timeout_s
        self._clock = clock
        self._patience = 1
        self.begin()

    def begin(self) -> None:
        """Start to watch another process."""
        self._silent_s = 0.0  # since the last message
        self._stalled_s = 0.0  # since the last completed step
        self._reported_s = 0.0  # `stalled_s` as last reported by the process
        self._looked_s = self._clock()

    def beat(self, stalled_s: float = 0.0) -> None:
        """Record a heartbeat, and the seconds for which the process reports no completed step."""
        self._silent_s = 0.0
        if stalled_s < STALL_S or stalled_s < self._reported_s:
            self._stalled_s = 0.0
        self._reported_s = stalled_s

    def progress(self) -> None:
        """Record that tokens arrived: a step has completed."""
        self.beat()
        self._patience = 1

    def look(self, allowance: float = 1.0) -> str | None:
        """Return why the process counts as frozen; None if it does not.

        Args:
          allowance: factor on the timeout.
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
