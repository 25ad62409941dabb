"""`EngineProcess`: the async face of an engine in another process, which may die and be replaced.

All that must survive is here: the requests that were accepted and the tokens that were put out.
When the process ends, whatever the reason, a new one is started, and every request that was not
finished is sent to it with its output so far. It goes on with the next token, as a preempted
sequence does, and its reader sees a pause. In the deterministic tier the tokens after it are those
that would have come without. A process that is frozen is killed first (`Watchdog`).
"""

# `EngineProcess` and `_Connection` use each other's private methods. Messages that no case takes
# are answers to calls that nobody awaits any more.
# pyright: reportPrivateUsage=false, reportMatchNotExhaustive=false

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from forge_jax.checkpoint.hub import resolve
from forge_jax.config import EngineConfig
from forge_jax.engine.adapters import Adapters, LoadedAdapter, Run
from forge_jax.engine.async_engine import AsyncEngine, EngineStats, QueueLimits
from forge_jax.engine.core import Limits
from forge_jax.engine.fake import fake_chat_template, fake_tokenizer
from forge_jax.engine.fault_isolation import Bisection
from forge_jax.engine.gc_tuning import short_pauses
from forge_jax.engine.process.backoff import Backoff
from forge_jax.engine.process.messages import (
    Abort,
    Frames,
    FromEngine,
    Hello,
    Loading,
    LoadLora,
    Look,
    Looked,
    LoraLoaded,
    Profile,
    Profiled,
    Refused,
    Start,
    Stats,
    Submit,
    ToEngine,
    UnloadLora,
    Updates,
    decoded,
    frame,
    from_engine,
)
from forge_jax.engine.process.watchdog import LOOK_S, Watchdog
from forge_jax.errors import EngineError, ForgeError, LostAdapterError, OverloadedError, StepError
from forge_jax.grammar import GrammarCompiler
from forge_jax.host import supervise
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.request import LoraRef, Request
from forge_jax.telemetry.engine_state import EngineState
from forge_jax.telemetry.log import LogFormat
from forge_jax.text.load import load_text

MAX_LAUNCHES = 5  # that may fail one after the other
RECEIVE_BYTES = 1 << 20
EXIT_S = 5.0  # for the process to end by itself
KILL_S = 10.0  # for a process to end that has been killed: not in the middle of a driver's call
# A successor finds what the first process downloaded and compiled. It gets so many times as long.
LAUNCH_FACTOR = 10
PROFILE_ALLOWANCE = 4.0  # times the timeout: a profile that is written may hold the interpreter
WORKER = ("-m", "forge_jax.engine.process.worker")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    """A request that has been accepted, and what its samples have put out."""

    request: Request
    outputs: dict[int, list[int]]  # of the samples that have not finished
    num_tokens: int = 0  # of all samples
    sent: bool = False  # to the process that there is
    aborted: bool = False

    def remaining(self) -> Request:
        """What is left to do."""
        outputs = {index: tuple(tokens) for index, tokens in self.outputs.items()}
        return dataclasses.replace(self.request, outputs=outputs)

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self.outputs.pop(delta.index, None)
            elif delta.index in self.outputs:
                self.outputs[delta.index] += delta.token_ids
            self.num_tokens += len(delta.token_ids)


