"""Requests that wait for a compilation before they can run.

A request with a new grammar waits for the grammar. The first requests with `pooling` wait for the
pooling executables. Both are compiled in other threads, while other requests continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from forge_jax.engine.commands import ActivatePooling, Command, Submit
from forge_jax.engine.streams import last_deltas, samples_of
from forge_jax.errors import EngineError, ForgeError
from forge_jax.host import supervise
from forge_jax.schedule.request import FinishReason, Request

if TYPE_CHECKING:
    from forge_jax.engine.core import Outputs
    from forge_jax.engine.parts import EngineParts, Pooler

type CompileSoon = Callable[[], Awaitable[object]]


class Preparation:
    """The stage before the engine thread: compiles what a request needs, then sends it on.

    Args:
      send: sends commands to the engine thread; thread-safe.
      deliver: receives the last deltas of requests that end here.
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
        self._pooling: Future[None] | None = None  # done once the pooling executables can run

    def __len__(self) -> int:
        """Return the number of requests that wait for a compilation."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Send a request to the engine thread as soon as everything it needs is compiled."""
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
        """Return a function that compiles what the request lacks; None if nothing is missing."""
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
        self._end(
            request, "error", EngineError("its grammar or pooling steps could not be compiled")
        )

    def _end(self, request: Request, reason: FinishReason, error: ForgeError | None = None) -> None:
        self._deliver([{request.request_id: last_deltas(samples_of(request), reason, error)}])

    async def _compile_pooling_soon(self, pooler: Pooler) -> None:
        """Wait until the pooling executables are compiled and the engine thread activates them."""
        if self._pooling is None or (self._pooling.done() and self._pooling.exception()):
            thread = ThreadPoolExecutor(1, thread_name_prefix="forge-pooling")
            self._pooling = thread.submit(self._compile_pooling, pooler)
            thread.shutdown(wait=False)
            # The requests that wait for it may have been aborted before it ends.
            supervise.watch(self._pooling, "compiling pooling steps", expected=(ForgeError,))
        await asyncio.shield(asyncio.wrap_future(self._pooling))

    def _compile_pooling(self, pooler: Pooler) -> None:
        pooler.compile_pooling()
        self._send(ActivatePooling(pooler))
