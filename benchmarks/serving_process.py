"""Starts `forge-jax serve` as a process of its own, waits until it is ready, ends it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def serving(
    arguments: Sequence[str] = (), *, timeout_s: float = 300.0
) -> Iterator[tuple[str, float]]:
    """Yields (url, seconds from start to ready).

    Raises:
      RuntimeError: the server ended, or was not ready in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "forge_serve", "serve", *arguments, "--port", str(port)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not _answers(f"{url}/health"):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}")
            if time.perf_counter() - start > timeout_s:
                raise RuntimeError(f"the server was not ready after {timeout_s:.0f} s")
            time.sleep(0.02)
        yield url, time.perf_counter() - start
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False
