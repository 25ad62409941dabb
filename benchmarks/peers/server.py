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
    """A server that did not start, with the end of what it said."""


class Server:
    """Attributes: engine, url, start_s (from start to ready).

    Paused servers take no time from the one that is measured: OpenMP's threads spin for a while
    after their work, and so do those of some servers.
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
        """CPU time that its living processes have used."""
        return proc.group_cpu_s(self._process.pid)

    def memory_bytes(self) -> int:
        """Resident memory, shared pages counted in proportion."""
        return proc.group_memory_bytes(self._process.pid)

    def pause(self) -> None:
        """Returns when none of its processes runs any more."""
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
        self._signal(signal.SIGKILL)  # also children that outlived their parent
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
            # Ours serves before the last of its executables has been compiled, and says so.
            return b"serving" not in response.read()
    except (urllib.error.URLError, OSError):
        return False
