"""Profiles of a running server: one at a time, each in a folder of its own, none without end."""

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

LONGEST_S = 120.0  # a trace that nobody ends grows in memory
MOST = 100  # in the folder, whoever put them there: some megabytes each

log = logging.getLogger(__name__)


class Profiles:
    """Takes profiles of an engine into `folder`; without one it refuses to.

    What has been begun is brought to its end even if the client leaves meanwhile.
    """

    def __init__(self, folder: str | None, *, longest_s: float = LONGEST_S, most: int = MOST):
        self._folder = None if folder is None else Path(folder)
        self._longest_s = longest_s
        self._most = most
        self._name: str | None = None  # of the one that is being taken
        self._timer: asyncio.Task[None] | None = None  # ends one that nobody ends
        self._lock = asyncio.Lock()

    async def start(self, engine: AsyncEngine) -> str:
        """Begins one: its name.

        Raises:
          ProfilesOffError: there is no folder for them.
          RequestError: one is being taken, or the folder is full or cannot be written to.
        """
        return await self._to_the_end(self._start(engine, self._checked_folder()))

    async def stop(self, engine: AsyncEngine) -> str:
        """Ends it and waits until it is written: its name.

        Raises:
          ProfilesOffError: there is no folder for them.
          RequestError: none is being taken, or it could not be written.
        """
        self._checked_folder()
        return await self._to_the_end(self._stop(engine))

    async def close(self, engine: AsyncEngine) -> None:
        """Ends and writes the one that is being taken, if there is one."""
        if self._folder is not None:
            with contextlib.suppress(ForgeError):
                await self.stop(engine)

    async def _start(self, engine: AsyncEngine, folder: Path) -> str:
        async with self._lock:
            if self._name is not None:
                raise RequestError("a profile is being taken: POST /stop_profile ends it")
            if folder.is_dir() and len(list(folder.iterdir())) >= self._most:
                raise RequestError(f"there are {self._most} profiles: some must be deleted first")
            name = f"{datetime.now(UTC):%Y-%m-%d-%H%M%S-%f}"
            await engine.start_profile(folder / name)
            self._name = name
            self._timer = supervise.start_task(
                self._stop_later(engine), f"ending the profile {name}", None
            )
        return name

    async def _stop(self, engine: AsyncEngine) -> str:
        async with self._lock:
            if self._name is None:
                raise RequestError("no profile is being taken: POST /start_profile begins one")
            name, self._name = self._name, None
            if self._timer is not None:
                self._timer.cancel()
            await engine.stop_profile()
        return name

    async def _stop_later(self, engine: AsyncEngine) -> None:
        await asyncio.sleep(self._longest_s)
        async with self._lock:
            name, self._name, self._timer = self._name, None, None
            log.warning("the profile %s is ended after %.0f s", name, self._longest_s)
            await engine.stop_profile()

    async def _to_the_end(self, work: Coroutine[Any, Any, str]) -> str:
        task = supervise.start_task(work, "a profile", None, expected=(ForgeError,))
        return await asyncio.shield(task)

    def _checked_folder(self) -> Path:
        if self._folder is None:
            raise ProfilesOffError("this server takes no profiles: it has no --profile-dir")
        return self._folder
