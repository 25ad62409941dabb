"""`Engine`: the async face. One engine thread runs `EngineCore`; an event loop reads streams.

Work goes to the engine thread through one queue; tokens come back through another, all requests of
a step together, and one `call_soon_threadsafe` wakes the loop for all steps that it has not seen
yet. The engine never waits for a reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from forge_jax.config import EngineConfig
from forge_jax.core import EngineCore, EngineParts, Late, Outputs, token_ids
from forge_jax.errors import EngineError, ForgeError, RequestError
from forge_jax.garbage import short_pauses
from forge_jax.observe.phases import Phase, PhaseTotals
from forge_jax.observe.startup import StartupTimes
from forge_jax.outputs import Delta
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.request import Request

if TYPE_CHECKING:
    from forge_jax.text import ChatTemplate, Tokenizer

log = logging.getLogger(__name__)

# "serving" takes requests, as "ready" does, while some executables are still being compiled.
State = Literal["starting", "serving", "ready", "stopping", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """The counters, read without stopping the engine: two fields may be a step apart."""

    state: State
    healthy: bool
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int  # free, or cached and evictable
    num_used_blocks: int  # held by live sequences
    steps: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    prefix_cache_queries: int  # in tokens
    prefix_cache_hits: int
    compilations_after_ready: int
    step_phases: dict[Phase, PhaseTotals]  # the host's time by phase of a step
    startup_seconds: dict[str, float]  # by phase; "serving" and "ready" since the beginning


class Stream:
    """The news of one request, on the event loop that submitted it: iterate, or `push_to`.

    Each item is a list of deltas: one step's, or several steps' if the reader was slower than
    the engine. The iteration ends when all `n` samples have finished.
    """

    def __init__(self, engine: Engine, request_id: str, n: int):
        self.request_id = request_id
        self._engine = engine
        self._open = set(range(n))  # samples that have not finished
        self._deltas: list[Delta] = []
        self._arrived = asyncio.Event()
        self._receive: Callable[[list[Delta]], None] | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[Delta]:
        while not self._deltas:
            if not self._open:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        deltas, self._deltas = self._deltas, []
        return deltas

    def push_to(self, receive: Callable[[list[Delta]], None]) -> None:
        """Calls `receive` with each item as it arrives, on the event loop, instead of iterating.

        It saves waking a task for every step of every request. `receive` must be quick: the next
        request gets its news of the same step after it. If it raises, its request is aborted.
        """
        self._receive = receive
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            receive(deltas)

    def abort(self) -> None:
        """Gives the request up: its blocks are free within two steps. After its end, nothing."""
        if self._open:
            self._engine.abort(self.request_id)

    def _put(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self._open.discard(delta.index)
        if self._receive is not None:
            self._receive(deltas)
            return
        self._deltas.extend(deltas)
        with contextlib.suppress(RuntimeError):  # its reader waited on a loop that was closed
            self._arrived.set()


class Engine:
    """An engine thread and the streams that it feeds."""

    def __init__(self, parts: EngineParts):
        self.name = parts.name
        self.max_model_len = parts.max_model_len
        self.system_fingerprint = parts.system_fingerprint
        self.vocab_size = parts.core.vocab_size
        self.tokenizer: Tokenizer | None = parts.tokenizer
        self.chat_template: ChatTemplate | None = parts.chat_template
        self._parts = parts
        self._core: EngineCore = parts.core
        self._streams: dict[str, Stream] = {}
        self._commands: deque[tuple[str, Any]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: deque[Outputs] = deque()  # of the steps that the loop has not seen
        self._fan_out_due = False
        self._idle = asyncio.Event()
        self._state: State = "starting"

    @classmethod
    def load(cls, config: EngineConfig, startup: StartupTimes | None = None) -> Engine:
        """Loads the model and compiles its first executables; blocks until it can serve.

        The others go on compiling in threads, and are adopted between steps after `start`.

        Args:
          startup: where the phases of the start are noted; default: from now on.

        Raises:
          ModelError: the model cannot be served; the message says why.
          ConfigError: the configuration does not fit the model or the machine.
        """
        startup = startup or StartupTimes()
        from forge_jax.assemble import assemble

        startup.reached("import")
        return cls(assemble(config, startup))

    @classmethod
    def fake(
        cls,
        *,
        step_time_s: float = 0.0,
        max_model_len: int = 4096,
        check: bool = False,
        config: EngineConfig | None = None,
    ) -> Engine:
        """The same engine on a fake device: no weights, a byte tokenizer, deterministic text.

        `step_time_s` is the time one step takes. With `check` the device verifies on every step
        that each sequence's KV is exactly its prefix (slow).
        """
        from forge_jax.fake import assemble_fake

        return cls(
            assemble_fake(
                config or EngineConfig(),
                step_time_s=step_time_s,
                max_model_len=max_model_len,
                check=check,
            )
        )

    def start(self) -> None:
        """Starts the engine thread. The engine takes requests from now on."""
        assert self._state == "starting", f"start of an engine that is {self._state}"
        late = self._parts.late
        self._state = "serving"
        self._parts.startup.reached("serving")
        if late is None:
            self._ready()
        self._thread = threading.Thread(target=self._run, name="forge-engine", daemon=True)
        self._thread.start()
        if late is not None:
            late.on_compiled(lambda: self._command("adopt", late))

    async def stop(self, drain_s: float = 0.0) -> None:
        """Takes no more requests, waits up to `drain_s` for the running ones, aborts the rest."""
        if self._thread is None or self._state == "stopped":
            self._state = "stopped"
            return
        if self._parts.late is not None:
            self._parts.late.cancel()
        if self._state != "failed":
            self._state = "stopping"
        if self._streams and drain_s > 0:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_s)
        for stream in list(self._streams.values()):
            stream.abort()
        self._command("stop", None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)  # what the thread handed over last is delivered
        self._fail(EngineError("the engine has been stopped"))
        self._state = "stopped"

    def check(self, prompt_token_ids: Iterable[int], params: SamplingParams) -> None:
        """Refuses what `submit` would refuse for what it asks, and queues nothing.

        Raises:
          RequestError: the request can never be served; `param` names the field.
        """
        ids = token_ids(prompt_token_ids)
        self._core.check(Request(request_id="", prompt_token_ids=ids, params=params))

    def submit(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Stream:
        """Queues a request. To be called on the event loop that will read the stream.

        Raises:
          RequestError: the request can never be served; `param` names the field.
          EngineError: the engine has failed or is stopping, or streams of another event loop
            are being read.
        """
        if (
            self._state not in ("serving", "ready")
            or self._thread is None
            or not self._thread.is_alive()
        ):
            raise EngineError(f"the engine takes no requests: it is {self._state}")
        if request_id in self._streams:
            raise RequestError("the request id is in use: choose another", param="request_id")
        self._attach_loop()
        parts = self._parts
        seed = params.seed if params.seed is not None else parts.rng.getrandbits(64)
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids(prompt_token_ids),
            params=params,
            arrival_s=parts.clock(),
            priority=priority,
            cache_salt=cache_salt,
            seed=seed % 2**64,
        )
        self._core.check(request)
        stream = Stream(self, request_id, params.n)
        self._streams[request_id] = stream
        self._command("add", request)
        return stream

    def abort(self, request_id: str) -> None:
        """Gives a request up; its stream ends with finish reason "abort"."""
        self._command("abort", request_id)

    async def generate(
        self, prompt: str | list[int], params: SamplingParams | None = None, **kwargs: Any
    ) -> AsyncIterator[Delta]:
        """Streams the deltas of one prompt: text or token ids. Leaving the loop early aborts it."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer: pass token ids", param="prompt")
            prompt = self.tokenizer.encode(prompt)
        kwargs.setdefault("request_id", f"gen-{self._parts.rng.getrandbits(64):016x}")
        stream = self.submit(prompt, params or SamplingParams(), **kwargs)
        try:
            async for deltas in stream:
                for delta in deltas:
                    yield delta
        finally:
            stream.abort()

    def stats(self) -> EngineStats:
        core, scheduler = self._core, self._core.scheduler
        pool = scheduler.pool
        return EngineStats(
            state=self._state,
            healthy=self._state in ("serving", "ready", "stopping")
            and self._thread is not None
            and self._thread.is_alive(),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_used_blocks=pool.num_blocks - pool.num_free,
            steps=core.num_steps,
            prompt_tokens=core.prompt_tokens,
            generation_tokens=core.generation_tokens,
            preemptions=scheduler.num_preemptions,
            prefix_cache_queries=pool.queried_tokens,
            prefix_cache_hits=pool.hit_tokens,
            compilations_after_ready=self._parts.compilations(),
            step_phases=core.phases.totals(),
            startup_seconds=self._parts.startup.seconds,
        )

    def _command(self, verb: str, argument: Any) -> None:
        with self._wake:
            self._commands.append((verb, argument))
            self._wake.notify()

    def _run(self) -> None:
        """The engine thread: commands in, one tick, news out; asleep when there is no work."""
        core, commands = self._core, self._commands
        try:
            with contextlib.ExitStack() as while_ready, self._parts.guard():
                if self._state == "ready":
                    while_ready.enter_context(short_pauses())
                while True:
                    if not commands and not core.has_work:
                        with self._wake:
                            while not commands:
                                self._wake.wait()
                    while commands:
                        verb, argument = commands.popleft()
                        if verb == "add":
                            self._add(argument)
                        elif verb == "abort":
                            core.abort(argument)
                        elif verb == "adopt":
                            if self._adopt(argument):
                                while_ready.enter_context(short_pauses())
                        else:
                            self._deliver(core.drain())
                            return
                    self._deliver(core.tick())
                    core.phases.end("deliver")
        except BaseException as error:  # whatever ends this thread, the streams must learn of it
            log.exception("the engine thread failed")
            self._state = "failed"
            failure = EngineError(f"the engine failed: {type(error).__name__}")
            self._call(self._fail, failure)

    def _attach_loop(self) -> None:
        """Makes the running loop the one that streams are fed on.

        Streams of a loop that has been closed have no reader any more: they are aborted.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop and self._streams:
            if self._loop is not None and not self._loop.is_closed():
                raise EngineError("the engine is in use on another event loop")
            for request_id in self._streams:
                self.abort(request_id)
        if self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._fan_out)  # which the loop before may have been closed without

    def _adopt(self, late: Late) -> bool:
        """Takes late executables between two steps; True if with them the engine became ready."""
        if not late.adopt() or self._state != "serving":
            return False
        self._ready()
        return True

    def _ready(self) -> None:
        self._state = "ready"
        self._parts.startup.reached("ready")
        log.info("ready; seconds by phase: %s", self._parts.startup)

    def _add(self, request: Request) -> None:
        try:
            self._core.add(request)
        except Exception as error:  # costs this request, not the engine
            if not isinstance(error, ForgeError):
                log.exception("request %s could not be queued", request.request_id)
                error = EngineError("the request could not be queued")
            indices = range(request.params.n)
            failed = [Delta(i, finish_reason="error", error=error) for i in indices]
            self._deliver({request.request_id: failed})

    def _deliver(self, outputs: Outputs) -> None:
        if not outputs:
            return
        self._news.append(outputs)
        if not self._fan_out_due:
            self._fan_out_due = True
            self._call(self._fan_out)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody listens
                self._loop.call_soon_threadsafe(function, *arguments)

    def _fan_out(self) -> None:
        """Hands the news on, all steps' of a request at once. It runs on the event loop."""
        self._fan_out_due = False  # before the queue is read: what comes later is called for again
        news: Outputs = {}
        while self._news:
            outputs = self._news.popleft()
            if not news:
                news = outputs
                continue
            for request_id, deltas in outputs.items():
                news.setdefault(request_id, []).extend(deltas)
        for request_id, deltas in news.items():
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            try:
                stream._put(deltas)
            except Exception:  # costs this request, not the others
                log.exception("request %s: its news could not be received", request_id)
                stream.abort()
            if not stream._open:
                del self._streams[request_id]
        if not self._streams:
            self._idle.set()

    def _fail(self, failure: EngineError) -> None:
        for stream in self._streams.values():
            stream._put([Delta(i, finish_reason="error", error=failure) for i in stream._open])
        self._streams.clear()
        self._idle.set()
