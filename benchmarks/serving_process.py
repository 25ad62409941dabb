"""`forge-jax serve` as a separate process: start it, wait until it is ready, stop it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from forge_serve.bench.errors import BenchmarkError

POLL_S = 0.02


@dataclass(frozen=True)
class Started:
    """A ready server that has compiled everything."""

    url: str
    serving_s: float  # from the start of its process until it first accepted requests
    ready_s: float
    pid: int


@contextmanager
def serving(
    arguments: Sequence[str] = (), *, timeout_s: float = 300.0
) -> Iterator[tuple[str, float]]:
    """Yield (url, seconds from start to ready); the server's log goes to a temporary file.

    Raises:
      BenchmarkError: The server ended or was not ready in time; with the end of its log.
    """
    with started(arguments, timeout_s=timeout_s) as server:
        yield server.url, server.ready_s


@contextmanager
def started(arguments: Sequence[str] = (), *, timeout_s: float = 300.0) -> Iterator[Started]:
    """Yield the server with both times, otherwise like `serving`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "forge_serve", "serve", *arguments, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        begin_s = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        output = _Output(process.stdout)
        try:
            while not output.begun.wait(POLL_S) or health(url) != "ready":
                if process.poll() is not None:
                    raise BenchmarkError(f"the server did not start: {_last_line(log)}")
                if time.perf_counter() - begin_s > timeout_s:
                    raise BenchmarkError(f"the server was not ready after {timeout_s:.0f} s")
                time.sleep(POLL_S)
            ready_s = time.perf_counter() - begin_s
            yield Started(url, output.begun_s - begin_s, ready_s, process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            output.join()


class _Output(threading.Thread):
    """A thread that drains a server's output, so that the server never blocks.

    The first line has the address: from then on the server accepts requests.
    """

    def __init__(self, stdout: IO[bytes]):
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.begun_s = 0.0
        self._stdout = stdout
        self.start()

    def run(self) -> None:
        with self._stdout:
            if self._stdout.readline():
                self.begun_s = time.perf_counter()
                self.begun.set()
            while self._stdout.read(4096):
                pass


def health(url: str) -> str | None:
    """Return the state that the server at `url` reports, or None unless it answers 200."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return json.load(response)["status"]
    except (urllib.error.URLError, OSError):
        return None


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
