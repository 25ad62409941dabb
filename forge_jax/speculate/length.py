"""How many drafts to verify: as many as make tokens come faster, and none where that is slower.

Two things are learned while the engine runs. How long a step of so many tokens takes, both while
steps run ahead of the host and when each is read before the next is made, as drafts from the host
need it. And how often a draft of some confidence is right, over all requests and for each of them.
From these follows how many tokens a second each choice would bring, and the best is taken: this is
the goodput of SmartSpec (Liu et al. 2024, arXiv:2406.14066).

Everything here only decides how fast the answer comes, never what it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

BINS = 8  # of confidence
PRIOR = 4.0  # drafts that a bin's, or a request's, own experience must outweigh
WORTH = 1.02  # a choice must be better by this factor: measured times are noisy
HIGHEST = 0.98  # probability that is believed
TRIAL = 16  # steps with drafts, from which it is judged how long such steps take
HOPE = 1.25  # of a step without drafts: what one with drafts is taken to need, during a trial
CONTROL = 5  # steps without drafts that must have been timed, before there are any
CONTROL_AFTER = 512  # steps with drafts, after which the others are timed anew
FIRST_RETRY, LAST_RETRY = 1024, 16384  # steps from one trial to the next, where drafts do not pay


class StepTimes:
    """Seconds that a step takes, by its number of tokens: moving averages.

    Sizes share an average where they are near each other.
    """

    WEIGHT = 1 / 16  # of a new time
    OUTLIER = 3.0  # no time counts as more than so many times the average

    def __init__(self) -> None:
        self._mean: dict[int, tuple[float, float]] = {}  # tokens, seconds
        self._count: dict[int, int] = {}

    def record(self, num_tokens: int, seconds: float) -> None:
        place = _place(num_tokens)
        tokens, mean_s = self._mean.get(place, (num_tokens, seconds))
        count = self._count[place] = self._count.get(place, 0) + 1
        weight = max(self.WEIGHT, 1 / count)
        seconds = min(seconds, self.OUTLIER * mean_s)
        self._mean[place] = (
            tokens + (num_tokens - tokens) * weight,
            mean_s + (seconds - mean_s) * weight,
        )

    def count(self, num_tokens: int) -> int:
        """How many times have been recorded for this size and those near it."""
        return self._count.get(_place(num_tokens), 0)

    def forget(self, num_tokens: int) -> None:
        """For this size and those near it."""
        self._count.pop(_place(num_tokens), None)
        self._mean.pop(_place(num_tokens), None)

    def clear(self) -> None:
        self._mean.clear()
        self._count.clear()

    def expect(self, num_tokens: int) -> float | None:
        """Between two sizes that are known, a time between theirs; beyond them, the nearest's.

        None if nothing is known.
        """
        means = self._mean.values()
        below = max((mean for mean in means if mean[0] <= num_tokens), default=None)
        above = min((mean for mean in means if mean[0] >= num_tokens), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            return None if nearest is None else nearest[1]
        if below[0] == above[0]:
            return below[1]
        part = (num_tokens - below[0]) / (above[0] - below[0])
        return below[1] + part * (above[1] - below[1])


def _place(num_tokens: int) -> int:
    """Up to 8 tokens two places an octave, and four beyond: executables differ there."""
    if num_tokens <= 8:
        return round(2 * math.log2(num_tokens))
    return round(4 * math.log2(num_tokens))


@dataclass(slots=True)
class Experience:
    """What one request's drafts came to, against what was expected of them."""

    right: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        return (self.right + PRIOR) / (self.expected + PRIOR)

    def fade(self) -> None:
        """A text may become more predictable: old experience counts less and less."""
        self.right *= 0.98
        self.expected *= 0.98


