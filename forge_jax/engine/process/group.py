"""`EngineGroup`: several engine processes with the interface of one engine.

Each process has its own copy of the model, its own KV cache and its own supervisor. A crash pauses
only the streams of one engine. If its process cannot be restarted, the other engines continue them.
The group checks requests, holds the queue limits and the streams, and sends each request to the
engine that `Router` chooses.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from forge_jax.config import EngineConfig
from forge_jax.engine.adapters import Adapters, LoadedAdapter, Run
from forge_jax.engine.async_engine import AsyncEngine, EngineStats
from forge_jax.engine.kv_events import Publisher
from forge_jax.engine.lifecycle import Lifecycle, State
from forge_jax.engine.process.client import EngineProcess
from forge_jax.engine.process.launcher import ChildProcess, launch
from forge_jax.engine.process.messages import Start
from forge_jax.engine.process.routing import Route, Router
from forge_jax.engine.process.totals import StateMerger, total_stats
from forge_jax.engine.streams import QueueLimits, Stream, last_deltas, samples_of
from forge_jax.errors import EngineError, ForgeError, OverloadedError, RequestError
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.request import LoraRef, Request
from forge_jax.telemetry.engine_state import EngineState
from forge_jax.telemetry.log import LogFormat

STALLED_S = 10.0  # without a completed step: other engines get the new requests
LOOK_S = 3.0  # maximum wait for the snapshot of one engine

log = logging.getLogger(__name__)


class GroupLifecycle(Lifecycle):
    """The state of a group: its own before `start` and from `stop` on, else that of its engines.

    It is "ready" if all engines are, and "serving" if any engine serves.
    """

    def __init__(self, members: Seq[Lifecycle]):
        super().__init__()
        self._members = members

    @property
    def state(self) -> State:
        if self._state != "serving":
            return self._state
        states = {member.state for member in self._members}
        if states == {"ready"}:
            return "ready"
        if states & {"serving", "ready"}:
            return "serving"
        # An unavailable engine fails at its next failed launch if no other takes requests.
        return "recovering" if "recovering" in states else "failed"


class EngineGroup(AsyncEngine):
    """Engines of one model in processes of this host. Create it with `load`.

    Args:
      members: the engines, before `start`.
      config: the configuration of each.
      queue_limits: limits on requests that wait for their first token in any engine.
    """

    def __init__(
        self,
        members: Seq[EngineProcess],
        config: EngineConfig,
        *,
        queue_limits: QueueLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        first = members[0]
        super().__init__(
            rng=random.Random(config.model.seed), clock=clock, queue_limits=queue_limits
        )
        self._members = tuple(members)
        self.lifecycle = GroupLifecycle([member.lifecycle for member in members])
        self.name, self.architecture = first.name, first.architecture
        self.max_model_len, self.vocab_size = first.max_model_len, first.vocab_size
        self.limits, self.pooling = first.limits, first.pooling
        self.system_fingerprint = first.system_fingerprint
        self.tokenizer, self.chat_template = first.tokenizer, first.chat_template
        self.grammars = first.grammars
        self.adapters = Adapters(first.adapters.places, self._install, first.loras)
        self.adapters.bind(num_requests_with=self.streams.num_requests_with)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[str, tuple[Route, Stream]] = {}  # streams in the engines, by request
        self._restarts = [0] * len(members)  # each engine's restarts when it was last used
        stats = first.stats()
        num_blocks = stats.num_blocks if config.cache.prefix_cache else 0
        self._router = Router(stats.block_size, num_blocks)
        self._merger = StateMerger()
        for engine, member in enumerate(self._members):
            member.fail_over = partial(self._fail_over, engine)

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        num_engines: int,
        queue_limits: QueueLimits | None = None,
        log_format: LogFormat = "text",
    ) -> EngineGroup:
        """Start the processes and load the model into each. Block until all can serve.

        The first engine compiles, and leaves memory for the others. Then the others start at the
        same time, with the same sizes and the compiled executables of the first.

        Raises:
          ModelError: if the model cannot be served.
          ConfigError: if the configuration does not fit the model or the machine.
          EngineError: if a process could not be started, ended, or froze.
        """
        return cls._launched(Start(config, log_format=log_format), num_engines, queue_limits)

    @classmethod
    def fake(
        cls,
        num_engines: int,
        *,
        step_time_s: float = 0.0,
        max_model_len: int = 4096,
        config: EngineConfig | None = None,
        queue_limits: QueueLimits | None = None,
        log_format: LogFormat = "text",
    ) -> EngineGroup:
        """Start processes with engines on fake devices, like `Engine.fake`."""
        config = config or EngineConfig()
        start = Start(config, True, step_time_s, max_model_len, log_format=log_format)
        return cls._launched(start, num_engines, queue_limits)

    @classmethod
    def _launched(
        cls, start: Start, num_engines: int, queue_limits: QueueLimits | None
    ) -> EngineGroup:
        with contextlib.ExitStack() as cleanup:
            publishers = [
                cleanup.enter_context(Publisher.started(start.config, rank))
                for rank in range(num_engines)
            ]
            starts, processes = _launch_all(start, num_engines)
            try:
                members: list[EngineProcess] = []
                for each, process, publisher in zip(starts, processes, publishers, strict=True):
                    first = members[0] if members else None
                    members.append(EngineProcess(each, process, publisher=publisher, sibling=first))
                _check_equal(members)
                return cls(members, starts[0].config, queue_limits=queue_limits)
            except BaseException:
                _end_all(processes)
                raise

    @property
    def engines(self) -> Seq[EngineProcess]:
        return self._members

    def start(self) -> None:
        """Connect to the processes on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.streams.attach_loop()
        for member in self._members:
            member.start()
        self.lifecycle.enter("serving")

    async def stop(self, drain_s: float = 0.0) -> None:
        self.lifecycle.enter("stopping")
        await self.streams.drain(drain_s)
        await asyncio.gather(*(member.stop() for member in self._members))
        self.lifecycle.enter("stopped")
        self.streams.fail(EngineError("the engine has been stopped"))

    def abort(self, request_id: str) -> None:
        if request_id in self._running:
            _, stream = self._running[request_id]
            stream.abort()

    def stats(self) -> EngineStats:
        return dataclasses.replace(
            total_stats([member.stats() for member in self._members]),
            state=self.lifecycle.state,
            healthy=self.lifecycle.healthy,
            completed_requests=self.streams.num_completed,
        )

    async def look(self) -> EngineState:
        async def state_of(member: EngineProcess) -> EngineState | None:
            with contextlib.suppress(TimeoutError, EngineError):  # frozen, or being replaced
                async with asyncio.timeout(LOOK_S):
                    return await member.look()
            return None

        found = await asyncio.gather(*map(state_of, self._members))
        states = {engine: state for engine, state in enumerate(found) if state is not None}
        if not states:
            raise EngineError("no engine process answers")
        return self._merger.merge(states)

    # ---- profiles ------------------------------------------------------------------------------

    async def start_profile(self, folder: Path) -> None:
        """Start a trace of each engine, in subfolders `engine0`, `engine1` and so on."""
        started = await self._on_each(
            lambda member, engine: member.start_profile(folder / f"engine{engine}")
        )
        if not all(started):
            log.warning("an engine is not profiled, because its process is being replaced")

    async def stop_profile(self) -> None:
        await self._on_each(lambda member, _: member.stop_profile())

    async def _on_each(self, call: Callable[[EngineProcess, int], Awaitable[None]]) -> list[bool]:
        """Call all connected engines. Return which calls succeeded.

        Raises:
          ForgeError: the first engine's error, if no engine succeeded.
        """
        connected = [(each, i) for i, each in enumerate(self._members) if each.connected]
        calls = [call(member, engine) for member, engine in connected]
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [each for each in results if isinstance(each, BaseException)]
        for error in errors:
            if not isinstance(error, ForgeError) or len(errors) == len(results):
                raise error
            log.warning("an engine could not be profiled: %s", error)
        if not results:
            raise EngineError("no engine process is running")
        return [not isinstance(each, BaseException) for each in results]

    # ---- LoRA adapters -------------------------------------------------------------------------

    async def load_lora(self, name: str, path: str) -> None:
        await self._settled()
        await super().load_lora(name, path)

    async def unload_lora(self, name: str) -> None:
        await self._settled()
        await super().unload_lora(name)
        await self._drop(name)

    async def _settled(self) -> None:
        await asyncio.gather(*(member.settled() for member in self._members))

    def _install(self, ref: LoraRef, path: str, _: Run) -> LoadedAdapter:
        """Load an adapter into the same slot of every engine, or of none. Runs in a thread.

        An unavailable engine loads it when it starts again.
        """
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._load(ref, path), self._loop).result()

    async def _load(self, ref: LoraRef, path: str) -> LoadedAdapter:
        loads = [
            asyncio.to_thread(member.adapters.load, ref.name, path, ref=ref)
            for member in self._members
            if member.lifecycle.takes_requests
        ]
        results = await asyncio.gather(*loads, return_exceptions=True)
        loaded = [each for each in results if not isinstance(each, BaseException)]
        error = next((each for each in results if isinstance(each, BaseException)), None)
        if error is None and len({each.digest for each in loaded}) > 1:
            error = RequestError(
                "the adapter's files changed while they were read: load it again",
                param="lora_path",
            )
        if error is not None or not loaded:
            await self._drop(ref.name)
            raise error or EngineError("no engine process is running")
        if not all(
            ref in [adapter.ref for adapter in member.loras]
            for member in self._members
            if member.lifecycle.takes_requests
        ):
            await self._drop(ref.name)
            raise OverloadedError(
                "an engine became available while the others loaded the adapter: load it again"
            )
        for member in self._members:
            if member.lifecycle.state == "unavailable":
                member.adapters.adopt(loaded[0])
        return loaded[0]

    async def _drop(self, name: str) -> None:
        """Remove an adapter, which no request uses, from all engines."""
        await asyncio.gather(*(member.drop_lora(name) for member in self._members))

    # ---- requests ------------------------------------------------------------------------------

    def _add(self, request: Request) -> None:
        if request.request_id in self._running:  # an engine has not yet ended a dropped request
            raise RequestError("the request ID is in use: choose another", param="request_id")
        self._place(request)

    def _place(self, request: Request) -> None:
        """Send a request to the engine that the router chooses."""
        route = self._router.route(request, self._candidates(request))
        try:
            stream = self._members[route.engine].submit_request(request)
        except BaseException:
            self._router.discard(route)
            raise
        self._running[request.request_id] = route, stream
        self.streams.place(request.request_id, route.engine)
        stream.push_to(partial(self._forward, route))

    def _candidates(self, request: Request) -> list[int]:
        """Return the engines that may compute a request.

        Raises:
          EngineError: if there is none.
        """
        candidates = [i for i, each in enumerate(self._members) if each.lifecycle.takes_requests]
        if not candidates:
            raise EngineError("the engine does not accept requests: every engine process failed")
        for engine in candidates:
            restarts = self._members[engine].num_restarts
            if restarts != self._restarts[engine]:
                self._restarts[engine] = restarts
                self._router.forget(engine)
        for preferred in self._preferences(request):
            candidates = [each for each in candidates if preferred(each)] or candidates
        return candidates

    def _preferences(self, request: Request) -> Iterator[Callable[[int], bool]]:
        """Yield conditions on an engine, each of which matters only if an engine meets it."""
        if request.lora is not None:
            yield lambda each: any(
                adapter.ref == request.lora for adapter in self._members[each].loras
            )
        yield lambda each: self._members[each].connected
        yield lambda each: self._members[each].stalled_s < STALLED_S

    def _fail_over(self, engine: int) -> bool:
        """Move the requests of an engine whose launches keep failing to other engines.

        Return False, without any change, if no other engine takes requests.
        """
        others = (each for i, each in enumerate(self._members) if i != engine)
        if not any(each.lifecycle.takes_requests for each in others):
            return False
        requests = self._members[engine].suspend()
        if requests:
            log.error("engine %d is unavailable: moving %d requests", engine, len(requests))
        for request in requests:
            self._move(request)
        return True

    def _move(self, request: Request) -> None:
        """Continue the rest of a request on another engine."""
        route, _ = self._running.pop(request.request_id)
        self._router.discard(route)
        try:
            self._place(request)
        except ForgeError as error:  # for example, its adapter is lost
            deltas = last_deltas(samples_of(request), "error", error)
            self.streams.deliver_now({request.request_id: deltas})

    def _forward(self, route: Route, deltas: list[Delta]) -> None:
        """Pass the deltas of an engine's stream to the group's stream of the same request."""
        request_id = route.request.request_id
        self._router.take(route, deltas)
        if not route.outputs:
            del self._running[request_id]
        self.streams.deliver_now({request_id: deltas})

    def _fail(self, error: BaseException) -> None:
        if self.lifecycle.enter("failed"):
            self.streams.abort_all()  # otherwise they would still be computed
            self.streams.fail(EngineError(f"the engine failed: {type(error).__name__}"))


