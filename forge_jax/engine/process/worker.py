"""The engine process: loads a model, serves one connection, and exits when it closes.

    python -m forge_jax.engine.process.worker FILE_DESCRIPTOR [CPU ...]

The peer keeps all state that must survive, so this process saves nothing. When the connection
closes, for whatever reason, the process exits at once. The operating system then frees its memory
and the device's.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from forge_jax.config import EngineConfig
from forge_jax.config.kv_events import read_kv_events
from forge_jax.engine.async_engine import EngineStats
from forge_jax.engine.commands import Abort, Submit
from forge_jax.engine.core import Outputs
from forge_jax.engine.kv_events import encoded
from forge_jax.engine.process.messages import (
    Frames,
    FromEngine,
    Hello,
    KVEventBatch,
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
    ToEngine,
    UnloadLora,
    Updates,
    WireError,
    decoded,
    frame,
    to_engine,
)
from forge_jax.engine.streams import last_deltas, samples_of
from forge_jax.engine.thread import Engine
from forge_jax.errors import EngineError, ForgeError, RequestError
from forge_jax.host import supervise
from forge_jax.schedule.cache_events import CacheEvent
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.request import LoraRef, Request
from forge_jax.telemetry.log import configure
from forge_jax.telemetry.memory import share_host_memory

STATS_S = 0.05  # interval between messages while stats change
IDLE_STATS_S = 0.5  # interval while they do not

log = logging.getLogger(__name__)


class _Worker(asyncio.Protocol):
    def __init__(self) -> None:
        self._frames = Frames()
        self._engine: Engine | None = None
        self._updates: Outputs = {}  # gathered in this turn of the event loop
        self._one_profile = asyncio.Lock()
        self._one_look = asyncio.Lock()
        self._sent: EngineStats | None = None
        self._sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._soon(self._tell_of_life, "the heartbeat")

    def data_received(self, data: bytes) -> None:
        try:
            for message in decoded(self._frames, data, to_engine):
                self._receive(message)
        except ValueError:
            log.exception("invalid message from the server process")
            os._exit(1)

    def connection_lost(self, exc: Exception | None) -> None:
        os._exit(0 if exc is None or isinstance(exc, ConnectionError) else 1)

    def _receive(self, message: ToEngine) -> None:
        engine = self._engine
        match message:
            case Start(log_format=log_format):
                name = "engine" if message.num_engines == 1 else f"engine {message.engine}"
                configure(log_format, process=name)
                supervise.start_thread(partial(self._load, message), "loading the model", _die)
            case Submit(request) if engine is not None:
                self._submit(engine, request)
            case Abort(request_id) if engine is not None:
                engine.abort(request_id)
            case LoadLora(ref, path) if engine is not None:
                load = partial(self._load_lora, engine, ref, path)
                supervise.start_thread(load, "loading a LoRA adapter", _die)
            case UnloadLora(name) if engine is not None:
                engine.adapters.drop(name)  # the peer has checked that no request uses it
            case Profile(folder) if engine is not None:
                supervise.start_task(self._profile(engine, folder), "a profile", _die)
            case Look() if engine is not None:
                supervise.start_task(self._look(engine), "reading the engine state", _die)

    def _submit(self, engine: Engine, request: Request) -> None:
        try:
            stream = engine.submit_request(request)
        except ForgeError as error:
            self._gather(request.request_id, last_deltas(samples_of(request), "error", error))
        else:
            stream.push_to(partial(self._gather, request.request_id))

    async def _look(self, engine: Engine) -> None:
        async with self._one_look:
            try:
                answer = Looked(await engine.look())
            except Exception as error:
                answer = Looked(error=_wire_error(error, "the engine state could not be read"))
            self._send(answer)

    def _load_lora(self, engine: Engine, ref: LoraRef, path: str) -> None:
        try:
            answer = LoraLoaded(ref.identity, engine.adapters.load(ref.name, path, ref=ref))
        except Exception as error:
            wire_error = _wire_error(error, "the adapter could not be loaded")
            answer = LoraLoaded(ref.identity, error=wire_error)
        self._soon(partial(self._send, answer), "answering")

    async def _profile(self, engine: Engine, folder: str | None) -> None:
        async with self._one_profile:
            try:
                if folder is None:
                    await engine.stop_profile()
                else:
                    await engine.start_profile(Path(folder))
                answer = Profiled()
            except Exception as error:
                answer = Profiled(_wire_error(error, "the profile failed", RequestError))
            self._send(answer)

    def _load(self, start: Start) -> None:
        share_host_memory(start.host_sharers)
        try:
            if start.fake:
                engine = Engine.fake(
                    step_time_s=start.fake_step_time_s,
                    max_model_len=start.fake_max_model_len,
                    config=start.config,
                    publishes=False,
                )
            else:
                group = None
                if start.config.parallel.num_hosts > 1:
                    from forge_jax.engine.hosts.group import HostGroup

                    group = HostGroup.join(start.config)
                engine = Engine.load(_with_blocks(start), publishes=False, group=group)
            if read_kv_events(start.config.cache.kv_events_config) is not None:
                engine.publish_events(self._publish)  # the peer's sockets outlive this process
            lost = engine.adapters.restore(start.adapters)
        except BaseException as error:
            refusal = Refused(_wire_error(error, "the model could not be loaded"))
            self._soon(partial(self._send, refusal), "answering")
        else:
            self._soon(partial(self._begin, engine, lost), "beginning")

    def _begin(self, engine: Engine, lost: dict[str, str]) -> None:
        self._engine = engine
        if engine.grammars is not None:
            engine.grammars.limits = None  # the peer has checked them
        engine.start()
        self._send(
            Hello(
                name=engine.name,
                max_model_len=engine.max_model_len,
                limits=engine.limits,
                system_fingerprint=engine.system_fingerprint,
                architecture=engine.architecture,
                end_ids=[] if engine.grammars is None else sorted(engine.grammars.end_ids),
                stats=engine.stats(),
                lora_places=engine.adapters.places,
                adapters=engine.loras,
                lost_adapters=lost,
            )
        )
        self._tell_stats()

    def _publish(self, events: list[CacheEvent]) -> None:
        """Send events to the peer. Called in the engine thread."""
        self._soon(partial(self._send_events, time.time(), events), "sending KV events")

    def _send_events(self, ts: float, events: list[CacheEvent]) -> None:
        self._send(KVEventBatch(ts, encoded(events)))

    def _tell_of_life(self) -> None:
        """Send the heartbeat until there are stats to send."""
        if self._engine is None:
            self._later(IDLE_STATS_S, self._tell_of_life, "the heartbeat")
            self._send(Loading())

    # A failure of these callbacks ends the process. Its peer starts another.

    def _soon(self, call: Callable[[], None], name: str) -> None:
        self._loop.call_soon_threadsafe(supervise.guarded(call, name, _die))

    def _later(self, seconds: float, call: Callable[[], None], name: str) -> None:
        self._loop.call_later(seconds, supervise.guarded(call, name, _die))

    def _send(self, message: FromEngine) -> None:
        self._transport.write(frame(message))

    def _gather(self, request_id: str, deltas: list[Delta]) -> None:
        if not self._updates:
            self._soon(self._send_news, "sending news")
        self._updates.setdefault(request_id, []).extend(deltas)

    def _send_news(self) -> None:
        # Updates of a failed engine must not end requests, which the next process continues.
        self._end_if_failed()
        updates, self._updates = self._updates, {}
        for message in Updates.split(updates):
            self._send(message)
        if time.monotonic() - self._sent_s > STATS_S:
            self._send_stats()

    def _tell_stats(self) -> None:
        """Send stats if they have changed, or as a heartbeat."""
        self._later(STATS_S, self._tell_stats, "the heartbeat")
        late = time.monotonic() - self._sent_s > IDLE_STATS_S
        self._end_if_failed()
        if late or (self._engine is not None and self._engine.stats() != self._sent):
            self._send_stats()

    def _send_stats(self) -> None:
        assert self._engine is not None
        stats = self._engine.stats()
        self._sent, self._sent_s = stats, time.monotonic()
        self._send(Stats(stats))

    def _end_if_failed(self) -> None:
        """Exit if the engine failed: only a new process recovers the device."""
        if self._engine is not None and self._engine.stats().state == "failed":
            log.error("the engine failed: exiting")
            os._exit(1)


def _with_blocks(start: Start) -> EngineConfig:
    """Return the configuration, with as many blocks as the first engine of a group has."""
    if start.num_blocks is None:
        return start.config
    from forge_jax.engine.bundle import with_blocks

    return with_blocks(start.config, start.num_blocks)


def _wire_error(
    error: BaseException, failed: str, kind: type[ForgeError] = EngineError
) -> WireError:
    """Return an error for the peer. An unexpected one is logged, and named in the message.

    Args:
      failed: describes the failed operation.
      kind: type of the error that replaces an unexpected one.
    """
    if isinstance(error, ForgeError):
        return WireError.of(error)
    log.error("%s: %s: %s", failed, type(error).__name__, error, exc_info=error)
    return WireError.of(kind(f"{failed}: {type(error).__name__}"))


def _die(error: BaseException) -> None:
    """Exit: the process cannot do its work."""
    os._exit(1)


async def _serve(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(_Worker, sock=sock)
    await loop.create_future()  # until the process ends


def main() -> None:
    gc.disable()  # until the engine is ready
    if cpus := [int(cpu) for cpu in sys.argv[2:]]:
        os.sched_setaffinity(0, cpus)  # before XLA and the kernels size their thread pools
    # A terminal sends these signals to the whole process group.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("jax").setLevel(logging.WARNING)
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
