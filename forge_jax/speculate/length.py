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
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

BINS = 8  # of confidence
PRIOR = 4.0  # drafts that a bin's, or a request's, own experience must outweigh
WORTH = 1.02  # a choice must be better by this factor: measured times are noisy
HIGHEST = 0.98  # probability that is believed
FIRST_RETRY, LAST_RETRY = 256, 8192  # refusals after which measured times are doubted


class StepTimes:
    """Seconds that a step takes, by its number of tokens: medians of the latest few.

    Sizes from nine tokens on share one where they are within a sixth of each other. No means: the
    first steps of an executable are slow, and now and then the machine does something else.
    """

    LATEST = 15

    def __init__(self) -> None:
        self._latest: dict[int, deque[tuple[float, int]]] = {}  # seconds, tokens
        self._known: dict[int, tuple[float, float]] = {}  # mean tokens, median seconds

    @property
    def known(self) -> bool:
        """Whether anything is."""
        return bool(self._known)

    def record(self, num_tokens: int, seconds: float) -> None:
        place = _place(num_tokens)
        latest = self._latest.get(place)
        if latest is None:
            latest = self._latest[place] = deque(maxlen=self.LATEST)
        latest.append((seconds, num_tokens))
        median_s, _ = sorted(latest)[(len(latest) - 1) // 2]
        self._known[place] = (sum(tokens for _, tokens in latest) / len(latest), median_s)

    def expect(self, num_tokens: int) -> float | None:
        """Between two sizes that are known, a time between theirs; beyond them, the nearest's.

        None if nothing is known.
        """
        exact = self._known.get(num_tokens) if num_tokens <= 8 else None
        if exact is not None:
            return exact[1]
        below = max(
            (known for known in self._known.values() if known[0] <= num_tokens), default=None
        )
        above = min(
            (known for known in self._known.values() if known[0] >= num_tokens), default=None
        )
        if below is None or above is None:
            nearest = above if below is None else below
            return None if nearest is None else nearest[1]
        if below[0] == above[0]:
            return below[1]
        part = (num_tokens - below[0]) / (above[0] - below[0])
        return below[1] + part * (above[1] - below[1])


def _place(num_tokens: int) -> int:
    return num_tokens if num_tokens <= 8 else round(4 * math.log2(num_tokens)) - 4


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
        self._refusals = 0
        self._retry = FIRST_RETRY

    def choose(self, num_sequences: int, gains: Seq[float]) -> int:
        """How many of the drafts to verify.

        Args:
          num_sequences: in the step, each with one token.
          gains: the probability that a draft brings a token, the largest first.

        Returns:
          0 to `len(gains)`; 0 also where it is not known yet how long a step takes.
        """
        plain_s = self.ahead.expect(num_sequences)
        if not plain_s or not gains:
            return 0
        best, best_rate = 0, WORTH * num_sequences / plain_s
        doubts = self._refusals >= self._retry
        expected, counted = float(num_sequences), 0
        for count in _counts(len(gains)):
            expected += sum(gains[counted:count])
            counted = count
            seconds = None if doubts else self.waited.expect(num_sequences + count)
            # Where nothing has been measured, hope: it will be. Times that speak against drafts
            # would never be measured again: once in a while they are doubted.
            rate = expected / (seconds or plain_s)
            if rate > best_rate:
                best, best_rate = count, rate
        if not best:
            self._refusals += 1
        elif doubts:
            self._refusals, self._retry = 0, min(2 * self._retry, LAST_RETRY)
        elif self.waited.known:
            self._refusals, self._retry = 0, FIRST_RETRY
        return best


def _counts(most: int) -> list[int]:
    """The counts to compare: all small ones, then about four in each octave."""
    counts = [count for count in range(1, most) if count <= 8]
    count = 10
    while count < most:
        counts.append(count)
        count += max(2, count // 4)
    return [*counts, most]
