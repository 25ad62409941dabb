"""Starts and ends engine processes.

`launch` blocks until a process can serve. `Launcher` launches the successors of a first process
from the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import msgspec

from forge_jax.config.options import ParallelConfig
from forge_jax.engine.adapters import Adapters
from forge_jax.engine.process.messages import (
    Frames,
    FromEngine,
    Hello,
    Loading,
    Refused,
    Start,
    decoded,
    frame,
    from_engine,
)
from forge_jax.engine.process.shares import share_of
from forge_jax.engine.process.watchdog import LOOK_S, Watchdog
from forge_jax.errors import EngineError, ForgeError
from forge_jax.host import supervise

RECEIVE_BYTES = 1 << 20
EXIT_S = 5.0  # time for a process to exit by itself
KILL_S = 10.0  # time for a killed process to exit, which a driver call may delay

# Successors reuse downloads and compiled executables, but may take this many times as long.
LAUNCH_FACTOR = 10
STDERR = 2
WORKER = ("-m", "forge_jax.engine.process.worker")

log = logging.getLogger(__name__)


@dataclass
class ChildProcess:
    """An engine process that has sent `Hello`."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    hello: Hello
    frames: Frames = field(default_factory=Frames)
    # Messages received right after `Hello`.
    early: list[FromEngine] = field(default_factory=list[FromEngine])
    launch_s: float = 0.0  # seconds until `Hello`

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> str:
        """Close the connection and wait for the process to end. Return how it ended."""
        self.sock.close()
        return _ended(self.process)


class PendingLaunch:
    """A process that one thread starts and another thread may cancel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up = False

    def started(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._process = process
            if self._given_up:
                process.kill()

    def give_up(self) -> None:
        """Kill the process as soon as it exists, which makes `launch` fail."""
        with self._lock:
            self._given_up = True
            if self._process is not None:
                self._process.kill()


class Launcher:
    """A launcher of successors of a first process.

    Attributes:
      start: configuration of successors, without the adapters.
      limit_s: maximum seconds of a launch; None: only the watchdog limits it.
      timeout_s: seconds without a heartbeat after which a process counts as frozen; 0: never.

    Args:
      start: configuration of the first process.
      adapters: the engine's adapters, which a successor loads.
    """

    def __init__(self, start: Start, first: ChildProcess, adapters: Adapters):
        self.timeout_s = start.config.parallel.engine_timeout_s
        self.limit_s = self.timeout_s + LAUNCH_FACTOR * first.launch_s if self.timeout_s else None
        self.start = start
        self._adapters = adapters
        places = first.hello.lora_places
        if places:  # all adapters come from `adapters`, including those of --lora
            model = dataclasses.replace(start.config.model, lora=(), max_loras=places)
            config = dataclasses.replace(start.config, model=model)
            self.start = msgspec.structs.replace(start, config=config)

    @property
    def name(self) -> str:
        """Name of the process in the log."""
        several = self.start.num_engines > 1
        return f"process of engine {self.start.engine}" if several else "engine process"

    async def launch(self) -> ChildProcess | None:
        """Launch a process. If that fails, log the reason and return None."""
        # The dead process may have sent an answer just before its end. No load begins meanwhile.
        adapters = await asyncio.to_thread(self._adapters.settled)
        start = msgspec.structs.replace(self.start, adapters=adapters)
        pending = PendingLaunch()
        launching = supervise.start_task(
            asyncio.to_thread(launch, start, pending, self.limit_s),
            "the launch of an engine process",
            None,
            expected=(Exception,),  # it is logged below
        )
        try:
            return await asyncio.shield(launching)
        except asyncio.CancelledError:
            pending.give_up()
            await asyncio.wait([launching])
            if launching.exception() is None:
                await asyncio.to_thread(launching.result().end)
            raise
        except ForgeError as error:
            log.error("the %s could not be started again: %s", self.name, error)
        except Exception:
            log.exception("the %s could not be started again", self.name)
        return None

    def has_current_adapters(self, process: ChildProcess) -> bool:
        """Return False if an adapter was loaded or unloaded while a successor was launched.

        This happens only to an unavailable engine, for which the other engines do not wait.
        """
        loaded = {adapter.ref for adapter in process.hello.adapters}
        return loaded == {adapter.ref for adapter in self._adapters.all()}


def launch(
    start: Start, pending: PendingLaunch | None = None, limit_s: float | None = None
) -> ChildProcess:
    """Start a process and wait until it can serve.

    Args:
      pending: lets another thread cancel the launch.
      limit_s: maximum seconds in total; None: no limit while there are heartbeats.

    Raises:
      ForgeError: if the process reports that it cannot serve, ends, or freezes.
    """
    begun_s = time.monotonic()
    share = share_of(start.engine, start.num_engines, start.config.parallel)
    if share.device is not None:
        start = _on_device(start, share.device)
    ours, theirs = socket.socketpair()
    command = [sys.executable, *WORKER, str(theirs.fileno()), *map(str, share.cpus)]
    try:
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **share.environment},
            stdout=STDERR,  # libraries such as Gloo print to stdout, which is the server's own
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise EngineError(f"the engine process could not be started: {error.strerror}") from error
    finally:
        theirs.close()
    if pending is not None:
        pending.started(process)
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
            raise EngineError(f"communication with the engine process failed: {error}") from error
        raise
    return ChildProcess(process, ours, hello, frames, early, time.monotonic() - begun_s)


def _on_device(start: Start, device: int) -> Start:
    parallel: ParallelConfig = dataclasses.replace(start.config.parallel, device=device)
    config = dataclasses.replace(start.config, parallel=parallel)
    return msgspec.structs.replace(start, config=config)


def _await_hello(
    sock: socket.socket, start: Start, limit_s: float | None
) -> tuple[Hello, Frames, list[FromEngine]]:
    """Send a process its `Start`, and wait until it can serve.

    Returns:
      The process's `Hello`, the decoder state, and messages that came right after `Hello`.

    Raises:
      ConnectionError: if it has ended.
      EngineError: if it is frozen.
      ForgeError: if it reports that it cannot serve.
    """
    timeout_s = start.config.parallel.engine_timeout_s
    silence, total, frames = Watchdog(timeout_s), Watchdog(limit_s or 0.0), Frames()
    sock.settimeout(timeout_s or None)
    sock.sendall(frame(start))
    sock.settimeout(LOOK_S)
    while True:
        why = silence.look()
        if why is None and total.look() is not None:
            why = f"did not become ready within {limit_s:.0f} s"
        if why is not None:
            raise EngineError(f"the engine process {why} during startup and was killed")
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
            case _:
                continue


def _ended(process: subprocess.Popen[bytes]) -> str:
    """Return how a process ended that has closed its connection. It may take a moment to exit."""
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
        "the engine process %d did not exit after SIGKILL. It hangs in the kernel and may still "
        "hold device memory",
        process.pid,
    )
    return "does not end"
