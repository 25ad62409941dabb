"""Profiles of a running server: one at a time, each in a folder of its own, none without end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from forge_jax.errors import ForgeError, RequestError
from forge_serve.errors import ProfilesOffError

if TYPE_CHECKING:
    from forge_jax.streams import StreamingEngine

LONGEST_S = 120.0  # a trace that nobody ends grows in memory

log = logging.getLogger(__name__)


class Profiles:
    """Takes profiles of an engine into `folder`; without one it refuses to."""

    def __init__(self, folder: str | None, *, longest_s: float = LONGEST_S):
        self._folder = None if folder is None else Path(folder)
        self._longest_s = longest_s
        self._name: str | None = None  # of the one that is being taken
        self._end: asyncio.Task[None] | None = None  # of one that nobody ends
        self._lock = asyncio.Lock()

    async def start(self, engine: StreamingEngine) -> str:
        """Begins one: its name.

        Raises:
          ProfilesOffError: there is no folder for them.
          RequestError: one is being taken, or the folder cannot be written to.
        """
        folder = self._checked_folder()
        async with self._lock:
            if self._name is not None:
                raise RequestError("a profile is being taken: POST /stop_profile ends it")
            name = f"{datetime.now(UTC):%Y-%m-%d-%H%M%S-%f}"
            await engine.start_profile(folder / name)
            self._name = name
            self._end = asyncio.get_running_loop().create_task(self._stop_later(engine))
        return name

    async def stop(self, engine: StreamingEngine) -> str:
        """Ends it and waits until it is written: its name.

        Raises:
          ProfilesOffError: there is no folder for them.
          RequestError: none is being taken, or it could not be written.
        """
        self._checked_folder()
        async with self._lock:
            if self._name is None:
                raise RequestError("no profile is being taken: POST /start_profile begins one")
            name, self._name = self._name, None
            if self._end is not None:
                self._end.cancel()
            await engine.stop_profile()
        return name

    async def _stop_later(self, engine: StreamingEngine) -> None:
        await asyncio.sleep(self._longest_s)
        async with self._lock:
            name, self._name, self._end = self._name, None, None
            log.warning("the profile %s is ended after %.0f s", name, self._longest_s)
            with contextlib.suppress(ForgeError):
                await engine.stop_profile()

    def _checked_folder(self) -> Path:
        if self._folder is None:
            raise ProfilesOffError("this server takes no profiles: it has no --profile-dir")
        return self._folder
