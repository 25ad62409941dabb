"""`Supervisor`: keeps one engine process running, and replaces it when it dies or freezes.

The supervisor makes the transitions of the engine's `Lifecycle` that concern the process. Requests
and streams belong to its owner, which it calls through `Hooks`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass

from forge_jax.engine.lifecycle import Lifecycle, State
from forge_jax.engine.process.backoff import LONGEST_UNAVAILABLE_S, Backoff
from forge_jax.engine.process.connection import Connection
from forge_jax.engine.process.launcher import ChildProcess, Launcher
from forge_jax.engine.process.messages import FromEngine, Hello, Stats, ToEngine, Updates
from forge_jax.engine.process.watchdog import LOOK_S, Watchdog
from forge_jax.errors import EngineError
from forge_jax.host import supervise

MAX_LAUNCHES = 5  # maximum number of failed launches in a row while requests wait

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Callbacks to the owner of a supervisor, all on the event loop.

    Attributes:
      introduce: a successor sent `Hello`. The supervisor has sent it nothing.
      connected: messages can be sent to a process from now on.
      receive: a message arrived.
      died: the process has ended, and a successor will be launched.
      exhausted: `MAX_LAUNCHES` or more launches in a row have failed. Returns True if they shall
        continue, with longer pauses, because no request waits for a successor.
      fail: an unrecoverable exception.
      patience: returns the factor on the watchdog's timeout.
    """

    introduce: Callable[[Hello], None]
    connected: Callable[[], None]
    receive: Callable[[FromEngine], None]
    died: Callable[[], None]
    exhausted: Callable[[], bool]
    fail: Callable[[BaseException], None]
    patience: Callable[[], float]


