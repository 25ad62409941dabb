"""Comparison of the step times of two runs: which is slower, and does it exceed the noise?

Neighboring steps resemble each other, so single steps are no independent samples. Each run is
divided into `BATCHES` batches of consecutive steps (the method of batch means: Law, *Simulation
Modeling and Analysis*, section 9.5.3). The interval is Welch's, from the medians of the batches,
with the fewest degrees of freedom that his formula can give.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

BATCHES = 5
MIN_STEPS = 2 * BATCHES
T_975 = 2.776  # 97.5th percentile of Student's t with BATCHES - 1 degrees of freedom

Outcome = Literal["slower", "faster", "slightly slower", "slightly faster", "no difference"]


@dataclass(frozen=True)
class StepTime:
    """Wall times of the steps of a run, in microseconds."""

    steps: int
    median: float
    p10: float
    p90: float
    batches: tuple[float, ...]  # median of each batch

    @classmethod
    def of(cls, us: Sequence[float]) -> StepTime | None:
        """Return the summary of steps in their order. None if there are fewer than `MIN_STEPS`."""
        if len(us) < MIN_STEPS:
            return None
        deciles = statistics.quantiles(us, n=10, method="inclusive")
        bounds = [len(us) * i // BATCHES for i in range(BATCHES + 1)]
        batches = tuple(
            statistics.median(us[begin:end]) for begin, end in itertools.pairwise(bounds)
        )
        return cls(len(us), statistics.median(us), deciles[0], deciles[-1], batches)


@dataclass(frozen=True)
class Verdict:
    """The difference of two step times.

    Attributes:
      percent: the smallest difference, in percent of `before`, that is not called slight.
    """

    before: StepTime
    after: StepTime
    percent: float

    @property
    def delta(self) -> float:
        """The difference of the medians in microseconds."""
        return self.after.median - self.before.median

    @property
    def margin(self) -> float:
        """Half of the 95% confidence interval of `delta`, in microseconds."""
        squares = (statistics.variance(run.batches) for run in (self.before, self.after))
        return T_975 * math.sqrt(sum(squares) / BATCHES)

    def in_percent(self, us: float) -> float:
        return 100 * us / self.before.median

    @property
    def outcome(self) -> Outcome:
        if abs(self.delta) <= self.margin:
            return "no difference"
        if abs(self.in_percent(self.delta)) < self.percent:
            return "slightly slower" if self.delta > 0 else "slightly faster"
        return "slower" if self.delta > 0 else "faster"
