"""Exit statuses of the commands. An error is one line on stderr."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from forge_jax.errors import ForgeError
from forge_serve.cli.terminal import one_line

FAILED = 1
INTERRUPTED = 130  # 128 + SIGINT, as in shells
NOBODY_READS = 141  # 128 + SIGPIPE


def guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Run a command and return its exit status. Print an exception as one line.

    Args:
      debug: also print the traceback.
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
        return NOBODY_READS  # without a message: a pipe to `head` ends filters this way
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        say_error(error)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED


def say_error(error: BaseException) -> None:
    """Print an error as one line on stderr."""
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
            return (
                "error: out of memory: use a smaller model, --quantization int8, or a machine with "
                "more memory"
            )
        case _ if str(error).startswith("RESOURCE_EXHAUSTED"):
            return (
                "error: the device is out of memory: lower --num-blocks, --max-num-seqs or "
                f"--max-num-batched-tokens, or use --quantization int8 ({error})"
            )
    return (
        f"error: {type(error).__name__}: {error} (unexpected: run with --debug for the traceback, "
        "and please report it with the output of forge-jax doctor)"
    )


def _forget_stdout() -> None:
    """Redirect stdout to /dev/null, because flushing the buffer at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
