"""End of the process."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End the process at once, without waiting for threads and without Python's own shutdown.

    Threads that compile executables cannot be stopped. Python's shutdown takes a fraction of a
    second, in which signals have their default action and would replace the exit status.
    """
    for file in filter(None, (sys.stdout, sys.stderr)):
        file.flush()
    os._exit(status)
