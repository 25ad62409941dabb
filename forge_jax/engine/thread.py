"""`Engine`: the async face of a core. One engine thread runs it; an event loop reads streams.

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
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_jax.checkpoint.hub import resolve
from forge_jax.config import EngineConfig, python_names
from forge_jax.engine.async_engine import AsyncEngine, QueueLimits
from forge_jax.engine.async_engine import EngineStats as EngineStats
from forge_jax.engine.async_engine import State as State
from forge_jax.engine.async_engine import Stream as Stream
from forge_jax.engine.core import EngineCore, EngineParts, Late, Limits, Outputs, Pooler
from forge_jax.engine.gc_tuning import short_pauses
from forge_jax.errors import EngineError, ForgeError
from forge_jax.host import supervise
from forge_jax.host.panics import is_panic
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.request import FinishReason, LoraRef, Request
from forge_jax.telemetry.engine_state import Capture, EngineState
from forge_jax.telemetry.spans import span
from forge_jax.telemetry.startup import StartupTimes

if TYPE_CHECKING:
    from forge_jax.engine.adapters import LoadedAdapter
    from forge_jax.grammar import GrammarCompiler, GrammarSpec
    from forge_jax.telemetry.trace_recorder import Recorder

CALL_S = 1.0  # between two looks at whether the engine thread is alive

log = logging.getLogger(__name__)


class Engine(AsyncEngine):
    """An engine thread and the streams that it feeds."""

    def __init__(self, parts: EngineParts, queue_limits: QueueLimits | None = None):
        super().__init__(rng=parts.rng, clock=parts.clock, queue_limits=queue_limits)
        self.name = parts.name
        self.max_model_len = parts.max_model_len
        self.system_fingerprint = parts.system_fingerprint
        self.architecture = parts.architecture
        self.pooling = parts.pooling
        self.vocab_size = parts.core.vocab_size
        self.tokenizer = parts.tokenizer
        self.chat_template = parts.chat_template
        self._parts = parts
        self._core: EngineCore = parts.core
        self._commands: deque[tuple[str, Any]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self.grammars = parts.core.grammars
        self.adapters = parts.adapters
        self._compiling: dict[str, tuple[Request, asyncio.Task[None]]] = {}  # before it is queued
        self._pooling: Future[None] | None = None  # until what pools can run
        self._recorder: Recorder | None = None  # made with the first profile
        self._held: list[Outputs] = []  # news that have not been delivered yet
        self._turn_s: float | None = None  # when this turn began; None: the thread waits for work
        self._delivered_s = self._clock()

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        startup: StartupTimes | None = None,
        queue_limits: QueueLimits | None = None,
    ) -> Engine:
        """Loads the model and compiles its first executables; blocks until it can serve.

        The others go on compiling in threads, and are adopted between steps after `start`.

        Args:
          startup: where the phases of the start are noted; default: from now on.

        Raises:
          ModelError: the model cannot be served; the message says why.
          ConfigError: the configuration does not fit the model or the machine.
        """
        startup = startup or StartupTimes()
        with python_names():
            with startup.phase("config"):
                folder = resolve(config.model.model, config.model.revision)
            device = config.parallel
            log.info(
                "loading %s%s: the first start with these settings compiles for some ten seconds "
                "or more, later ones take seconds",
                config.model.model,
                "" if device.backend == "auto" else f" on {device.backend}:{device.device}",
            )
            from forge_jax.engine.builder import assemble

            startup.reached("import")
            return cls(assemble(config, startup, folder), queue_limits)

    @classmethod
    def fake(
        cls,
        *,
        step_time_s: float = 0.0,
        max_model_len: int = 4096,
        check: bool = False,
        config: EngineConfig | None = None,
        queue_limits: QueueLimits | None = None,
    ) -> Engine:
        """The same engine on a fake device: no weights, a byte tokenizer, deterministic text.

        `step_time_s` is the time one step takes. With `check` the device verifies on every step
        that each sequence's KV is exactly its prefix (slow).
        """
        from forge_jax.engine.fake import assemble_fake

        return cls(
            assemble_fake(
                config or EngineConfig(),
                step_time_s=step_time_s,
                max_model_len=max_model_len,
                check=check,
            ),
            queue_limits,
        )

    def start(self) -> None:
        """Starts the engine thread. The engine takes requests from now on."""
        assert self._state == "starting", f"start of an engine that is {self._state}"
        late = self._parts.late
        self._state = "serving"
        self._parts.startup.reached("serving")
        if late is None:
            self._ready()
        self._thread = supervise.start_thread(self._run, "forge-engine", self._thread_failed)
        if late is not None:
            adopt = partial(self._command, "adopt", late)
            late.on_compiled(supervise.guarded(adopt, "adopting executables", self._thread_failed))

    async def stop(self, drain_s: float = 0.0) -> None:
        """Takes no more requests, waits up to `drain_s` for the running ones, aborts the rest."""
        if self._thread is None or self._state == "stopped":
            self._state = "stopped"
            return
        if self._parts.late is not None:
            self._parts.late.cancel()
        if self._state != "failed":
            self._state = "stopping"
        await self._drain(drain_s)
        self._command("stop", None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)  # what the thread handed over last is delivered
        self._fail(EngineError("the engine has been stopped"))
        self._state = "stopped"
        if self.grammars is not None:
            self.grammars.close()

    @property
    def limits(self) -> Limits:
        return self._core.limits

    def abort(self, request_id: str) -> None:
        """Gives a request up; its stream ends with finish reason "abort"."""
        if request_id in self._compiling:
            request, task = self._compiling.pop(request_id)
            task.cancel()
            self._deliver([{request_id: _ends(request, "abort")}])
            return
        self._command("abort", request_id)

    def _add(self, request: Request) -> None:
        spec, grammars, pooler = (
            request.params.structured_outputs,
            self.grammars,
            self._parts.pooler,
        )
        if spec is not None and grammars is not None and grammars.kept(spec) is None:
            compile_soon = partial(grammars.compile_soon, spec)
        elif request.pooling is not None and pooler is not None and not pooler.can_pool:
            compile_soon = partial(self._pooling_soon, pooler)
        else:
            self._command("add", request)
            return
        task = supervise.start_task(
            self._add_later(request, compile_soon),
            f"queueing request {request.request_id}",
            partial(self._add_failed, request),
        )
        self._compiling[request.request_id] = request, task

    async def _add_later(
        self, request: Request, compile_soon: Callable[[], Awaitable[object]]
    ) -> None:
        """Queues a request as soon as its grammar, or what it is the first to need, is compiled."""
        try:
            await compile_soon()
        except ForgeError as error:
            self._deliver([{request.request_id: _ends(request, "error", error)}])
        else:
            self._command("add", request)
        del self._compiling[request.request_id]

    def _add_failed(self, request: Request, error: BaseException) -> None:
        self._compiling.pop(request.request_id, None)
        failure = EngineError("what the request needs could not be compiled")
        self._deliver([{request.request_id: _ends(request, "error", failure)}])

    async def _pooling_soon(self, pooler: Pooler) -> None:
        """Until what pools has been compiled, in a thread, and the engine thread will adopt it."""
        if self._pooling is None or (self._pooling.done() and self._pooling.exception()):
            thread = ThreadPoolExecutor(1, thread_name_prefix="forge-pooling")
            self._pooling = thread.submit(self._compile_pooling, pooler)
            thread.shutdown(wait=False)
            # Whoever waits for it may have gone by its end.
            supervise.watch(self._pooling, "compiling what pools", expected=(ForgeError,))
        await asyncio.shield(asyncio.wrap_future(self._pooling))

    def _compile_pooling(self, pooler: Pooler) -> None:
        pooler.compile_pooling()
        self._command("pool", pooler)

    async def _prepare(self, grammars: GrammarCompiler, spec: GrammarSpec) -> None:
        await grammars.compile_soon(spec)

    def load_lora_at(self, ref: LoraRef, path: str) -> LoadedAdapter:
        """Loads an adapter that another keeps the places of. Blocks; in any thread.

        Raises:
          as `load_lora`.
        """
        return self._adapters().load(ref.name, path, self._between_steps, ref=ref)

    def _between_steps(self, call: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._command("call", (call, done))
        while True:
            try:
                return done.result(CALL_S)
            except TimeoutError:
                self._check_alive()  # or nobody would ever do it

    def _check_alive(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            raise EngineError("the engine takes no requests: its thread has ended")

    async def look(self) -> EngineState:
        return await asyncio.to_thread(self._look)

    def _look(self) -> EngineState:
        """Blocks until the engine thread is between two steps."""
        captures: list[Capture] = []
        self._between_steps(lambda: captures.append(self._core.watcher.capture()))
        return captures[0].state()

    async def start_profile(self, folder: Path) -> None:
        await asyncio.to_thread(self._profiles().start, folder)

    async def stop_profile(self) -> None:
        await asyncio.to_thread(self._profiles().stop)

    def _profiles(self) -> Recorder:
        """Takes profiles of this engine; jax comes with the first, where it is not there."""
        if self._recorder is None:
            from forge_jax.telemetry.trace_recorder import Recorder

            steps = self._parts.steps
            self._recorder = Recorder(dict if steps is None else steps.compiled, self._parts.name)
        return self._recorder

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
            num_deferred=scheduler.num_deferred,
            num_slots=scheduler.config.max_num_seqs,
            policy=scheduler.config.policy,
            tensor_parallel=self._parts.shards,
            completed_requests=self._num_completed,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_used_blocks=pool.num_blocks - pool.num_free,
            num_cached_blocks=pool.num_cached,
            evictions=pool.num_evictions,
            steps=core.num_steps,
            step_tokens=core.step_tokens.totals(),
            step_sequences=core.step_sequences,
            max_step_sequences=core.max_step_sequences,
            prompt_tokens=core.prompt_tokens,
            cached_prompt_tokens=scheduler.admission.cached_prompt_tokens,
            computed_prompt_tokens=scheduler.admission.computed_prompt_tokens,
            generation_tokens=core.generation_tokens,
            preemptions=scheduler.num_preemptions,
            recoveries=core.num_recoveries,
            restarts=0,
            stalled_s=max(core.stalled_s, self._turn_seconds()),
            prefix_cache_queries=pool.queried_tokens,
            prefix_cache_hits=pool.hit_tokens,
            compilations_after_ready=self._parts.compilations(),
            step_phases=core.phases.totals(),
            startup_seconds=self._parts.startup.seconds,
            step_token_budget=scheduler.token_budget,
            expected_step_s=None if scheduler.budget is None else scheduler.budget.expected_s,
            speculation=None if core.speculator is None else core.speculator.stats(),
        )

    def _turn_seconds(self) -> float:
        """For how long the engine thread has been in one turn: commands may hang, too."""
        began_s = self._turn_s
        return 0.0 if began_s is None else self._clock() - began_s

    def _command(self, verb: str, argument: Any) -> None:
        with self._wake:
            self._commands.append((verb, argument))
            self._wake.notify()

    def _run(self) -> None:  # noqa: C901
        """The engine thread: commands in, one tick, news out; asleep when there is no work."""
        core, commands = self._core, self._commands
        with contextlib.ExitStack() as while_ready, self._parts.guard():
            if self._state == "ready":
                while_ready.enter_context(short_pauses())
            while True:
                if not commands and not core.has_work:
                    self._turn_s = None
                    with self._wake:
                        while not commands:
                            self._wake.wait()
                self._turn_s = self._clock()
                while commands:
                    verb, argument = commands.popleft()
                    if verb not in ("add", "abort"):  # the others may take long
                        self._deliver_held()
                    if verb == "add":
                        self._queue_in_core(argument)
                    elif verb == "abort":
                        core.abort(argument)
                    elif verb == "call":
                        _do(*argument)
                    elif verb == "pool":
                        argument.adopt_pooling()
                    elif verb == "adopt":
                        if self._adopt(argument):
                            while_ready.enter_context(short_pauses())
                    else:
                        self._deliver([core.drain()])
                        return
                outputs = core.tick(self._before_wait)
                self._before_wait()  # where no step was waited for
                if outputs:
                    self._held.append(outputs)
                if not core.has_work:
                    self._deliver_held()

    def _thread_failed(self, error: BaseException) -> None:
        """After whatever ended the engine thread: the streams must learn of it."""
        self._state = "failed"
        try:
            self._deliver_held()
        finally:
            self._call(self._fail, EngineError(f"the engine failed: {type(error).__name__}"))

    def _before_wait(self) -> None:
        """Hands over the news of the step that was read last.

        The event loop wants the interpreter for what it does with them, and the next step would be
        dispatched by so much later: they are kept until this thread waits for the device.
        """
        if self._held and self._clock() - self._delivered_s >= self.news_interval_s:
            self._deliver_held()

    def _deliver_held(self) -> None:
        if not self._held:
            return
        with span("deliver"):
            self._deliver(self._held)
            self._held.clear()
        self._delivered_s = self._clock()
        self._core.phases.end("deliver")

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

    def _queue_in_core(self, request: Request) -> None:
        try:
            self._core.add(request)
        except BaseException as error:  # costs this request, not the engine
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            if not isinstance(error, ForgeError):
                log.exception("request %s could not be queued", request.request_id)
                error = EngineError("the request could not be queued")
            self._deliver([{request.request_id: _ends(request, "error", error)}])


def _do(call: Callable[[], None], done: Future[None]) -> None:
    """Does something for another thread; what it raises is raised there."""
    try:
        call()
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result(None)


def _ends(request: Request, reason: FinishReason, error: ForgeError | None = None) -> list[Delta]:
    """The last news of a request that never got into the engine."""
    samples = range(request.params.n) if request.outputs is None else request.outputs
    return [Delta(i, finish_reason=reason, error=error) for i in samples]
