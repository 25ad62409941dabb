"""`forge-jax serve` as a child process, which stops when its standard input is closed.

python -m forge_serve.integrations.child_server FLAGS
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def _stop_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    from forge_serve.cli.main import main

    threading.Thread(target=_stop_with_parent, daemon=True).start()
    sys.exit(main(["serve", *sys.argv[1:]]))
