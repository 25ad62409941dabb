"""Commands to the thread or process that computes: one frozen type each.

Both accept `Submit` and `Abort`. These are tagged msgspec structs, so that a process can receive
them (`process/messages.py` has its other messages). The rest is for the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from forge_jax.schedule.request import Request

if TYPE_CHECKING:
    from forge_jax.engine.parts import Pooler
    from forge_jax.step.executables import BackgroundCompile


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """Command to queue a request that has been checked."""

    request: Request


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Command to abort a request. No effect if it has ended."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Call:
    """Command to call a function between two steps. `done` receives its exception, if any."""

    function: Callable[[], None]
    done: Future[None]

    def run(self) -> None:
        try:
            self.function()
        except Exception as error:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


@dataclass(frozen=True, slots=True)
class ActivateExecutables:
    """Command to use the executables that have been compiled since the engine started."""

    late: BackgroundCompile


@dataclass(frozen=True, slots=True)
class ActivatePooling:
    """Command to use the executables that pool hidden states."""

    pooler: Pooler


@dataclass(frozen=True, slots=True)
class Stop:
    """Command to abort what is left and end the thread."""


Command = Submit | Abort | Call | ActivateExecutables | ActivatePooling | Stop
