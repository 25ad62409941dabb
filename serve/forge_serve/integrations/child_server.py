"""`forge-jax serve` as a child process, which stops when its standard input is closed.

python -m forge_serve.integrations.child_server FLAGS
"""

from __future__ import annotations

import os
import signal
import sys

from forge_jax.host import supervise
from forge_serve.cli.main import main


def _stop_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _die(error: BaseException) -> None:
    os._exit(1)


if __name__ == "__main__":
    supervise.start_thread(_stop_with_parent, "waiting for the parent process", _die)
    sys.exit(main(["serve", *sys.argv[1:]]))