@dataclass
class Acceptance:
    """How likely a draft is right, by its drafter's confidence."""

    _tried: list[float] = field(default_factory=lambda: [PRIOR] * BINS)
    _right: list[float] = field(
        default_factory=lambda: [PRIOR * (i + 0.5) / BINS for i in range(BINS)]
    )

    def reach(self, confidence: Seq[float], experience: Experience) -> list[float]:
        """For each token of a draft: the probability that it and all before it are right."""
        reached, probabilities, factor = 1.0, [], experience.factor
        for value in confidence:
            reached *= min(self._of_bin(value) * factor, HIGHEST)
            probabilities.append(reached)
        return probabilities

    def learn(self, confidence: Seq[float], num_right: int, experience: Experience) -> None:
        """Of a draft with these confidences, the first `num_right` tokens were right."""
        for index, value in enumerate(confidence[: num_right + 1]):
            place = _bin(value)
            experience.expected += self._of_bin(value)
            experience.right += index < num_right
            self._tried[place] += 1.0
            self._right[place] += index < num_right
            if self._tried[place] > 50 * PRIOR:
                self._tried[place] /= 2
                self._right[place] /= 2

    def _of_bin(self, confidence: float) -> float:
        place = _bin(confidence)
        return self._right[place] / self._tried[place]


def _bin(confidence: float) -> int:
    return min(int(confidence * BINS), BINS - 1)


class LengthPolicy:
    """Chooses how many drafts a step verifies, from what steps and drafts have come to so far."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.ahead = StepTimes()  # from one result to the next, with a step always in flight
        self.waited = StepTimes()  # the same, where each is read before the next is made
        self._trial = TRIAL  # steps left of it
        self._retry_in = self._retry = FIRST_RETRY  # steps
        self._since_control: dict[int, int] = {}  # steps with drafts, by number of sequences

    def step(self) -> bool:
        """One more has been made. Returns whether a trial begins."""
        self._retry_in -= 1
        if self._retry_in > 0:
            return False
        # Times that speak against drafts would never be measured again; and those of a few steps
        # among many others say little of a row of them: what is not run is cold.
        self._trial = TRIAL
        self.waited.clear()
        self.ahead.clear()
        self._retry = min(2 * self._retry, LAST_RETRY)
        self._retry_in = self._retry
        return True

    def tried(self, num_sequences: int) -> None:
        """The next step verifies what has been chosen."""
        since = self._since_control.get(num_sequences, 0) + 1
        if since == CONTROL_AFTER:
            # They may have been timed under other circumstances, and drafts that seem to pay keep
            # them from being timed again.
            self.ahead.forget(num_sequences)
            since = 0
        self._since_control[num_sequences] = since
        if self._trial:
            self._trial -= 1
        else:
            self._retry_in = self._retry = FIRST_RETRY

    def knows(self, num_sequences: int) -> bool:
        """Whether steps without drafts have been timed; until then there are none, nor looks."""
        return self.ahead.count(num_sequences) >= CONTROL

    def choose(self, num_sequences: int, gains: Seq[float]) -> int:
        """How many of the drafts to verify.

        Args:
          num_sequences: in the step, each with one token.
          gains: the probability that a draft brings a token, the largest first.

        Returns:
          0 to `len(gains)`; 0 also where it is not known yet how long a step takes.
        """
        plain_s = self.ahead.expect(num_sequences)
        if not plain_s or not gains or not self.knows(num_sequences):
            return 0
        best, best_rate = 0, WORTH * num_sequences / plain_s
        expected, counted = float(num_sequences), 0
        for count in _counts(len(gains)):
            expected += sum(gains[counted:count])
            counted = count
            seconds = None if self._trial else self.waited.expect(num_sequences + count)
            rate = expected / (seconds or HOPE * plain_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best


def _counts(most: int) -> list[int]:
    """The counts to compare: all small ones, then about four in each octave."""
    counts = [count for count in range(1, most) if count <= 8]
    count = 10
    while count < most:
        counts.append(count)
        count += max(2, count // 4)
    return [*counts, most]
