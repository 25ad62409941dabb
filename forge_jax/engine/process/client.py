"""`EngineProcess`: the engine in another process, which may die and be replaced.

This process keeps all state that must survive: the accepted requests and their tokens so far. When
the engine process ends, for whatever reason, the `Supervisor` starts a new one. The `Journal` sends
it every unfinished request with its output so far. The request continues with the next token, like
a preempted sequence, and its reader sees a pause. In the deterministic tier, the tokens after the
pause have the same bits as without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

from forge_jax.checkpoint.hub import resolve
from forge_jax.config import EngineConfig
from forge_jax.engine.adapters import Adapters
from forge_jax.engine.async_engine import AsyncEngine, EngineStats
from forge_jax.engine.commands import Abort, Submit
from forge_jax.engine.fake import fake_chat_template, fake_tokenizer
from forge_jax.engine.gc_tuning import short_pauses
from forge_jax.engine.kv_events import Publisher
from forge_jax.engine.process.calls import Calls
from forge_jax.engine.process.journal import Journal
from forge_jax.engine.process.launcher import ChildProcess, Launcher, launch
from forge_jax.engine.process.messages import (
    FromEngine,
    Hello,
    KVEventBatch,
    Looked,
    LoraLoaded,
    Profiled,
    Start,
    Stats,
    UnloadLora,
    Updates,
    frame,
)
from forge_jax.engine.process.supervisor import Hooks, Supervisor
from forge_jax.engine.streams import QueueLimits
from forge_jax.errors import EngineError, ForgeError, LostAdapterError, OverloadedError, StepError
from forge_jax.grammar import GrammarCompiler
from forge_jax.schedule.cache_events import AllBlocksCleared
from forge_jax.schedule.request import FinishReason, Request
from forge_jax.telemetry.engine_state import EngineState
from forge_jax.telemetry.log import LogFormat
from forge_jax.text import ChatTemplate, Tokenizer
from forge_jax.text.load import load_text

PROFILE_PATIENCE = 4.0  # factor on the timeout, because writing a profile may block the interpreter
STOP_TURNS = 20  # turns of 10 ms to wait for the last deltas of aborted requests

log = logging.getLogger(__name__)


class EngineProcess(AsyncEngine):
    """An engine in another process, which is replaced if it dies. Create it with `load`."""

    def __init__(
        self,
        start: Start,
        process: ChildProcess,
        *,
        queue_limits: QueueLimits | None = None,
        publisher: Publisher | None = None,
        clock: Callable[[], float] = time.monotonic,
        sibling: EngineProcess | None = None,
    ):
        """Use `load`, except for several engines of one model.

        Args:
          start: configuration of the process's successors.
          process: the first process.
          sibling: an engine of the same model, with which this one shares tokenizer and grammars.
        """
        model, hello = start.config.model, process.hello
        super().__init__(rng=random.Random(model.seed), clock=clock, queue_limits=queue_limits)
        self.num_restarts = 0
        # Returns True if other engines have taken the requests with `suspend`.
        self.fail_over: Callable[[], bool] = lambda: False
        self._publisher = publisher
        self.pooling = model.pooling
        self._journal = Journal()
        self._pauses = contextlib.ExitStack()
        self._calls = Calls(self.lifecycle, lambda message: self._supervisor.send(message))
        self.adapters = Adapters(hello.lora_places, self._calls.install, hello.adapters)
        self.adapters.bind(num_requests_with=self.streams.num_requests_with)
        self._introduce(hello)
        if sibling is not None:
            self.tokenizer, self.chat_template = sibling.tokenizer, sibling.chat_template
            self.grammars = sibling.grammars
        else:
            self.tokenizer, self.chat_template = _load_text(start, self.vocab_size)
            self.grammars = GrammarCompiler(self.tokenizer, self.vocab_size, hello.end_ids)
        hooks = Hooks(
            introduce=self._introduce,
            connected=self._send_unsent,
            receive=self._receive,
            died=self._died,
            exhausted=self._exhausted,
            fail=self._fail,
            patience=lambda: PROFILE_PATIENCE if self._calls.profiling else 1.0,
        )
        launcher = Launcher(start, process, self.adapters)
        self._supervisor = Supervisor(
            process, launcher, self.lifecycle, hooks, self._journal, clock
        )

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        queue_limits: QueueLimits | None = None,
        log_format: LogFormat = "text",
    ) -> EngineProcess:
        """Start the process and load the model. Block until it can serve.

        Args:
          log_format: the format of the process's log, which is written to this process's stderr.

        Raises:
          ModelError: if the model cannot be served. The message names the reason.
          ConfigError: if the configuration does not fit the model or the machine.
          EngineError: if the process could not be started, ended, or froze.
        """
        start = Start(config, log_format=log_format)
        with Publisher.started(config) as publisher:  # first: an address may be in use
            return cls(start, launch(start), queue_limits=queue_limits, publisher=publisher)

    @classmethod
    def fake(
        cls,
        *,
        step_time_s: float = 0.0,
        max_model_len: int = 4096,
        config: EngineConfig | None = None,
        queue_limits: QueueLimits | None = None,
        log_format: LogFormat = "text",
    ) -> EngineProcess:
        """Start a process with an engine on a fake device, like `Engine.fake`."""
        config = config or EngineConfig()
        start = Start(config, True, step_time_s, max_model_len, log_format=log_format)
        with Publisher.started(config) as publisher:
            return cls(start, launch(start), queue_limits=queue_limits, publisher=publisher)

    @property
    def pid(self) -> int | None:
        """Process id of the latest process; None after `stop`."""
        return self._supervisor.pid

    @property
    def connected(self) -> bool:
        """True if a process can be called now."""
        return self._supervisor.connected

    @property
    def stalled_s(self) -> float:
        """Seconds without a completed step while there is work, or without a heartbeat."""
        return max(self._stats.stalled_s, self._supervisor.silent_s - 1.0, 0.0)

    async def settled(self) -> None:
        """Wait until a process is connected, or never will be, or the engine is unavailable."""
        await self._supervisor.settled()

    def start(self) -> None:
        """Connect to the process on the running event loop."""
        if self.lifecycle.state != "starting":
            raise AssertionError(f"start of an engine that is {self.lifecycle.state}")
        self._pauses.enter_context(short_pauses())
        self.streams.attach_loop()
        self._calls.attach_loop()
        self._supervisor.start()

    async def stop(self, drain_s: float = 0.0) -> None:
        self.lifecycle.enter("stopping")
        await self.streams.drain(drain_s)
        for _ in range(STOP_TURNS):
            if not self.streams or not self._supervisor.connected:
                break
            await asyncio.sleep(0.01)
        self.lifecycle.enter("stopped")
        self._calls.end(EngineError("the engine was stopped while the adapter was loaded"))
        await self._supervisor.stop()
        self.streams.fail(EngineError("the engine has been stopped"))
        self._pauses.close()
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.close)
        if self.grammars is not None:
            self.grammars.close()

    def suspend(self) -> list[Request]:
        """Make the engine unavailable until a successor starts. Remove and return its requests.

        Their streams get no more deltas. The other engines of a group compute their rest.
        """
        self.lifecycle.enter("unavailable")
        requests = self._journal.release()
        for request in requests:
            self.streams.discard(request.request_id)
        # The last statistics of the dead process would show load that no longer exists.
        self._stats = dataclasses.replace(
            self._stats,
            **dict.fromkeys(("num_running", "num_waiting", "num_deferred", "num_used_blocks"), 0),
            num_cached_blocks=0,
            num_free_blocks=self._stats.num_blocks,
            stalled_s=0.0,
        )
        return requests

    def abort(self, request_id: str) -> None:
        entry = self._journal.find(request_id)
        if entry is None:
            return
        if entry.sent and self._supervisor.send(Abort(request_id)):
            entry.aborted = True
        else:
            self._end(request_id, "abort")

    async def load_lora(self, name: str, path: str) -> None:
        await self.settled()
        await super().load_lora(name, path)

    async def unload_lora(self, name: str) -> None:
        await self.settled()
        await super().unload_lora(name)
        self._supervisor.send(UnloadLora(name))

    async def drop_lora(self, name: str) -> None:
        """Remove an adapter, if it is loaded, without checking for requests that use it."""
        await self.settled()
        self.adapters.drop(name)
        self._supervisor.send(UnloadLora(name))

    def stats(self) -> EngineStats:
        return dataclasses.replace(
            self._stats,
            state=self.lifecycle.state,
            healthy=self.lifecycle.healthy,
            stalled_s=self.stalled_s,
            restarts=self.num_restarts,
            completed_requests=self.streams.num_completed,
            dropped_kv_event_batches=(
                None if self._publisher is None else self._publisher.num_dropped
            ),
        )

    async def look(self) -> EngineState:
        return await self._calls.look()

    async def start_profile(self, folder: Path) -> None:
        await self._calls.profile(folder)

    async def stop_profile(self) -> None:
        await self._calls.profile(None)

    # ---- requests ------------------------------------------------------------------------------

    def _add(self, request: Request) -> None:
        message = Submit(request)
        sent = not self._journal.searching and self._supervisor.send(message)
        if not sent:
            # Raise now if it cannot be encoded, because sending it to a later process would fail.
            frame(message)
        self._journal.accept(request, sent=sent)

    def _send_unsent(self) -> None:
        """Send the requests that may run and that the connected process does not have."""
        if self._supervisor.connected:
            for request in self._journal.unsent():
                self._supervisor.send(Submit(request))

    def _end(self, request_id: str, reason: FinishReason, error: ForgeError | None = None) -> None:
        """End the rest of a request without the process."""
        outputs, may_run = self._journal.end(request_id, reason, error)
        if may_run:
            self._send_unsent()
        self.streams.deliver_now(outputs)

    def _fail(self, error: BaseException) -> None:
        if not self.lifecycle.enter("failed"):
            return
        log.error("the engine failed and will not be restarted: %s", error)
        self._supervisor.give_up()
        self._journal.clear()
        self._calls.end(EngineError("the engine failed while the adapter was loaded"))
        reason = str(error) if isinstance(error, ForgeError) else type(error).__name__
        self.streams.fail(EngineError(f"the engine failed: {reason}"))

    # ---- called by the supervisor --------------------------------------------------------------

    def _introduce(self, hello: Hello) -> None:
        """Adopt the properties of a process. End requests whose adapters or vectors are lost."""
        steering = self.limits.steering
        self.name, self.max_model_len = hello.name, hello.max_model_len
        self.system_fingerprint = hello.system_fingerprint
        self.architecture = hello.architecture
        self.limits, self.vocab_size = hello.limits, hello.limits.vocab_size
        self._stats = hello.stats
        for name, reason in hello.lost_adapters.items():
            log.error("the LoRA adapter %s could not be reloaded: %s", name, reason)
            self.adapters.drop(name)
            error = LostAdapterError(
                "the LoRA adapter could not be reloaded after the engine crashed: its files "
                "are missing or have changed"
            )
            for request_id in self._journal.requests_with(name):
                self._end(request_id, "error", error)
        if hello.limits.steering != steering:
            error = EngineError(
                "a file of --steering-vectors changed while the engine restarted after a crash: "
                "send the request again"
            )
            for request_id in self._journal.steered():
                self._end(request_id, "error", error)

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Updates():
                outputs = message.to_outputs()
                if self._journal.take(outputs):
                    self._send_unsent()
                self.streams.deliver_now(outputs)
            case Stats(stats):
                self._stats = stats
            case KVEventBatch(ts, events):
                if self._publisher is not None:
                    self._publisher.publish(events, ts)
            case Looked() | Profiled() | LoraLoaded():
                self._calls.answer(message)
            case _:
                pass  # a heartbeat

    def _died(self) -> None:
        self.num_restarts += 1
        if self._publisher is not None:
            self._publisher.publish([AllBlocksCleared()])
        self._calls.end(
            OverloadedError(
                "the engine crashed while it loaded the adapter, and is restarting without "
                "it: load the adapter again"
            )
        )
        aborted, culprits = self._journal.crashed()
        for request_id in aborted:
            self._end(request_id, "abort")
        for request_id in culprits:
            log.error("request %s ended: the engine crashed at every attempt to run it", request_id)
            error = StepError("the engine crashed at every attempt to run this request")
            self._end(request_id, "error", error)

    def _exhausted(self) -> bool:
        return self.lifecycle.state in ("recovering", "unavailable") and self.fail_over()


def _load_text(start: Start, vocab_size: int) -> tuple[Tokenizer | None, ChatTemplate | None]:
    if start.fake:
        return fake_tokenizer(), fake_chat_template()
    model = start.config.model
    return load_text(resolve(model.model, model.revision), model.chat_template, vocab_size)
