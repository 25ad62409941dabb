"""How many tokens a step may compute, so that running decodes keep an inter-token latency target.

A step takes as long as its tokens take, and every sequence that decodes in it waits for all of
them. So the size of a step with prompts follows the measured times of the steps before: it is the
largest that is expected to stay within the target. Sarathi-Serve (Agrawal et al. 2024,
arXiv:2403.02310) finds one such size by profiling before it serves; here it is found while the
engine runs, and follows the machine.

Everything here only decides how a prompt is cut, never what is computed.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from forge_jax.schedule.plan import StepPlan

MIN_CHUNK = 8  # tokens of prompts in a step, at least
SHARE = 0.5  # of the time of a step that prompts get at least
AIM = 0.9  # of the target: measured times are noisy
LATEST = 3  # times of a size, of which the median counts


@dataclass(slots=True)
class _Size:
    """What is known of steps of about as many tokens."""

    tokens: float  # mean
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))  # seconds


class TokenBudget:
    """Chooses how many tokens a step with prompts may have while other sequences decode.

    Bounded on both sides. The step is the largest that is expected to take at most the target. But
    prompts always get about half of its time (`SHARE`): where decodes alone take more than half of
    the target, a step may take twice as long as they do. Where a step costs a constant and its
    tokens, the time to first token therefore at most about doubles, and no prompt starves.

    How long a step takes is learned from the median of the latest times of each size. A step takes
    no less than a smaller one, and no more per token: an older time that contradicts a newer one
    is corrected by that. So all sizes follow at once when the machine becomes slower or faster.
    Steps grow at most twofold beyond the largest that has been measured.

    One thread schedules and records; any thread may read `latest` and `expected_s`.

    Args:
      target_s: between two tokens of a sequence.
      sizes: of executables that compute unused rows as well: other sizes would cost as much as the
        next of these. None: a step costs what its tokens cost.
    """

    def __init__(self, target_s: float, sizes: Iterable[int] | None = None):
        assert target_s > 0
        self.target_s = target_s
        self.latest: int | None = None  # tokens of the latest step that could take prompts, at most
        self.expected_s: float | None = None  # seconds of such a step, if anything is known
        self._fixed = None if sizes is None else sorted(sizes)
        # By whether there were prompts, and tokens; the one that was measured last comes last.
        self._measured: dict[tuple[bool, int], _Size] = {}
        self._known: list[tuple[float, float]] | None = []  # (tokens, seconds); None: to be made
        self._read_s = -math.inf  # when the last step was read

    def choose(self, num_decodes: int, most: int) -> int:
        """The tokens of the next step, `num_decodes` among them; at most `most`.

        Args:
          num_decodes: the tokens that do not belong to prompts: decodes, and drafts to be verified.
            0: nobody waits for a token, and the whole step is for prompts.
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
        # Up to the next, or twice as many, beyond what is known.
        end = max(1 + bisect_right(sizes, largest), bisect_right(sizes, 2 * largest))
        chosen = sizes[0]
        for size in sizes[:end]:
            size_s = self.seconds(size)
            assert size_s is not None
            if size_s <= enough_s:
                chosen = size
        return chosen

    def _sizes(self, num_decodes: int, most: int) -> list[int]:
        """To choose from: four chunks an octave if any size will do. Not empty."""
        sizes = self._fixed
        if sizes is None:
            octaves = range(3, most.bit_length())
            chunks = [part << octave - 2 for octave in octaves for part in range(4, 8)]
            sizes = [num_decodes + chunk for chunk in chunks]
        least = num_decodes + MIN_CHUNK
        return [size for size in sizes if least <= size < most] + [most]

    def record(self, plan: StepPlan, dispatched_s: float, read_s: float) -> None:
        """A step has been read. What counts is its own time, not that of the step before.

        Args:
          dispatched_s, read_s: when it was dispatched, and when its result was there.
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
        """How long a step of so many tokens is expected to take; None if nothing is known.

        Between two sizes that are known on a line through both, beyond the largest on a line from
        the smallest through it, and below the smallest in proportion: no less than it can be.
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
        """The sizes that are known and their seconds, ascending in both."""
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
