"""How a command ends: its exit status, and one line on stderr if something is wrong."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from forge_jax.errors import ForgeError
from forge_serve.cli.terminal import one_line

FAILED = 1
INTERRUPTED = 130  # as shells say of a process that SIGINT has ended
NOBODY_READS = 141  # likewise of SIGPIPE


def guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Runs a command; whatever it raises becomes a line and an exit status.

    Args:
      debug: print the traceback, too.
    """
    try:
        status = command()
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        _forget_stdout()
        if debug:
            traceback.print_exc()
        return NOBODY_READS  # in silence, as `head` would have it of every filter
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        say_error(error)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED


def leave(status: int) -> NoReturn:
    """Ends the process at once: there may be threads that compile, which cannot be ended, for an
    engine that nobody needs any more.
    """
    for file in filter(None, (sys.stdout, sys.stderr)):
        file.flush()
    os._exit(status)


def say_error(error: BaseException) -> None:
    """Prints the one line of an error."""
    print(f"forge-jax: {one_line(_told(error))}", file=sys.stderr)


def _told(error: BaseException) -> str:
    match error:
        case KeyboardInterrupt():
            return "interrupted"
        case ForgeError():
            return f"error: {error.on_command_line or error}"
        case OSError(filename=str() as name, strerror=str() as reason):
            return f"error: {name}: {reason}"
        case MemoryError():
            return "error: out of memory: a smaller model, --quantization int8, or more memory"
        case _ if str(error).startswith("RESOURCE_EXHAUSTED"):
            return (
                "error: the device is out of memory: lower --num-blocks, --max-num-seqs or "
                f"--max-num-batched-tokens, or take --quantization int8 ({error})"
            )
    return (
        f"error: {type(error).__name__}: {error} (unexpected: --debug shows where; please report "
        "it, with what forge-jax doctor prints)"
    )


def _forget_stdout() -> None:
    """Nothing that is still buffered is written at the end, where it would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
