"""Profiles of a running server: one at a time, of limited duration, each in its own folder."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_jax.errors import ForgeError, RequestError
from forge_jax.host import supervise
from forge_serve.errors import ProfilesOffError

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine

LONGEST_S = 120.0  # bounds the memory of a trace that is not stopped
MOST = 100  # entries of the folder; each profile has several megabytes

log = logging.getLogger(__name__)


class Profiles:
    """Profiler of an engine that writes to `folder`. Profiles are disabled if it is None.

    A call that has started completes even if its client disconnects.
    """

    def __init__(self, folder: str | None, *, longest_s: float = LONGEST_S, most: int = MOST):
        self._folder = None if folder is None else Path(folder)
        self._longest_s = longest_s
        self._most = most
        self._name: str | None = None  # name of the running profile
        self._timer: asyncio.Task[None] | None = None  # stops the running profile after a while
        self._lock = asyncio.Lock()

    async def start(self, engine: AsyncEngine) -> str:
        """Start a profile and return its name.

        Raises:
          ProfilesOffError: profiles are disabled.
          RequestError: a profile is running, or the folder is full or not writable.
        """
        return await self._to_the_end(self._start(engine, self._checked_folder()))

    async def stop(self, engine: AsyncEngine) -> str:
        """Stop the profile, wait until it is written, and return its name.

        Raises:
          ProfilesOffError: profiles are disabled.
          RequestError: no profile is running, or it could not be written.
        """
        self._checked_folder()
        return await self._to_the_end(self._stop(engine))

    async def close(self, engine: AsyncEngine) -> None:
        """Stop and write the running profile, if there is one."""
        if self._folder is not None:
            with contextlib.suppress(ForgeError):
                await self.stop(engine)

    async def _start(self, engine: AsyncEngine, folder: Path) -> str:
        async with self._lock:
            if self._name is not None:
                raise RequestError("a profile is already running: stop it with POST /stop_profile")
            if folder.is_dir() and len(list(folder.iterdir())) >= self._most:
                raise RequestError(
                    f"the folder already has {self._most} profiles: delete some of them first"
                )
            name = f"{datetime.now(UTC):%Y-%m-%d-%H%M%S-%f}"
            await engine.start_profile(folder / name)
            self._name = name
            self._timer = supervise.start_task(
                self._stop_later(engine), f"stopping the profile {name}", None
            )
        return name

    async def _stop(self, engine: AsyncEngine) -> str:
        async with self._lock:
            if self._name is None:
                raise RequestError("no profile is running: start one with POST /start_profile")
            name, self._name = self._name, None
            if self._timer is not None:
                self._timer.cancel()
            await engine.stop_profile()
        return name

    async def _stop_later(self, engine: AsyncEngine) -> None:
        await asyncio.sleep(self._longest_s)
        async with self._lock:
            name, self._name, self._timer = self._name, None, None
            log.warning("stopping the profile %s after %.0f s", name, self._longest_s)
            await engine.stop_profile()

    async def _to_the_end(self, work: Coroutine[Any, Any, str]) -> str:
        task = supervise.start_task(work, "a profile", None, expected=(ForgeError,))
        return await asyncio.shield(task)

    def _checked_folder(self) -> Path:
        if self._folder is None:
            raise ProfilesOffError("profiles are disabled: start the server with --profile-dir")
        return self._folder