@dataclass
class _Process:
    """An engine process that has said hello."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    hello: Hello
    frames: Frames = field(default_factory=Frames)
    early: list[FromEngine] = field(default_factory=list[FromEngine])  # came right behind the hello
    launch_s: float = 0.0  # until the hello

    def end(self) -> str:
        """Ends it, at once if need be; how it ended."""
        self.sock.close()
        return _ended(self.process)


class _Birth:
    """A process that is being started by one thread, and may be given up by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up = False

    def begun(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._process = process
            if self._given_up:
                process.kill()

    def give_up(self) -> None:
        """Kill the process that there is, or will be: `_launch` fails soon."""
        with self._lock:
            self._given_up = True
            if self._process is not None:
                self._process.kill()


class EngineProcess(AsyncEngine):
    """The engine that `load` has started in another process."""

    def __init__(
        self,
        start: Start,
        process: _Process,
        *,
        queue_limits: QueueLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        rng = random.Random(start.config.model.seed)
        super().__init__(rng=rng, clock=clock, queue_limits=queue_limits)
        self.num_restarts = 0
        self._start_message = start
        self._process: _Process | None = process
        self._transport: asyncio.WriteTransport | None = None
        self._connection: _Connection | None = None  # whose transport that is
        self._timeout_s = start.config.parallel.engine_timeout_s
        self._watchdog = Watchdog(self._timeout_s)
        self._watching: asyncio.Task[None] | None = None
        self._backoff = Backoff(clock)
        # None: no limit but the watchdog's.
        self._launch_limit_s = (
            self._timeout_s + LAUNCH_FACTOR * process.launch_s if self._timeout_s else None
        )
        self._journal: dict[str, _Entry] = {}
        self._bisection: Bisection[str] = Bisection()
        self._pauses = contextlib.ExitStack()
        self._heard_s = clock()  # when the process last said something
        self._recovery: asyncio.Task[None] | None = None
        self._profiling: deque[asyncio.Future[None]] = deque()  # until the process answers
        self._looking: deque[asyncio.Future[EngineState]] = deque()  # likewise
        self._introduce(process.hello)
        self.pooling = start.config.model.pooling
        if start.fake:
            self.tokenizer, self.chat_template = fake_tokenizer(), fake_chat_template()
        else:
            model = start.config.model
            folder = resolve(model.model, model.revision)
            self.tokenizer, self.chat_template = load_text(
                folder, model.chat_template, self.vocab_size
            )
        self.grammars = GrammarCompiler(self.tokenizer, self.vocab_size, process.hello.end_ids)
        self._loading: dict[str, Future[LoadedAdapter]] = {}  # adapters, by identity
        places = process.hello.lora_places
        if places:
            self.adapters = Adapters(places, self._install, process.hello.adapters)
            model = dataclasses.replace(start.config.model, lora=(), max_loras=places)
            self._again = dataclasses.replace(start.config, model=model)  # for a new process
        else:
            self._again = start.config

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        queue_limits: QueueLimits | None = None,
        log_format: LogFormat = "text",
    ) -> EngineProcess:
        """Starts the process and has it load the model; blocks until it can serve.

        Args:
          log_format: of the process's log, which goes to the same stderr.

        Raises:
          ModelError: the model cannot be served; the message says why.
          ConfigError: the configuration does not fit the model or the machine.
          EngineError: the process could not be started, or ended, or is frozen.
        """
        start = Start(config, log_format=log_format)
        return cls(start, _launch(start, _Birth()), queue_limits=queue_limits)

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
        """The same on a fake device, as `Engine.fake`."""
        config = config or EngineConfig()
        start = Start(config, True, step_time_s, max_model_len, log_format=log_format)
        return cls(start, _launch(start, _Birth()), queue_limits=queue_limits)

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.process.pid

    @property
    def limits(self) -> Limits:
        return self._limits

    def start(self) -> None:
        """Begins to listen to the process. To be called on the event loop; it stays that loop."""
        assert self._state == "starting" and self._process is not None
        self._state = self._stats.state
        self._pauses.enter_context(short_pauses())
        self._attach_loop()
        self._recovery = supervise.start_task(
            self._begin(self._process), "connecting to the engine process", self._give_up
        )
        self._watching = supervise.start_task(
            self._watch(), "the watchdog of the engine process", self._give_up
        )

    async def stop(self, drain_s: float = 0.0) -> None:
        """Takes no more requests, waits up to `drain_s` for the running ones, aborts the rest."""
        if self._state != "failed":
            self._state = "stopping"
        await self._drain(drain_s)
        for _ in range(20):  # the last deltas of what was aborted
            if not self._streams or self._transport is None:
                break
            await asyncio.sleep(0.01)
        self._state = "stopped"
        tasks = [task for task in (self._recovery, self._watching) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._disconnect()
        self._give_up_loading(EngineError("the engine was stopped while the adapter was loaded"))
        self._end_asking()
        if self._process is not None:
            process, self._process = self._process, None
            await asyncio.to_thread(process.end)
        self._fail(EngineError("the engine has been stopped"))
        self._pauses.close()
        if self.grammars is not None:
            self.grammars.close()

    def abort(self, request_id: str) -> None:
        """Gives a request up; its stream ends with finish reason "abort"."""
        entry = self._journal.get(request_id)
        if entry is None:
            return
        if self._transport is not None and entry.sent:
            entry.aborted = True
            self._send(Abort(request_id))
        else:
            self._end(request_id, "abort")

    # ---- LoRA adapters -------------------------------------------------------------------------

    def _install(self, ref: LoraRef, path: str, run: Run) -> LoadedAdapter:
        done: Future[LoadedAdapter] = Future()
        run(partial(self._ask_for, ref, path, done))
        return done.result()

    def _between_steps(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        asked: Future[None] = Future()

        def ask() -> None:
            try:
                call()
            except Exception as error:
                asked.set_exception(error)
            else:
                asked.set_result(None)

        self._loop.call_soon_threadsafe(ask)
        asked.result()

    def _ask_for(self, ref: LoraRef, path: str, done: Future[LoadedAdapter]) -> None:
        if self._state in ("failed", "stopped"):
            raise EngineError(f"the engine loads no adapters: it is {self._state}")
        if self._transport is None:
            raise OverloadedError("the engine is being started again: try again later")
        self._loading[ref.identity] = done
        self._send(LoadLora(ref, path))

    async def load_lora(self, name: str, path: str) -> None:
        await self._settled()
        await super().load_lora(name, path)

    async def unload_lora(self, name: str) -> None:
        await self._settled()
        await super().unload_lora(name)
        self._send(UnloadLora(name))

    async def _settled(self) -> None:
        """Until there is a process that listens, or never will be one."""
        if self._recovery is not None:
            await asyncio.wait([self._recovery])

    def _give_up_loading(self, error: ForgeError) -> None:
        """End each load that waits for the answer of a process that will not come."""
        loading, self._loading = self._loading, {}
        for done in loading.values():
            done.set_exception(error)

    def _lose(self, name: str, reason: str) -> None:
        """Ends what takes an adapter that the new process could not load again."""
        assert self.adapters is not None
        log.error("the LoRA adapter %s is lost: %s", name, reason)
        self.adapters.drop(name)
        error = LostAdapterError(
            "the LoRA adapter could not be loaded again after the engine's crash: its files are "
            "missing, or have changed"
        )
        for request_id, entry in list(self._journal.items()):
            if entry.request.lora is not None and entry.request.lora.name == name:
                self._end(request_id, "error", error)

    def stats(self) -> EngineStats:
        silent_s = 0.0
        if self._transport is not None:
            silent_s = self._clock() - self._heard_s
        return dataclasses.replace(
            self._stats,
            state=self._state,
            healthy=self._state in ("serving", "ready", "stopping"),
            stalled_s=max(self._stats.stalled_s, silent_s - 1.0, 0.0),
            restarts=self.num_restarts,
            completed_requests=self._num_completed,
        )

    async def look(self) -> EngineState:
        if self._transport is None:
            raise EngineError("there is no engine process at the moment")
        answer: asyncio.Future[EngineState] = asyncio.get_running_loop().create_future()
        self._looking.append(answer)
        self._send(Look())
        return await answer

    async def start_profile(self, folder: Path) -> None:
        await self._profile(str(folder.absolute()))

    async def stop_profile(self) -> None:
        await self._profile(None)

    async def _profile(self, folder: str | None) -> None:
        if self._transport is None:
            raise EngineError("there is no engine process at the moment")
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._profiling.append(answer)
        self._send(Profile(folder))
        await answer

    def _end_asking(self) -> None:
        """Whoever waits for an answer of a process that has ended waits in vain."""
        for answers in (self._profiling, self._looking):
            while answers:
                answer = answers.popleft()
                if not answer.done():
                    answer.set_exception(EngineError("the engine process has ended"))

    # ---- requests ------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        pass  # the state says it: what waits for a new process is not lost

    def _add(self, request: Request) -> None:
        outputs: dict[int, list[int]] = {index: [] for index in range(request.params.n)}
        entry = self._journal[request.request_id] = _Entry(request, outputs)
        if self._transport is not None and not self._bisection.active:
            entry.sent = True
            self._send(Submit(request))

    def _send(self, message: ToEngine) -> None:
        if self._transport is not None:
            self._transport.write(frame(message))

    def _end(self, request_id: str, reason: str, error: ForgeError | None = None) -> None:
        """Ends what is left of a request without asking the process."""
        entry = self._journal.pop(request_id)
        self._cleared([request_id])
        ends = [Delta(i, finish_reason=reason, error=error) for i in entry.outputs]  # type: ignore[arg-type]
        self._updates.append({request_id: ends})
        self._fan_out()

    def _send_what_may_run(self) -> None:
        """Sends what has not been sent yet: all, or those among which a culprit is looked for."""
        if self._transport is None:
            return
        only = self._bisection.only
        for request_id in self._journal if only is None else only:
            entry = self._journal[request_id]
            if not entry.sent:
                entry.sent = True
                self._send(Submit(entry.remaining()))

    def _cleared(self, request_ids: Iterable[str]) -> None:
        """These got a token, or ended: they are nobody's crash."""
        if self._bisection.drop(request_ids):
            self._send_what_may_run()

    # ---- the process ---------------------------------------------------------------------------

    def _introduce(self, hello: Hello) -> None:
        self.name, self.max_model_len = hello.name, hello.max_model_len
        self.system_fingerprint = hello.system_fingerprint
        self.architecture = hello.architecture
        self._limits, self.vocab_size = hello.limits, hello.limits.vocab_size
        self._stats = hello.stats

    async def _begin(self, process: _Process) -> None:
        if not await self._connect(process):
            self._died(process)

    async def _connect(self, process: _Process) -> bool:
        """Listens to a process, and gives it what is not finished and may run.

        Returns False if the process has ended already.
        """
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_unix_connection(
            lambda: _Connection(self, process), sock=process.sock
        )
        if connection.lost or transport.is_closing():
            return False
        if self._state in ("failed", "stopped"):
            transport.abort()
            raise EngineError("the engine failed while its process was connected")
        self._transport, self._connection = transport, connection
        self._heard_s = self._clock()
        self._watchdog.begin()
        self._backoff.begin()
        if self._state == "recovering":
            self._state = self._stats.state
        self._send_what_may_run()
        return True

    def _disconnect(self) -> None:
        transport, self._transport, self._connection = self._transport, None, None
        if transport is not None:
            transport.abort()

    async def _watch(self) -> None:
        """Kills a process that is frozen; its streams go on in the next one."""
        while self._state not in ("stopped", "failed"):
            await asyncio.sleep(LOOK_S)
            if self._transport is None or self._process is None:
                continue
            why = self._watchdog.look(PROFILE_ALLOWANCE if self._profiling else 1.0)
            if why is not None:
                log.error("the engine process %s: it is killed and replaced", why)
                self._process.process.kill()
                self._transport.abort()

    def _receive(self, message: FromEngine) -> None:  # noqa: C901
        self._heard_s = self._clock()
        match message:
            case Updates():
                self._watchdog.progress()
                self._backoff.progress()
                outputs = message.to_outputs()
                for request_id, deltas in outputs.items():
                    entry = self._journal.get(request_id)
                    if entry is not None:
                        entry.take(deltas)
                        if not entry.outputs:
                            del self._journal[request_id]
                self._updates.append(outputs)
                self._cleared(outputs)
                self._fan_out()
            case Stats():
                self._watchdog.beat(message.stats.stalled_s)
                self._stats = message.stats
                if self._state in ("serving", "ready") and message.stats.state != "failed":
                    self._state = message.stats.state
            case LoraLoaded(identity, adapter, error):
                done = self._loading.pop(identity, None)
                if done is not None and adapter is not None:
                    done.set_result(adapter)
                elif done is not None:
                    assert error is not None
                    done.set_exception(error.error())
            case Profiled(error) if self._profiling:
                answer = self._profiling.popleft()
                if answer.done():  # nobody waits for it any more
                    return
                if error is None:
                    answer.set_result(None)
                else:
                    answer.set_exception(error.error())

            case Looked(state, error) if self._looking:
                looking = self._looking.popleft()
                if looking.done():
                    return
                if state is not None:
                    looking.set_result(state)
                else:
                    assert error is not None
                    looking.set_exception(error.error())

    def _lost(self, connection: _Connection) -> None:
        """A connection has ended, and its process with it."""
        if connection is self._connection:  # else nobody listens to it
            self._died(connection.process)

    def _died(self, process: _Process) -> None:
        self._disconnect()
        process.process.kill()
        self._give_up_loading(
            OverloadedError(
                "the engine died while it loaded the adapter, and is being started again without "
                "it: load the adapter again"
            )
        )
        self._end_asking()
        if self._state not in ("serving", "ready", "stopping"):
            return
        if self._state != "stopping":
            self._state = "recovering"
        self.num_restarts += 1
        self._backoff.died()
        reached: list[tuple[str, int]] = []
        for request_id, entry in list(self._journal.items()):
            if entry.aborted:
                self._end(request_id, "abort")
            elif entry.sent:
                entry.sent = False
                reached.append((request_id, entry.num_tokens))
        for request_id in self._bisection.failed(reached):
            log.error("request %s: the engine crashed each time that it ran: given up", request_id)
            error = StepError("the engine crashed each time it computed this request")
            self._end(request_id, "error", error)
        self._recovery = supervise.start_task(
            self._recover(process), "the recovery of the engine process", self._give_up
        )

    async def _recover(self, process: _Process) -> None:
        ending = await asyncio.to_thread(process.end)
        log.error(
            "the engine process %s; %d requests wait for the next", ending, len(self._journal)
        )
        for _ in range(MAX_LAUNCHES):
            await asyncio.sleep(self._backoff.pause_s)
            new = await self._launch_again()
            if new is None:
                self._backoff.launch_failed()
                continue
            self._process = new
            self._introduce(new.hello)
            for name, reason in new.hello.lost_adapters.items():
                self._lose(name, reason)
            if await self._connect(new):
                log.info("a new engine process goes on with %d requests", len(self._journal))
                return
            ending = await asyncio.to_thread(new.end)
            log.error("the new engine process %s before it was sent anything", ending)
            self._backoff.launch_failed()
        self._give_up(EngineError(f"its process could not be started {MAX_LAUNCHES} times"))

    async def _launch_again(self) -> _Process | None:
        """A process that has said hello; None, and a line in the log, if there is none."""
        # The dead process's answer may have come just before its end. No load begins meanwhile.
        loras = [] if self.adapters is None else await asyncio.to_thread(self.adapters.settled)
        start = msgspec.structs.replace(self._start_message, config=self._again, adapters=loras)
        birth = _Birth()
        launching = supervise.start_task(
            asyncio.to_thread(_launch, start, birth, self._launch_limit_s),
            "the launch of an engine process",
            None,
            expected=(Exception,),  # it is logged here
        )
        try:
            return await asyncio.shield(launching)
        except asyncio.CancelledError:
            birth.give_up()
            await asyncio.wait([launching])
            if launching.exception() is None:
                await asyncio.to_thread(launching.result().end)
            raise
        except ForgeError as error:
            log.error("the engine process could not be started again: %s", error)
        except Exception:
            log.exception("the engine process could not be started again")
        return None

    def _give_up(self, error: BaseException) -> None:
        """Nothing will be computed any more: every stream ends with an error."""
        if self._state in ("failed", "stopped"):
            return
        self._state = "failed"
        log.error("the engine failed, and will not be started again: %s", error)
        self._disconnect()
        if self._process is not None:
            self._process.process.kill()
        self._journal.clear()
        self._bisection = Bisection()
        self._give_up_loading(EngineError("the engine failed while the adapter was loaded"))
        self._end_asking()
        reason = str(error) if isinstance(error, ForgeError) else type(error).__name__
        self._fail(EngineError(f"the engine failed: {reason}"))

    _broken = _give_up


class _Connection(asyncio.Protocol):
    def __init__(self, engine: EngineProcess, process: _Process):
        self._engine = engine
        self.process = process
        self.lost = False

    def connection_made(self, transport: asyncio.WriteTransport) -> None:  # type: ignore[override]
        self._transport = transport
        self._receive(self.process.early)

    def data_received(self, data: bytes) -> None:
        try:
            messages = list(decoded(self.process.frames, data, from_engine))
        except ValueError:
            log.exception("the engine process says what nobody understands")
            self._transport.abort()
        else:
            self._receive(messages)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        supervise.guarded(self._engine._lost, "the end of a connection", self._engine._give_up)(
            self
        )

    def _receive(self, messages: list[FromEngine]) -> None:
        # What raises here may have been half done: journal and streams could differ.
        receive = supervise.guarded(
            self._engine._receive, "a message of the engine process", self._engine._give_up
        )
        for message in messages:
            receive(message)


def _launch(start: Start, birth: _Birth, limit_s: float | None = None) -> _Process:
    """Starts a process and waits until it can serve.

    Args:
      birth: gives it up, from another thread.
      limit_s: seconds that it may take altogether; None: as long as it has a heartbeat.

    Raises:
      ForgeError: it cannot, for a reason of its own; or it ended, or it is frozen.
    """
    begun_s = time.monotonic()
    ours, theirs = socket.socketpair()
    command = [sys.executable, *WORKER, str(theirs.fileno())]
    try:
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        ours.close()
        raise EngineError(f"the engine process could not be started: {error.strerror}") from error
    finally:
        theirs.close()
    birth.begun(process)
    try:
        hello, frames, early = _await_hello(ours, start, limit_s)
    except BaseException as error:
        ours.close()
        if isinstance(error, ConnectionError):
            ending = _ended(process)
            message = f"the engine process {ending} before it could serve: see its log"
            raise EngineError(message) from error
        _kill(process)
        if isinstance(error, OSError | ValueError):
            raise EngineError(f"the engine process cannot be talked to: {error}") from error
        raise
    return _Process(process, ours, hello, frames, early, time.monotonic() - begun_s)


def _await_hello(
    sock: socket.socket, start: Start, limit_s: float | None
) -> tuple[Hello, Frames, list[FromEngine]]:
    """Sends a process what to load, and waits until it can serve: what it says then.

    Raises:
      ConnectionError: it has ended.
      EngineError: it is frozen.
      ForgeError: it cannot serve, for a reason of its own.
    """
    timeout_s = start.config.parallel.engine_timeout_s
    silence, launch, frames = Watchdog(timeout_s), Watchdog(limit_s or 0.0), Frames()
    sock.settimeout(timeout_s or None)
    sock.sendall(frame(start))
    sock.settimeout(LOOK_S)
    while True:
        why = silence.look()
        if why is None and launch.look() is not None:
            why = f"could not serve after {limit_s:.0f} s"
        if why is not None:
            raise EngineError(f"the engine process {why} while it started: it was killed")
        try:
            data = sock.recv(RECEIVE_BYTES)
        except TimeoutError:
            continue
        if not data:
            raise ConnectionResetError
        silence.beat()
        messages = decoded(frames, data, from_engine)
        match [message for message in messages if not isinstance(message, Loading)]:
            case [Hello() as hello, *early]:
                return hello, frames, early
            case [Refused(error), *_]:
                raise error.error()


def _ended(process: subprocess.Popen[bytes]) -> str:
    """How a process ended that has closed its connection, and may take a moment to go."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = process.wait(EXIT_S)
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> str:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_S)
        return "was killed"
    log.error(
        "the engine process %d does not end, though it was killed: it hangs in the kernel, and may "
        "still hold the device's memory",
        process.pid,
    )
    return "does not end"
