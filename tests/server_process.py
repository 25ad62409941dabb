"""Processes that tests start: their end, and a server on a free port; independent of forge_jax."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent
END_S = 10.0  # from the request to end until it is killed


def virtual_devices(count: int) -> str:
    """Return this process's XLA_FLAGS with a number of CPU devices.

    Compilation takes 1.6 times as long without the flags of `make test`.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    return f"{flags} --xla_force_host_platform_device_count={count}".lstrip()


@contextmanager
def running(
    command: Sequence[str],
    stdout: int = subprocess.DEVNULL,
    stderr: int | IO[str] | None = None,
    cwd: Path = ROOT,
) -> Iterator[subprocess.Popen[str]]:
    """Run a process until the end of the block."""
    with subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True, cwd=cwd) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def serving(python: str, *flags: str) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """Run `forge-jax serve` with these flags; yield its URL without /v1, its model, the process."""
    command = [python, "-m", "forge_serve", "serve", "--port", "0", "--no-request-log", *flags]
    with running(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()  # the first line means that it serves
        found = re.match(r"forge-jax serves (\S+) at (http://\S+);", line)
        assert found, f"the server did not start: {line!r}"
        yield found[2], found[1], process