def _launch_all(start: Start, num_engines: int) -> tuple[list[Start], list[ChildProcess]]:
    """Launch the processes. Return them, and the configurations of their successors."""
    shared = msgspec.structs.replace(start, num_engines=num_engines)
    first = launch(msgspec.structs.replace(shared, host_sharers=num_engines))
    shared = _with_sizes_of(shared, first)
    starts = [msgspec.structs.replace(shared, engine=each) for each in range(num_engines)]
    with ThreadPoolExecutor(num_engines) as pool:
        launches = [pool.submit(launch, each) for each in starts[1:]]
    errors = [each.exception() for each in launches]
    processes = [first, *(each.result() for each in launches if each.exception() is None)]
    for error in errors:
        if error is not None:
            _end_all(processes)
            raise error
    return starts, processes


def _with_sizes_of(start: Start, process: ChildProcess) -> Start:
    """Return the configuration with the sizes that a process has chosen."""
    hello = process.hello
    model = dataclasses.replace(start.config.model, max_model_len=hello.max_model_len)
    config = dataclasses.replace(start.config, model=model)
    return msgspec.structs.replace(start, config=config, num_blocks=hello.stats.num_blocks)


def _end_all(processes: Seq[ChildProcess]) -> None:
    for process in processes:
        process.kill()
        process.end()


def _check_equal(members: Seq[EngineProcess]) -> None:
    """Raise EngineError if the engines would compute different tokens."""
    kinds = {(each.system_fingerprint, each.limits.vocab_size) for each in members}
    adapters = [[(one.ref, one.digest) for one in each.loras] for each in members]
    if len(kinds) > 1 or any(each != adapters[0] for each in adapters):
        raise EngineError(
            "the model's files changed while the engines loaded them: start the server again"
        )
