"""Panics of libraries in Rust (tokenizers, llguidance), which are no `Exception` in Python.

PyO3 raises them as `PanicException`, a `BaseException`, so that nobody takes one for an ordinary
error by mistake. Input of strangers can cause them, and then they are no reason to end a thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


def is_panic(error: BaseException) -> bool:
    """True of a panic. Each library has a class of its own for them."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def panics_as(make: Callable[[str], Exception]) -> Iterator[None]:
    """Raise `make(message)` in place of a panic; the message is the panic's, and never long."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise make(str(error)[:200]) from error