class Supervisor:
    """The owner of an engine process: connects and watches it, and launches successors.

    Args:
      process: the first process, which has sent `Hello`.
      requests: the requests that wait for a successor; only counted, for the log.
      clock: seconds.
    """

    def __init__(
        self,
        process: ChildProcess,
        launcher: Launcher,
        lifecycle: Lifecycle,
        hooks: Hooks,
        requests: Sized,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.launcher = launcher
        self.hooks = hooks
        self.watchdog = Watchdog(launcher.timeout_s)
        self._lifecycle = lifecycle
        self._requests = requests
        self._clock = clock
        self._backoff = Backoff(clock)
        self._process: ChildProcess | None = process
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None  # or the task that replaces it
        self._watching: asyncio.Task[None] | None = None
        self._heard_s = clock()  # when the last message arrived

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of a connected process."""
        return 0.0 if self._connection is None else self._clock() - self._heard_s

    @property
    def replacing(self) -> asyncio.Task[None] | None:
        """The task that connects or replaces the process; done while a process is connected."""
        return self._connecting

    def start(self) -> None:
        """Connect to the process on the running event loop."""
        assert self._process is not None
        self._lifecycle.enter(_serving_state(self._process))
        self._connecting = supervise.start_task(
            self._connect_first(self._process), "connecting to the engine process", self.hooks.fail
        )
        self._watching = supervise.start_task(
            self._watch(), "the watchdog of the engine process", self.hooks.fail
        )

    async def stop(self) -> None:
        """End the process, or its launch. The lifecycle must have ended."""
        tasks = [task for task in (self._connecting, self._watching) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._disconnect()
        if self._process is not None:
            process, self._process = self._process, None
            await asyncio.to_thread(process.end)

    def give_up(self) -> None:
        """Kill the process. No successor is launched, because the lifecycle has ended."""
        self._disconnect()
        if self._process is not None:
            self._process.kill()

    def send(self, message: ToEngine) -> bool:
        """Send a message. Return False if no process is connected."""
        if self._connection is None:
            return False
        self._connection.send(message)
        return True

    async def settled(self) -> None:
        """Wait until a process is connected, or never will be, or the engine is unavailable."""
        if self._connecting is not None and self._lifecycle.state != "unavailable":
            await asyncio.wait([self._connecting])

    # ---- one process ---------------------------------------------------------------------------

    async def _connect_first(self, process: ChildProcess) -> None:
        if not await self._connect(process):
            self._died(process)

    async def _connect(self, process: ChildProcess) -> bool:
        """Connect to a process. Return False if it has already ended."""
        _, connection = await asyncio.get_running_loop().create_unix_connection(
            lambda: Connection(
                process, receive=self._receive, on_lost=self._lost, on_error=self.hooks.fail
            ),
            sock=process.sock,
        )
        if connection.closing:
            return False
        if not self.launcher.has_current_adapters(process):
            log.info("the adapters changed while the new %s loaded them", self.launcher.name)
            connection.close()
            return False
        if self._lifecycle.ended:
            connection.close()
            raise EngineError("the engine failed while its process was connected")
        self._connection = connection
        self._heard_s = self._clock()
        self.watchdog.begin()
        self._backoff.begin()
        self._lifecycle.enter(_serving_state(process))
        self.hooks.connected()
        return True

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _receive(self, message: FromEngine) -> None:
        self._heard_s = self._clock()
        match message:
            case Updates():
                self.watchdog.progress()
                self._backoff.progress()
            case Stats(stats):
                self.watchdog.beat(stats.stalled_s)
                if stats.state == "ready" and self._lifecycle.state == "serving":
                    self._lifecycle.enter("ready")
            case _:
                pass
        self.hooks.receive(message)

    async def _watch(self) -> None:
        """Kill a frozen process, whose streams continue in the next one."""
        while not self._lifecycle.ended:
            await asyncio.sleep(LOOK_S)
            if self._connection is None:
                continue
            why = self.watchdog.look(self.hooks.patience())
            if why is not None:
                log.error("the %s %s: killing and replacing it", self.launcher.name, why)
                self._connection.process.kill()
                self._connection.close()

    # ---- its successors ------------------------------------------------------------------------

    def _lost(self, connection: Connection) -> None:
        if connection is self._connection:  # otherwise the supervisor has dropped it
            self._died(connection.process)

    def _died(self, process: ChildProcess) -> None:
        self._disconnect()
        process.kill()
        if not self._lifecycle.enter("recovering") and self._lifecycle.state != "stopping":
            return
        self._backoff.died()
        self.hooks.died()
        self._connecting = supervise.start_task(
            self._replace(process), "the recovery of the engine process", self.hooks.fail
        )

    async def _replace(self, process: ChildProcess) -> None:
        ending = await asyncio.to_thread(process.end)
        log.error(
            "the %s %s. Restarting it for %d requests",
            *(self.launcher.name, ending, len(self._requests)),
        )
        for _ in range(MAX_LAUNCHES):
            if await self._launch_one():
                return
        if self._may_continue():
            # In a new task, so that `settled` does not wait for it.
            self._connecting = supervise.start_task(
                self._rejoin(), "the recovery of the engine process", self.hooks.fail
            )

    async def _rejoin(self) -> None:
        """Launch until a process serves again, or no other engine serves."""
        while not await self._launch_one():
            if not self._may_continue():
                return

    def _may_continue(self) -> bool:
        """Return True if launches may continue. Otherwise, fail the engine."""
        if self.hooks.exhausted():
            self._backoff.longest_s = LONGEST_UNAVAILABLE_S
            return True
        self.hooks.fail(EngineError(f"its process failed to start {MAX_LAUNCHES} times"))
        return False

    async def _launch_one(self) -> bool:
        """Launch and connect a successor, after the pause that is due. Return True if it serves."""
        name = self.launcher.name
        await asyncio.sleep(self._backoff.pause_s)
        new = await self.launcher.launch()
        if new is not None:
            self._process = new
            self.hooks.introduce(new.hello)
            if await self._connect(new):
                log.info("a new %s continues with %d requests", name, len(self._requests))
                return True
            ending = await asyncio.to_thread(new.end)
            log.error("the new %s %s before it could be used", name, ending)
        self._backoff.launch_failed()
        return False


def _serving_state(process: ChildProcess) -> State:
    return "ready" if process.hello.stats.state == "ready" else "serving"
