"""Named spans on the host's timeline of a trace, at almost no cost without one.

State is global to the process, like the profiler. This module does not import jax:
`forge_jax.telemetry.trace_recorder` passes in the annotations.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from forge_jax.telemetry.phases import Phase

PREFIX = "forge."  # not "forge:", because the profiler reads text after a colon as a type
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
    """Return a context that names its body in a trace; costs 0.5 us without a trace."""
    return _NOTHING if _span is None else _span(PREFIX + phase)


def step_span(number: int) -> _Annotation:
    """Return a context for a whole step of the host, which TensorBoard uses to count steps."""
    return _NOTHING if _step is None else _step(STEP, number)


def turn_on(
    make_span: Callable[[str], _Annotation], make_step: Callable[[str, int], _Annotation]
) -> None:
    """Create all later spans with these functions."""
    global _span, _step
    _span, _step = make_span, make_step


def turn_off() -> None:
    global _span, _step
    _span = _step = None
