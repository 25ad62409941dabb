"""Names on the host's time line while a trace is taken; next to nothing while none is.

The profiler belongs to the process, so what is here does too. Nothing imports jax: whoever takes a
trace brings the annotations along (`forge_jax.telemetry.trace_recorder`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from forge_jax.telemetry.phases import Phase

PREFIX = "forge."  # of every name here; what follows a colon would be taken for a type
STEP = f"{PREFIX}step"

_Annotation = AbstractContextManager[Any]


class _Nothing:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NOTHING = _Nothing()
_span: Callable[[str], _Annotation] | None = None
_step: Callable[[str, int], _Annotation] | None = None


def span(phase: Phase) -> _Annotation:
    """Names what is done under it, for a trace: half a microsecond without one."""
    return _NOTHING if _span is None else _span(PREFIX + phase)


def step_span(number: int) -> _Annotation:
    """Names a whole step of the host; TensorBoard counts steps by it."""
    return _NOTHING if _step is None else _step(STEP, number)


def turn_on(
    make_span: Callable[[str], _Annotation], make_step: Callable[[str, int], _Annotation]
) -> None:
    """Has every span from now on made by these."""
    global _span, _step
    _span, _step = make_span, make_step


def turn_off() -> None:
    global _span, _step
    _span = _step = None
