"""The parts in their order, and their cases. Heavy imports wait until a part runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class Missing(Exception):
    """The case needs something that is not installed; the message names it."""


class Case(NamedTuple):
    """One row of the report.

    Attributes:
      name: unique within a part.
      run: returns the row's figures.
      limit_s: seconds after which the case counts as hanging.
    """

    name: str
    run: Callable[[], dict[str, Any]]
    limit_s: float


@dataclass(frozen=True)
class Part:
    """A separate process: `benchmarks.gpu.MODULE:FUNCTION` yields its cases."""

    module: str
    function: str

    def cases(self, tiny: bool) -> Iterator[Case]:
        module = importlib.import_module(f"benchmarks.gpu.{self.module}")
        function: Callable[[bool], Iterator[Case]] = getattr(module, self.function)
        return function(tiny)


# A kernel that hangs or is wrong makes later figures worthless, so the smallest check comes first.
PARTS = {
    "first": Part("attention", "first"),
    "device": Part("device", "device"),
    "numerics": Part("attention", "numerics"),
    "products": Part("products", "checks"),
    "step": Part("step", "step"),
    "engine": Part("engine", "engine"),
    "linears": Part("linears", "linears"),
    "attention": Part("attention", "decode"),
    "prefill": Part("attention", "prefill"),
    "write": Part("write", "write"),
    "more_numerics": Part("attention", "more_numerics"),
    "flashinfer": Part("peers", "flashinfer"),
}
