"""Protection against running out of host memory, before the system kills a process.

There are three thresholds on the fraction of memory in use. Above the first, the server rejects new
requests. Above the second, it returns freed memory to the system. Above the third, it aborts the
newest waiting requests.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable

from forge_jax.errors import OverloadedError
from forge_jax.telemetry.memory import give_back_freed_memory, host_bytes

CHECK_S = 1.0
GIVE_BACK_S = 10.0  # minimum time between two returns of memory
GIVE_BACK, SHED = 0.4, 0.7  # thresholds as fractions of the way from the watermark to 100%

log = logging.getLogger(__name__)


class MemoryGuard:
    """Monitor of the host's memory that runs on the event loop.

    Args:
      watermark: fraction of memory in use from which new requests are rejected; 1: never.
      shed: aborts one waiting request; returns False if there is none.
      in_use: returns the fraction of memory in use. Default: the host's, within the container's
        limit.
    """

    def __init__(
        self,
        watermark: float,
        shed: Callable[[], bool],
        in_use: Callable[[], float] | None = None,
    ):
        self.num_shed = 0
        self._watermark = watermark
        self._shed = shed
        self._in_use = in_use or host_memory_in_use
        self._short = False
        self._blind = False  # the last check raised
        self._gave_back_s = -GIVE_BACK_S

    async def watch(self) -> None:
        """Check periodically, without end. Only the first of consecutive failures is logged."""
        while self._watermark < 1.0:
            try:
                self.check()
                self._blind = False
            except Exception:
                if not self._blind:
                    log.exception("cannot read the host's memory usage")
                self._blind = True
            await asyncio.sleep(CHECK_S)

    def check(self) -> None:
        """Check once and apply the thresholds."""
        in_use, first = self._in_use(), self._watermark
        if self._short != (in_use >= first):
            self._short = not self._short
            if self._short:
                log.warning("%.0f%% of memory in use: rejecting requests", 100 * in_use)
            else:
                log.info("%.0f%% of memory in use: accepting requests again", 100 * in_use)
        if in_use >= first + GIVE_BACK * (1.0 - first):
            now_s = time.monotonic()
            if now_s - self._gave_back_s >= GIVE_BACK_S:
                self._gave_back_s = now_s
                gc.collect()
                give_back_freed_memory()
        if in_use >= first + SHED * (1.0 - first) and self._shed():
            self.num_shed += 1
            log.warning("aborted a waiting request to save memory")

    def admit(self) -> None:
        """Raise OverloadedError while memory is short."""
        if self._short:
            raise OverloadedError("the server is short of memory", retry_after_s=5.0)


def host_memory_in_use() -> float:
    """Return the fraction of the host's memory in use, within the container's limit."""
    available, total = host_bytes()
    return 1.0 - available / total
