"""Panics of Rust libraries (tokenizers, llguidance), which are not an `Exception` in Python.

PyO3 raises them as `PanicException`, a `BaseException`, so that `except Exception` does not catch
them. Untrusted input can cause a panic, which must not end a thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


def is_panic(error: BaseException) -> bool:
    """Return True for a panic, by its class name, because each library has its own class."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def panics_as(make: Callable[[str], Exception]) -> Iterator[None]:
    """Raise `make(message)` instead of a panic, with the beginning of the panic's message."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise make(str(error)[:200]) from error
