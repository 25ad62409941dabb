"""Token budgets that keep the inter-token latency of running decodes at a target.

A step takes as long as its tokens take, and every sequence that decodes in it waits for all of
them. The size of a step with prompts therefore follows measured step times: the largest size that
is expected to stay within the target. Sarathi-Serve (Agrawal et al. 2024, arXiv:2403.02310) finds
one such size by profiling before it serves. This module measures while the engine runs, and adapts
to the machine.

The budget only determines how prompts are cut, never the values that are computed.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from forge_jax.schedule.plan import StepPlan

MIN_CHUNK = 8  # minimum prompt tokens per step
SHARE = 0.5  # minimum time share of prompts
AIM = 0.9  # fraction of the target, because measured times are noisy
LATEST = 3  # times per median


@dataclass(slots=True)
class _Size:
    """Measurements of steps with about the same number of tokens."""

    tokens: float
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))  # seconds


class TokenBudget:
    """The number of tokens in a step with prompts while other sequences decode.

    The step is the largest that is expected to take at most the target. However, prompts always get
    about half of its time (`SHARE`). If decodes alone take more than half of the target, a step may
    take twice as long as the decodes. If a step's cost is a constant plus a cost per token, the
    time to first token at most about doubles, and no prompt starves.

    The expected time of a step is the median of the latest times of its size. A step takes no less
    than a smaller one, and no more per token. An older time that contradicts a newer one is
    corrected to these bounds. All sizes therefore adapt at once when the machine becomes slower or
    faster. Steps grow at most twofold beyond the largest measured size.

    One thread schedules and records; any thread may read `latest` and `expected_s`.

    Args:
      target_s: inter-token latency target, in seconds.
      sizes: token counts of executables that also compute unused rows. Any other size would cost as
        much as the next of these. None: a step costs what its tokens cost.
    """

    def __init__(self, target_s: float, sizes: Iterable[int] | None = None):
        assert target_s > 0
        self.target_s = target_s
        self.latest: int | None = None  # token limit of the latest step that could take prompts
        # Expected seconds of such a step; None without measurements.
        self.expected_s: float | None = None
        self._fixed = None if sizes is None else sorted(sizes)
        # The key is (has prompts, size class). The latest measurement comes last.
        self._measured: dict[tuple[bool, int], _Size] = {}
        # (tokens, seconds); None: must be recomputed
        self._known: list[tuple[float, float]] | None = []
        self._read_s = -math.inf  # when the last step was read

    def choose(self, num_decodes: int, most: int) -> int:
        """Return the number of tokens of the next step, including `num_decodes`, at most `most`.

        Args:
          num_decodes: tokens outside prompts: decodes, and drafts to verify. 0: no sequence waits
            for a token, and the whole step is for prompts.
        """
        self.latest = most if not num_decodes else self._choose(num_decodes, most)
        self.expected_s = self.seconds(self.latest)
        return self.latest

    def _choose(self, num_decodes: int, most: int) -> int:
        sizes = self._sizes(num_decodes, most)
        decodes_s = self.seconds(num_decodes)
        if decodes_s is None:
            return sizes[0]
        enough_s = max(AIM * self.target_s, decodes_s / (1 - SHARE))
        largest = self._points()[-1][0]
        # One size, or a factor of two, beyond the measured ones.
        end = max(1 + bisect_right(sizes, largest), bisect_right(sizes, 2 * largest))
        chosen = sizes[0]
        for size in sizes[:end]:
            size_s = self.seconds(size)
            assert size_s is not None
            if size_s <= enough_s:
                chosen = size
        return chosen

    def _sizes(self, num_decodes: int, most: int) -> list[int]:
        """Return the candidate sizes, four per octave unless they are fixed. Never empty."""
        sizes = self._fixed
        if sizes is None:
            octaves = range(3, most.bit_length())
            chunks = [part << octave - 2 for octave in octaves for part in range(4, 8)]
            sizes = [num_decodes + chunk for chunk in chunks]
        least = num_decodes + MIN_CHUNK
        return [size for size in sizes if least <= size < most] + [most]

    def record(self, plan: StepPlan, dispatched_s: float, read_s: float) -> None:
        """Record the time of a step that has been read, without the time of the step before.

        Args:
          dispatched_s, read_s: when it was dispatched, and when its result was available.
        """
        seconds = read_s - max(dispatched_s, self._read_s)
        self._read_s = read_s
        if seconds <= 0 or plan.pools:
            return
        num_tokens = plan.num_tokens
        has_prompts = any(not row.num_drafts for row in plan.chunks)
        if has_prompts and self._fixed is not None:
            num_tokens = next((size for size in self._fixed if size >= num_tokens), num_tokens)
        place = has_prompts, round(2 * math.log2(num_tokens))
        size = self._measured.pop(place, None) or _Size(num_tokens)
        size.latest.append(seconds)
        size.tokens += (num_tokens - size.tokens) / len(size.latest)
        self._measured[place] = size
        self._known = None

    def seconds(self, num_tokens: int) -> float | None:
        """Return the expected seconds of a step of `num_tokens`, or None without measurements.

        Interpolates linearly between two measured sizes. Beyond the largest, it extrapolates the
        line from the smallest through the largest. Below the smallest, the time is proportional,
        which is a lower bound.
        """
        known = self._points()
        if not known:
            return None
        index = bisect_right(known, (num_tokens, math.inf))
        (left, left_s), (right, right_s) = known[0], known[min(index, len(known) - 1)]
        if 0 < index < len(known):
            left, left_s = known[index - 1]
        elif not index or left == right:
            left = left_s = 0.0
        return left_s + (right_s - left_s) * (num_tokens - left) / (right - left)

    def _points(self) -> list[tuple[float, float]]:
        """Return the measured sizes and their seconds, ascending in both."""
        if self._known is None:
            self._known = []
            for size in reversed(self._measured.values()):
                seconds = statistics.median(size.latest)
                for newer, newer_s in self._known:
                    bounds = newer_s, newer_s * size.tokens / newer
                    seconds = min(max(seconds, min(bounds)), max(bounds))
                self._known.append((size.tokens, seconds))
            self._known.sort()
        return self._known
