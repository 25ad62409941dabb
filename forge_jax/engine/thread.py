"""`Engine`: an engine core in a thread, and an event loop that reads its streams.

One queue passes typed commands to the thread. The outputs of a step return together. One
`call_soon_threadsafe` wakes the loop for all steps that it has not processed. The thread never
waits for a reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from forge_jax.checkpoint.hub import resolve
from forge_jax.config import EngineConfig, python_names
from forge_jax.engine.adapters import Adapters
from forge_jax.engine.async_engine import AsyncEngine, EngineStats
from forge_jax.engine.commands import (
    Abort,
    ActivateExecutables,
    ActivatePooling,
    Call,
    Command,
    Stop,
    Submit,
)
from forge_jax.engine.control import Control
from forge_jax.engine.core import EngineCore, Outputs
from forge_jax.engine.gate import Gate
from forge_jax.engine.gc_tuning import short_pauses
from forge_jax.engine.kv_events import Publisher
from forge_jax.engine.lifecycle import Lifecycle
from forge_jax.engine.parts import EngineParts
from forge_jax.engine.preparation import Preparation
from forge_jax.engine.streams import QueueLimits, last_deltas, samples_of
from forge_jax.engine.validation import check_in_flight, new_version, versioned
from forge_jax.errors import EngineError, ForgeError, ModelError, RequestError
from forge_jax.host import supervise
from forge_jax.host.panics import is_panic
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.cache_events import CacheEvent
from forge_jax.schedule.request import Request
from forge_jax.telemetry.engine_state import Capture, EngineState
from forge_jax.telemetry.spans import span
from forge_jax.telemetry.startup import StartupTimes

if TYPE_CHECKING:
    from forge_jax.engine.hosts.group import HostGroup
    from forge_jax.engine.validation import InFlightRequests
    from forge_jax.engine.weights import EngineWeights, NewWeights
    from forge_jax.models import Leaves, Model
    from forge_jax.scoring import ScoreOptions
    from forge_jax.step.executables import BackgroundCompile
    from forge_jax.telemetry.trace_recorder import Recorder

CALL_S = 1.0  # interval between checks that the engine thread is alive

log = logging.getLogger(__name__)


class Engine(AsyncEngine):
    """An engine in a thread of this process, for asyncio programs. Create it with `load`."""

    def __init__(
        self,
        parts: EngineParts,
        queue_limits: QueueLimits | None = None,
        publisher: Publisher | None = None,
    ):
        super().__init__(rng=parts.rng, clock=parts.clock, queue_limits=queue_limits)
        self.name = parts.name
        self.max_model_len = parts.max_model_len
        self.system_fingerprint = parts.system_fingerprint
        self.architecture = parts.architecture
        self.pooling = parts.pooling
        self.vocab_size = parts.core.vocab_size
        self.limits = parts.core.limits
        self.tokenizer = parts.tokenizer
        self.chat_template = parts.chat_template
        self.grammars = parts.core.grammars
        self.adapters = parts.adapters or Adapters.none()
        self._parts = parts
        self._core: EngineCore = parts.core
        self._thread = EngineThread(
            parts,
            self.lifecycle,
            deliver=self.streams.deliver,
            delay_s=lambda: self.news_interval_s,
            on_error=self._thread_failed,
        )
        self._control = Control(parts, self._thread)
        self._preparation = Preparation(parts, self._thread.send, self.streams.deliver)
        self._recorder: Recorder | None = None  # created for the first profile
        self._publisher = publisher
        if publisher is not None:
            self.publish_events(publisher.publish)

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        startup: StartupTimes | None = None,
        queue_limits: QueueLimits | None = None,
        *,
        publishes: bool = True,
        group: HostGroup | None = None,
    ) -> Engine:
        """Load the model and compile its first executables. Block until the engine can serve.

        The other executables continue to compile in threads. They are used as soon as they are
        ready.

        Args:
          startup: the record of startup phases. Default: a new one.
          publishes: apply `kv_events_config`. False if the caller publishes the events.
          group: the hosts of `num_hosts`, if this is an engine process.

        Raises:
          ModelError: if the model cannot be served. The message names the reason.
          ConfigError: if the configuration does not fit the model or the machine.
        """
        startup = startup or StartupTimes()
        with python_names():
            with startup.phase("config"):
                folder = resolve(config.model.model, config.model.revision)
            device = config.parallel
            log.info(
                "loading %s%s. The first start with these settings compiles for at least 10 s. "
                "Later starts take seconds",
                config.model.model,
                "" if device.backend == "auto" else f" on {device.backend}:{device.device}",
            )
            from forge_jax.engine.builder import assemble

            startup.reached("import")
            if not publishes:
                return cls(assemble(config, startup, folder, group), queue_limits)
            with Publisher.started(config) as publisher:
                return cls(assemble(config, startup, folder, group), queue_limits, publisher)

    @classmethod
    def fake(
        cls,
        *,
        step_time_s: float = 0.0,
        max_model_len: int = 4096,
        check: bool = False,
        config: EngineConfig | None = None,
        queue_limits: QueueLimits | None = None,
        publishes: bool = True,
    ) -> Engine:
        """Return an engine on a fake device: no weights, a byte tokenizer, deterministic text.

        `step_time_s` is the time of one step in seconds. If `check`, the device verifies on every
        step that each sequence's KV matches its prefix exactly (slow).
        """
        from forge_jax.engine.fake import assemble_fake

        config = config or EngineConfig()
        parts = assemble_fake(
            config, step_time_s=step_time_s, max_model_len=max_model_len, check=check
        )
        if not publishes:
            return cls(parts, queue_limits)
        with Publisher.started(config) as publisher:
            return cls(parts, queue_limits, publisher)

    def publish_events(self, publish: Callable[[list[CacheEvent]], None]) -> None:
        """Pass the prefix cache's events to `publish`, in its thread. Call it before `start`."""
        self._core.publish_events(publish)

    def start(self) -> None:
        if not self.lifecycle.enter("serving"):
            raise AssertionError(f"start of an engine that is {self.lifecycle.state}")
        self._parts.startup.reached("serving")
        self.adapters.bind(
            num_requests_with=self.streams.num_requests_with,
            between_steps=self._thread.between_steps,
        )
        self._thread.start()
        late = self._parts.late
        if late is not None:
            activate = partial(self._thread.send, ActivateExecutables(late))
            activate = supervise.guarded(activate, "activating executables", self._thread_failed)
            late.on_compiled(activate)

    async def stop(self, drain_s: float = 0.0) -> None:
        if self.lifecycle.state == "stopped":
            return
        self.lifecycle.enter("stopping")
        if self._parts.late is not None:
            self._parts.late.cancel()
        if self._thread.started:
            await self.streams.drain(drain_s)
            self._thread.send(Stop())
            await asyncio.to_thread(self._thread.join)
            await asyncio.sleep(0)  # delivers the last outputs of the thread
            self.streams.fail(EngineError("the engine has been stopped"))
            if self.grammars is not None:
                self.grammars.close()
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.close)
        self.lifecycle.enter("stopped")

    def abort(self, request_id: str) -> None:
        if not self._preparation.abort(request_id):
            self._thread.send(Abort(request_id))

    async def prepare(self, params: SamplingParams) -> None:
        if params.structured_outputs is not None and self.grammars is not None:
            await self.grammars.compile_soon(params.structured_outputs)

    async def look(self) -> EngineState:
        return await asyncio.to_thread(self._look)

    def _look(self) -> EngineState:
        """Wait until the engine thread is between two steps, and capture its state there."""
        captures: list[Capture] = []
        self._thread.between_steps(lambda: captures.append(self._capture()))
        return captures[0].state()

    async def start_profile(self, folder: Path) -> None:
        await asyncio.to_thread(self._profiles().start, folder)

    async def stop_profile(self) -> None:
        await asyncio.to_thread(self._profiles().stop)

    def _profiles(self) -> Recorder:
        """Return the profile recorder. The first call imports JAX if it is not loaded."""
        if self._recorder is None:
            from forge_jax.telemetry.trace_recorder import Recorder

            steps = self._parts.steps
            self._recorder = Recorder(
                dict if steps is None else steps.compiled,
                self._parts.name,
                command_buffers=steps is not None and steps.command_buffers,
            )
        return self._recorder

    def stats(self) -> EngineStats:
        core, scheduler = self._core, self._core.scheduler
        pool = scheduler.pool
        return EngineStats(
            state=self.lifecycle.state,
            healthy=self.lifecycle.healthy and self._thread.alive,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + self._thread.gate.num_waiting,
            num_deferred=scheduler.num_deferred,
            num_slots=scheduler.config.max_num_seqs,
            policy=scheduler.config.policy,
            tensor_parallel=self._parts.shards,
            completed_requests=self.streams.num_completed,
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
            stalled_s=max(core.stalled_s, self._thread.turn_s),
            prefix_cache_queries=pool.queried_tokens,
            prefix_cache_hits=pool.hit_tokens,
            compilations_after_ready=self._parts.compilations(),
            step_phases=core.phases.totals(),
            startup_seconds=self._parts.startup.seconds,
            paused=self._control.paused,
            sleeping=self._control.sleeping,
            weight_version=core.weight_version,
            step_token_budget=scheduler.token_budget,
            expected_step_s=None if scheduler.budget is None else scheduler.budget.expected_s,
            speculation=None if core.speculator is None else core.speculator.stats(),
            host_kv=core.host_kv,
            dropped_kv_event_batches=(
                None if self._publisher is None else self._publisher.num_dropped
            ),
        )

    def _add(self, request: Request) -> None:
        self._thread.check_alive()
        self._preparation.submit(request)

    @property
    def model(self) -> Model:
        """The architecture, for `forge_jax.score` and other pure functions."""
        return self._weights.model

    @property
    def leaves(self) -> Leaves:
        """The current weights on the device, in the order of `model.names`.

        They are the engine's own arrays. Copy them before a step that donates them.
        """
        return self._weights.leaves

    @property
    def score_options(self) -> ScoreOptions:
        """The options with which `forge_jax.score` returns this engine's bits.

        Raises:
          ModelError: if the engine is not deterministic.
        """
        return self._weights.score_options

    @property
    def control(self) -> Control:
        """Pauses and sleep of this engine."""
        return self._control

    @property
    def weight_version(self) -> int:
        """The version of the current weights; 0 until `update_weights`."""
        return self._core.weight_version

    async def update_weights(
        self,
        weights: NewWeights,
        version: int | None = None,
        *,
        in_flight: InFlightRequests = "keep",
    ) -> None:
        await asyncio.to_thread(self._update_weights, weights, version, in_flight)

    def _update_weights(
        self, weights: NewWeights, version: int | None, in_flight: InFlightRequests
    ) -> None:
        check_in_flight(in_flight)
        new_version(version, self.weight_version)  # before anything is copied
        leaves = self._weights.prepare(weights)

        def update() -> None:
            self._weights.update(self._core, leaves, version, in_flight)
            self._control.weights_installed()

        self._thread.between_steps(update)
        fingerprint = self._parts.system_fingerprint
        self.system_fingerprint = versioned(fingerprint, self.weight_version)

    @property
    def _weights(self) -> EngineWeights:
        weights = self._parts.weights
        if weights is None:
            raise ModelError("this engine runs on a fake device, which has no weights")
        return weights

    def _capture(self) -> Capture:
        return self._core.watcher.capture()

    def _thread_failed(self, error: BaseException) -> None:
        """End every stream with an error. Thread-safe."""
        self.lifecycle.enter("failed")
        self.streams.fail_soon(EngineError(f"the engine failed: {type(error).__name__}"))

    def _fail(self, error: BaseException) -> None:
        self.lifecycle.enter("failed")
        self.streams.abort_all()  # otherwise they would still be computed
        self.streams.fail(EngineError(f"the engine failed: {type(error).__name__}"))


