"""Device timing: long enough runs, the median of several, one wait at the end of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

TARGET_S = 0.2  # duration of one run
ROUNDS = 5


def seconds(call: Callable[[], Any], *, target_s: float = TARGET_S, rounds: int = ROUNDS) -> float:
    """Return the seconds of one `call`, which returns arrays; many calls share one wait."""
    jax.block_until_ready(call())  # compile and warm up
    begin_s = time.perf_counter()
    jax.block_until_ready(call())
    once_s = time.perf_counter() - begin_s
    count = max(1, min(1000, int(target_s / max(once_s, 1e-6))))
    times = []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        result = None
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - begin_s) / count)
    return statistics.median(times)
