"""The parts in the order in which they run. Heavy imports wait until a part runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Missing(Exception):
    """The part needs something that is not installed; the message names it."""


@dataclass(frozen=True)
class Part:
    """`benchmarks.gpu.MODULE:FUNCTION`, and its time limit."""

    module: str
    function: str
    seconds: float

    def run(self, tiny: bool) -> dict[str, Any]:
        """Return `{"figures": ...}`, or `{"skipped": reason}`."""
        module = importlib.import_module(f"benchmarks.gpu.{self.module}")
        function: Callable[[bool], Any] = getattr(module, self.function)
        try:
            return {"figures": function(tiny)}
        except Missing as missing:
            return {"skipped": str(missing)}


PARTS = {
    "device": Part("device", "device", 60.0),
    "numerics": Part("attention", "numerics", 120.0),
    "attention": Part("attention", "decode", 150.0),
    "step": Part("step", "step", 200.0),
    "write": Part("write", "write", 40.0),
    "prefill": Part("attention", "prefill", 60.0),
    "engine": Part("engine", "engine", 240.0),
    "flashinfer": Part("peers", "flashinfer", 60.0),
}
