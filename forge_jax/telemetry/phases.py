"""Histograms of the host's time in each phase of a step, and of the tokens per step."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["draft", "schedule", "mask", "dispatch", "read", "commit", "text", "deliver"]
PHASES: tuple[Phase, ...] = get_args(Phase)
BOUNDS_S = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005),
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, kw_only=True)
class PhaseTotals:
    """The number of runs of a phase and their total time in seconds.

    `buckets[i]` counts runs of at most `BOUNDS_S[i]` and more than the previous bound. The last
    bucket has no upper bound.
    """

    count: int
    total_s: float
    buckets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TokenTotals:
    """The number of steps and their total number of tokens.

    `buckets` are those of `PhaseTotals`, with the bounds `STEP_TOKENS`.
    """

    count: int
    total: int
    buckets: tuple[int, ...]


class StepTokens:
    """A histogram of the tokens per step, prompts and decodes together.

    One thread observes. Any thread may read `totals`, whose values may differ by a step.
    """

    def __init__(self) -> None:
        self._total = 0
        self._buckets = [0] * (len(STEP_TOKENS) + 1)

    def observe(self, num_tokens: int) -> None:
        self._total += num_tokens
        self._buckets[bisect_left(STEP_TOKENS, num_tokens)] += 1

    def totals(self) -> TokenTotals:
        buckets = tuple(self._buckets)
        return TokenTotals(count=sum(buckets), total=self._total, buckets=buckets)


class PhaseTimes:
    """Histograms of the phases of a step, at a cost of 0.5 us per phase.

    One thread begins and ends phases. Any thread may read `totals`, whose values may differ by a
    step.

        times.begin()
        plan = scheduler.schedule()
        times.end("schedule")
        pending = device.dispatch(plan)
        times.end("dispatch")
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._since = 0.0
        self._total_s = dict.fromkeys(PHASES, 0.0)
        self._buckets = {phase: [0] * (len(BOUNDS_S) + 1) for phase in PHASES}

    def begin(self) -> None:
        """Begin the first phase of a step. Each later phase begins when the previous one ends."""
        self._since = self._clock()

    def end(self, phase: Phase) -> None:
        now = self._clock()
        seconds = now - self._since
        self._since = now
        self._total_s[phase] += seconds
        self._buckets[phase][bisect_left(BOUNDS_S, seconds)] += 1

    def totals(self) -> dict[Phase, PhaseTotals]:
        """Return the totals since the start, by phase."""
        totals = {}
        for phase in PHASES:
            buckets = tuple(self._buckets[phase])
            totals[phase] = PhaseTotals(
                count=sum(buckets), total_s=self._total_s[phase], buckets=buckets
            )
        return totals
