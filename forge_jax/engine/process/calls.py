"""`Calls`: requests to the engine process that wait for an answer.

No call outlives its process: `end` fails all that wait. Everything runs on the event loop, except
`install`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge_jax.engine.adapters import LoadedAdapter, Run
from forge_jax.engine.lifecycle import Lifecycle
from forge_jax.engine.process.messages import (
    LoadLora,
    Look,
    Looked,
    LoraLoaded,
    Profile,
    Profiled,
    ToEngine,
    WireError,
)
from forge_jax.errors import EngineError, ForgeError, OverloadedError
from forge_jax.schedule.request import LoraRef
from forge_jax.telemetry.engine_state import EngineState


class Calls:
    """The calls in progress, each waiting for its answer.

    Args:
      send: sends a message; False if no process is connected.
    """

    def __init__(self, lifecycle: Lifecycle, send: Callable[[ToEngine], bool]):
        self._lifecycle = lifecycle
        self._send = send
        self._loop: asyncio.AbstractEventLoop | None = None
        # Answers to looks and profiles arrive in the order of the calls.
        self._looks: deque[asyncio.Future[EngineState]] = deque()
        self._profiles: deque[asyncio.Future[None]] = deque()
        self._loads: dict[str, asyncio.Future[LoadedAdapter]] = {}  # by the adapter's identity

    def attach_loop(self) -> None:
        """Use the running event loop for `install`."""
        self._loop = asyncio.get_running_loop()

    @property
    def profiling(self) -> bool:
        """True while the process starts or writes a profile."""
        return bool(self._profiles)

    async def look(self) -> EngineState:
        """Return the engine's state. Raise EngineError if there is no process, or it ends."""
        future: asyncio.Future[EngineState] = asyncio.get_running_loop().create_future()
        self._ask(Look(), self._looks, future)
        return await future

    async def profile(self, folder: Path | None) -> None:
        """Start a profile, to be written into a folder. None ends it.

        Raises:
          RequestError: if the process could not.
          EngineError: if there is no process, or it has ended.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        path = None if folder is None else str(folder.absolute())
        self._ask(Profile(path), self._profiles, future)
        await future

    def install(self, ref: LoraRef, path: str, _: Run) -> LoadedAdapter:
        """Load an adapter in the process, and wait for it. Do not call it on the event loop.

        Raises:
          EngineError: if the engine has ended.
          OverloadedError: if there is no process, or it died meanwhile.
          RequestError: if the adapter does not fit the model.
        """
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._load(ref, path), self._loop).result()

    def answer(self, message: Looked | Profiled | LoraLoaded) -> None:
        """Deliver an answer to its call, unless that has been cancelled."""
        match message:
            case Looked(state, error):
                if self._looks:
                    _settle(self._looks.popleft(), state, error)
            case Profiled(error):
                if self._profiles:
                    _settle(self._profiles.popleft(), None, error)
            case LoraLoaded(identity, adapter, error):
                if identity in self._loads:
                    _settle(self._loads.pop(identity), adapter, error)

    def end(self, load_error: ForgeError) -> None:
        """Fail all calls, because their process has ended.

        Args:
          load_error: error for adapters that are being loaded.
        """
        for futures in (self._looks, self._profiles):
            while futures:
                _fail(futures.popleft(), EngineError("the engine process has ended"))
        while self._loads:
            _fail(self._loads.popitem()[1], load_error)

    def _ask[T](
        self, question: ToEngine, futures: deque[asyncio.Future[T]], future: asyncio.Future[T]
    ) -> None:
        if self._lifecycle.ended or not self._send(question):
            raise EngineError("no engine process is running")
        futures.append(future)

    async def _load(self, ref: LoraRef, path: str) -> LoadedAdapter:
        if self._lifecycle.ended:
            raise EngineError(f"the engine cannot load adapters: it is {self._lifecycle.state}")
        future: asyncio.Future[LoadedAdapter] = asyncio.get_running_loop().create_future()
        if not self._send(LoadLora(ref, path)):
            raise OverloadedError("the engine is restarting: try again later")
        self._loads[ref.identity] = future
        return await future


def _settle[T](future: asyncio.Future[T], result: T | None, error: WireError | None) -> None:
    if future.done():  # the caller has been cancelled
        return
    if error is not None:
        future.set_exception(error.error())
    else:
        future.set_result(result)  # type: ignore[arg-type]  # set if there is no error


def _fail(future: asyncio.Future[Any], error: ForgeError) -> None:
    if not future.done():
        future.set_exception(error)
