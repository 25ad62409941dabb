"""What the server does when the host runs out of memory, before the system kills something.

Three marks, each a part of the memory in use: from the first on new requests are refused, from the
second on freed memory is given back, from the third on the newest of those that wait are given up.
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
GIVE_BACK_S = 10.0  # between two times
GIVE_BACK, SHED = 0.4, 0.7  # of the way from the first mark to none left

log = logging.getLogger(__name__)


class MemoryGuard:
    """Watches the host's memory from the event loop.

    Args:
      watermark: part of the memory from which on new requests are refused; 1: never.
      shed: gives up one request that waits; False if there is none.
      in_use: part of the memory, by default the host's within the container's limit.
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
        """Checks for ever. A check that raises is logged, once until one succeeds."""
        while self._watermark < 1.0:
            try:
                self.check()
                self._blind = False
            except Exception:
                if not self._blind:
                    log.exception("the host's memory cannot be watched")
                self._blind = True
            await asyncio.sleep(CHECK_S)

    def check(self) -> None:
        """Looks once, and does what has to be done."""
        in_use, first = self._in_use(), self._watermark
        if self._short != (in_use >= first):
            self._short = not self._short
            if self._short:
                log.warning("%.0f%% of the memory is in use: requests are refused", 100 * in_use)
            else:
                log.info("%.0f%% of the memory is in use: requests are taken again", 100 * in_use)
        if in_use >= first + GIVE_BACK * (1.0 - first):
            now_s = time.monotonic()
            if now_s - self._gave_back_s >= GIVE_BACK_S:
                self._gave_back_s = now_s
                gc.collect()
                give_back_freed_memory()
        if in_use >= first + SHED * (1.0 - first) and self._shed():
            self.num_shed += 1
            log.warning("a waiting request was given up to save memory")

    def admit(self) -> None:
        """Raises OverloadedError while memory is short."""
        if self._short:
            raise OverloadedError("the server is short of memory", retry_after_s=5.0)


def host_memory_in_use() -> float:
    """Part of the host's memory that is in use, within the container's limit."""
    available, total = host_bytes()
    return 1.0 - available / total
