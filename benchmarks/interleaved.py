"""Timing of short functions in turn, A B A B ..., so that slow moments affect all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

SAMPLE_S = 0.02  # each sample repeats the call for about this long


def median_seconds(
    sides: Mapping[str, Callable[[], Any]], rounds: int, sample_s: float = SAMPLE_S
) -> dict[str, float]:
    """Return the median seconds per call of each side over `rounds`, after one unmeasured call.

    The results of each function are awaited.
    """
    calls = {}
    for name, function in sides.items():
        jax.block_until_ready(function())
        calls[name] = max(1, round(sample_s / max(_seconds(function, 1), 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, function in sides.items():
            samples[name].append(_seconds(function, calls[name]))
    return {name: statistics.median(values) for name, values in samples.items()}


def _seconds(function: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(function())
    return (time.perf_counter() - start) / calls
