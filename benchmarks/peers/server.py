"""An engine's server as a process group: started, paused while others are measured, ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.peers import proc
from benchmarks.peers.engines import Engine

START_TIMEOUT_S = 600.0  # vLLM compiles for a minute or two on its first start
STOP_TIMEOUT_S = 20.0


class ServerError(Exception):
    """The server did not start; the message has the end of its output."""


class Server:
    """A running server.

    Paused servers take no CPU time from the measured one. Otherwise threads of OpenMP and of some
    servers would spin for a while after their work.

    Attributes:
      engine: The engine that it runs.
      url: Its base URL.
      start_s: Seconds from start to ready.
    """

    def __init__(self, engine: Engine, log: Path):
        self.engine = engine
        self._log = log
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        command = [part.replace("{port}", str(self._port)) for part in engine.command]
        environment = {**os.environ, **engine.environment}
        start = time.perf_counter()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - start

    def cpu_s(self) -> float:
        """Return the CPU time of its living processes."""
        return proc.group_cpu_s(self._process.pid)

    def memory_bytes(self) -> int:
        """Return resident memory, with shared pages counted in proportion."""
        return proc.group_memory_bytes(self._process.pid)

    def pause(self) -> None:
        """Stop all of its processes and wait until none runs."""
        self._signal(signal.SIGSTOP)
        while not proc.group_is_stopped(self._process.pid):
            time.sleep(0.001)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def stop(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=STOP_TIMEOUT_S)
        self._signal(signal.SIGKILL)  # includes children that outlived their parent
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(f"{self.url}/health"):
            if self._process.poll() is not None:
                raise self._error(f"ended with status {self._process.returncode}")
            if time.monotonic() > deadline:
                raise self._error(f"was not ready after {START_TIMEOUT_S:.0f} s")
            time.sleep(0.1)

    def _error(self, what: str) -> ServerError:
        said = self._log.read_text(errors="replace")[-2000:]
        return ServerError(f"{self.engine.name} {what}; the end of its output:\n{said}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            # forge-jax serves before its last executables are compiled, and reports that.
            return b"serving" not in response.read()
    except (urllib.error.URLError, OSError):
        return False
