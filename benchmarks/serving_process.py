"""Starts `forge-jax serve` as a process of its own, waits until it is ready, ends it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from benchmarks.errors import BenchmarkError


@contextmanager
def serving(
    arguments: Sequence[str] = (), *, timeout_s: float = 300.0
) -> Iterator[tuple[str, float]]:
    """Yields (url, seconds from start to ready). Its log goes to a file and is not kept.

    Raises:
      BenchmarkError: the server ended, or was not ready in time; with the end of its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "forge_serve", "serve", *arguments, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            while not _is_ready(url):
                if process.poll() is not None:
                    raise BenchmarkError(f"the server did not start: {_last_line(log)}")
                if time.perf_counter() - start > timeout_s:
                    raise BenchmarkError(f"the server was not ready after {timeout_s:.0f} s")
                time.sleep(0.02)
            yield url, time.perf_counter() - start
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _is_ready(url: str) -> bool:
    """Whether everything has been compiled, not only what serving begins with."""
    try:
        with urllib.request.urlopen(f"{url}/stats", timeout=5) as response:
            return json.load(response)["state"] == "ready"
    except (urllib.error.URLError, OSError):
        return False
