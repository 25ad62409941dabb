"""Requests that wait for a compilation before the engine thread can take them.

A request whose grammar is new waits for the grammar. The first requests that ask for pooled hidden
states wait for the executables. Both are compiled in threads, and other requests go on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from forge_jax.engine.commands import AdoptPooling, Command, Submit
from forge_jax.engine.streams import last_deltas, samples_of
from forge_jax.errors import EngineError, ForgeError
from forge_jax.host import supervise
from forge_jax.schedule.request import FinishReason, Request

if TYPE_CHECKING:
    from forge_jax.engine.core import EngineParts, Outputs, Pooler

type CompileSoon = Callable[[], Awaitable[object]]


class Preparation:
    """Compiles on the event loop's behalf, then sends requests to the engine thread.

    Args:
      send: takes commands to the engine thread; thread-safe.
      deliver: takes the last deltas of requests that end here.
    """

    def __init__(
        self,
        parts: EngineParts,
        send: Callable[[Command], None],
        deliver: Callable[[Iterable[Outputs]], None],
    ):
        self._parts = parts
        self._send = send
        self._deliver = deliver
        self._waiting: dict[str, tuple[Request, asyncio.Task[None]]] = {}
        self._pooling: Future[None] | None = None  # until the pooling executables can run

    def __len__(self) -> int:
        """Return the number of requests that wait for a compilation."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Send a request to the engine thread, as soon as all that it needs is compiled."""
        compile_soon = self._missing(request)
        if compile_soon is None:
            self._send(Submit(request))
            return
        task = supervise.start_task(
            self._submit_later(request, compile_soon),
            f"queueing request {request.request_id}",
            partial(self._failed, request),
        )
        self._waiting[request.request_id] = request, task

    def abort(self, request_id: str) -> bool:
        """End a request that waits for a compilation. False if it does not wait here."""
        if request_id not in self._waiting:
            return False
        request, task = self._waiting.pop(request_id)
        task.cancel()
        self._end(request, "abort")
        return True

    def _missing(self, request: Request) -> CompileSoon | None:
        """Return what compiles the missing part of a request; None if nothing is missing."""
        spec, grammars = request.params.structured_outputs, self._parts.core.grammars
        if spec is not None and grammars is not None and grammars.kept(spec) is None:
            return partial(grammars.compile_soon, spec)
        pooler = self._parts.pooler
        if request.pooling is not None and pooler is not None and not pooler.can_pool:
            return partial(self._compile_pooling_soon, pooler)
        return None

    async def _submit_later(self, request: Request, compile_soon: CompileSoon) -> None:
        try:
            await compile_soon()
        except ForgeError as error:
            self._end(request, "error", error)
        else:
            self._send(Submit(request))
        del self._waiting[request.request_id]

    def _failed(self, request: Request, _: BaseException) -> None:
        self._waiting.pop(request.request_id, None)
        self._end(request, "error", EngineError("what the request needs could not be compiled"))

    def _end(self, request: Request, reason: FinishReason, error: ForgeError | None = None) -> None:
        self._deliver([{request.request_id: last_deltas(samples_of(request), reason, error)}])

    async def _compile_pooling_soon(self, pooler: Pooler) -> None:
        """Wait until the pooling executables are compiled and the engine thread will adopt them."""
        if self._pooling is None or (self._pooling.done() and self._pooling.exception()):
            thread = ThreadPoolExecutor(1, thread_name_prefix="forge-pooling")
            self._pooling = thread.submit(self._compile_pooling, pooler)
            thread.shutdown(wait=False)
            # The requests that wait for it may have been aborted by its end.
            supervise.watch(self._pooling, "compiling what pools", expected=(ForgeError,))
        await asyncio.shield(asyncio.wrap_future(self._pooling))

    def _compile_pooling(self, pooler: Pooler) -> None:
        pooler.compile_pooling()
        self._send(AdoptPooling(pooler))