class EngineThread:
    """The thread of an engine core: takes commands, delivers outputs, and sleeps without work.

    Args:
      deliver: receives the outputs of steps; called in the thread.
      delay_s: returns how long outputs may wait for those of later steps, in seconds.
      on_error: called in the thread with an exception that ended it.
    """

    def __init__(
        self,
        parts: EngineParts,
        lifecycle: Lifecycle,
        *,
        deliver: Callable[[Iterable[Outputs]], None],
        delay_s: Callable[[], float],
        on_error: Callable[[BaseException], None],
    ):
        self._parts = parts
        self._core = parts.core
        self._lifecycle = lifecycle
        self._deliver = deliver
        self._delay_s = delay_s
        self._on_error = on_error
        self._clock = parts.clock
        self.gate = Gate()
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._while_ready = contextlib.ExitStack()
        self._held: list[Outputs] = []  # not yet delivered
        self._delivered_s = self._clock()
        self._turn_began_s: float | None = None  # None: the thread waits for work

    def start(self) -> None:
        if self._parts.late is None:
            self._ready()
        self._thread = supervise.start_thread(self._run, "forge-engine", self._failed)

    @property
    def started(self) -> bool:
        return self._thread is not None

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def turn_s(self) -> float:
        """Seconds since the current turn of the thread began. A command may hang."""
        began_s = self._turn_began_s
        return 0.0 if began_s is None else self._clock() - began_s

    def check_alive(self) -> None:
        """Raise EngineError if the thread has ended."""
        if not self.alive:
            raise EngineError("the engine does not accept requests: its thread has ended")

    def send(self, command: Command) -> None:
        """Queue a command, which runs before the next step. Thread-safe."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def between_steps(self, call: Callable[[], None]) -> None:
        """Call a function in the thread, between two steps, and wait for it. Thread-safe.

        Raises:
          EngineError: if the thread has ended.
          Exception: any that the function raises.
        """
        done: Future[None] = Future()
        self.send(Call(call, done))
        while True:
            try:
                return done.result(CALL_S)
            except TimeoutError:
                self.check_alive()

    def reopen(self) -> None:
        """Continue after a pause with the requests that waited. Call it in the thread."""
        self.gate.closed = False
        self.gate.idle(RequestError("the engine was resumed before its requests finished"))
        self._core.resume()
        for request in self.gate.take_requests():
            self._queue(request)

    def activate_held(self) -> None:
        """Run the activations that waited for the device's arrays. Call it in the thread."""
        self.gate.holds_activations = False
        for command in self.gate.take_activations():
            self._obey(command)

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join()

    # ---- in the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        core, commands = self._core, self._commands
        with self._while_ready, self._parts.guard():
            if self._lifecycle.state == "ready":
                self._while_ready.enter_context(short_pauses())
            while True:
                if not commands and not core.has_work:
                    self._sleep()
                self._turn_began_s = self._clock()
                while commands:
                    if not self._obey(commands.popleft()):
                        return
                outputs = core.tick(self._before_wait)
                self._before_wait()  # a tick that waited for no step has not called it
                if outputs:
                    self._held.append(outputs)
                if not core.has_work:
                    self._deliver_held()
                    if self.gate.awaits_idle and not core.scheduler.has_work:
                        core.pause()
                        self.gate.idle()

    def _sleep(self) -> None:
        self._turn_began_s = None
        with self._wake:
            while not self._commands:
                self._wake.wait()

    def _obey(self, command: Command) -> bool:
        """Run a command. Return False if it ends the thread."""
        if not isinstance(command, (Submit, Abort)):  # the other commands may take long
            self._deliver_held()
        match command:
            case Submit(request):
                self._admit(request)
            case Abort(request_id):
                self._abort(request_id)
            case ActivateExecutables() | ActivatePooling() if self.gate.holds_activations:
                self.gate.hold_activation(command)
            case Call():
                command.run()
            case ActivateExecutables(late):
                self._activate(late)
            case ActivatePooling(pooler):
                pooler.activate_pooling()
            case Stop():
                self.gate.idle(EngineError("the engine has been stopped"))
                for request in self.gate.take_requests():
                    self._deliver([{request.request_id: last_deltas(samples_of(request), "abort")}])
                self._deliver([self._core.drain()])
                return False
        return True

    def _admit(self, request: Request) -> None:
        if self.gate.closed:
            self.gate.hold(request)
        else:
            self._queue(request)

    def _abort(self, request_id: str) -> None:
        held = self.gate.drop(request_id)
        if held is None:
            self._core.abort(request_id)
        else:
            self._deliver([{request_id: last_deltas(samples_of(held), "abort")}])

    def _queue(self, request: Request) -> None:
        try:
            self._core.add(request)
        except BaseException as error:  # only this request fails
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            if not isinstance(error, ForgeError):
                log.exception("request %s could not be queued", request.request_id)
                error = EngineError("the request could not be queued")
            self._deliver([{request.request_id: last_deltas(samples_of(request), "error", error)}])

    def _activate(self, late: BackgroundCompile) -> None:
        """Use late executables. After the last of them, the engine is ready."""
        if late.activate() and self._ready():
            self._while_ready.enter_context(short_pauses())

    def _ready(self) -> bool:
        if not self._lifecycle.enter("ready"):
            return False
        self._parts.startup.reached("ready")
        log.info("ready; seconds by phase: %s", self._parts.startup)
        return True

    def _before_wait(self) -> None:
        """Deliver the latest outputs.

        The event loop needs the interpreter to process them, which would delay the dispatch of the
        next step. They are therefore held until this thread waits for the device.
        """
        if self._held and self._clock() - self._delivered_s >= self._delay_s():
            self._deliver_held()

    def _deliver_held(self) -> None:
        if not self._held:
            return
        with span("deliver"):
            self._deliver(self._held)
            self._held.clear()
        self._delivered_s = self._clock()
        self._core.phases.end("deliver")

    def _failed(self, error: BaseException) -> None:
        self._lifecycle.enter("failed")
        try:
            self._deliver_held()
        finally:
            self._on_error(error)
