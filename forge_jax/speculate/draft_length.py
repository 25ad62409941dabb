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
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

BINS = 8  # of confidence
PRIOR = 4.0  # drafts that a bin's, or a request's, own experience must outweigh
MIN_GAIN = 1.02  # a choice must be better by this factor: measured times are noisy
HIGHEST = 0.98  # probability that is believed
TRIAL = 16  # steps with drafts, from which it is judged how long such steps take
ASSUMED_SLOWDOWN = (
    1.25  # of a step without drafts: what one with drafts is taken to need, during a trial
)
FEW, HOPELESS = 4, 0.8  # a trial ends after so many steps, if drafts bring less than this rate
GROWTH = 2  # a step with drafts has at most so many times the tokens of the largest timed one
CONTROL = 8  # steps without drafts that must have been timed, before there are any
CONTROL_AFTER = 256  # steps with drafts, after which the others are timed anew
RUN_END_RATE = 1 / 64  # weight of a step with drafts in how often one is the last of a row
FIRST_RETRY, LAST_RETRY = 1024, 16384  # steps from one trial to the next, where drafts do not pay


class StepTimes:
    """Seconds that a step takes, by its number of tokens: means of the latest.

    Sizes share a mean where they are near each other.
    """

    LATEST = 32
    OUTLIER = 3.0  # no time counts as more than so many times the median

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}  # seconds
        self._known: dict[int, tuple[float, float]] = {}  # means of tokens and seconds
        self._stale: set[int] = set()  # places whose mean has to be found anew

    def record(self, num_tokens: int, seconds: float) -> None:
        place = _place(num_tokens)
        latest = self._latest.setdefault(place, deque(maxlen=self.LATEST))
        latest.append(seconds)
        tokens, mean_s = self._known.get(place, (num_tokens, seconds))
        self._known[place] = tokens + (num_tokens - tokens) / len(latest), mean_s
        self._stale.add(place)

    def count(self, num_tokens: int) -> int:
        """How many times are held for this size and those near it."""
        return len(self._latest.get(_place(num_tokens), ()))

    def forget(self, num_tokens: int) -> None:
        """For this size and those near it."""
        place = _place(num_tokens)
        self._latest.pop(place, None)
        self._known.pop(place, None)
        self._stale.discard(place)

    def clear(self) -> None:
        self._latest.clear()
        self._known.clear()
        self._stale.clear()

    @property
    def largest(self) -> float:
        """Tokens of the largest size that has been timed, 0 if none has."""
        return max((tokens for tokens, _ in self._known.values()), default=0.0)

    def expect(self, num_tokens: int, origin: tuple[float, float] | None = None) -> float | None:
        """Between two sizes that are known, a time between theirs; beyond them, the nearest's.

        None if nothing is known. `origin` is one more size, with its seconds.
        """
        for place in self._stale:
            self._known[place] = self._known[place][0], self._mean_s(self._latest[place])
        self._stale.clear()
        known = [*self._known.values()]
        if origin is not None:
            known.append(origin)
        below = max((times for times in known if times[0] <= num_tokens), default=None)
        above = min((times for times in known if times[0] >= num_tokens), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            return None if nearest is None else nearest[1]
        if below[0] == above[0]:
            return below[1]
        part = (num_tokens - below[0]) / (above[0] - below[0])
        return below[1] + part * (above[1] - below[1])

    def _mean_s(self, latest: Collection[float]) -> float:
        most = self.OUTLIER * sorted(latest)[len(latest) // 2]
        return sum(min(seconds, most) for seconds in latest) / len(latest)


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
        self.ahead = StepTimes()  # without drafts, with a step always in flight
        self.alone = StepTimes()  # without drafts, dispatched when nothing was in flight
        self.drafted = StepTimes()  # with drafts, before which everything is read
        self._turns = 0.5  # which part of the steps with drafts are the last of a row of them
        self._in_row = False  # whether the last step was one
        self._trial = TRIAL  # steps left of it
        self._retry_in = self._retry = FIRST_RETRY  # steps
        self._since_control: dict[tuple[int, bool], int] = {}  # steps with drafts

    def step(self, drafted: bool) -> bool:
        """One more has been made, with drafts or without. Returns whether a trial begins."""
        if self._in_row:
            self._turns += ((not drafted) - self._turns) * RUN_END_RATE
        self._in_row = drafted
        self._retry_in -= 1
        if self._retry_in > 0:
            return False
        # Times that speak against drafts would never be measured again; and those of a few steps
        # among many others say little of a row of them: what is not run is cold.
        self._trial = TRIAL
        for times in (self.ahead, self.alone, self.drafted):
            times.clear()
        self._retry = min(2 * self._retry, LAST_RETRY)
        self._retry_in = self._retry
        return True

    def tried(self, num_sequences: int, *, runs_ahead: bool = True) -> None:
        """The next step verifies what has been chosen."""
        since = self._since_control.get((num_sequences, runs_ahead), 0) + 1
        if since == CONTROL_AFTER:
            # They may have been timed under other circumstances, and drafts that seem to pay keep
            # them from being timed again.
            self._plain(runs_ahead).forget(num_sequences)
            since = 0
        self._since_control[num_sequences, runs_ahead] = since
        if self._trial:
            self._trial -= 1
        else:
            self._retry_in = self._retry = FIRST_RETRY

    def knows(self, num_sequences: int, *, runs_ahead: bool = True) -> bool:
        """Whether steps without drafts have been timed; until then there are none, nor looks."""
        return self._plain(runs_ahead).count(num_sequences) >= CONTROL

    def plain_s(self, num_sequences: int, *, runs_ahead: bool = True) -> float | None:
        """Seconds of a step without drafts, if any is known."""
        return self._plain(runs_ahead).expect(num_sequences)

    def choose(
        self,
        num_sequences: int,
        gains: Seq[float],
        *,
        runs_ahead: bool = True,
        in_flight: bool = False,
    ) -> int:
        """How many of the drafts to verify.

        Args:
          num_sequences: in the step, each with one token.
          gains: the probability that a draft brings a token, the largest first.
          runs_ahead: whether steps without drafts are made with another one in flight.
          in_flight: one is, which would have to be waited for. Later, when steps run ahead
            again, the first of them brings its tokens late: this is what a row of steps with
            drafts costs besides them.

        Returns:
          0 to `len(gains)`; 0 also where it is not known yet how long a step takes.
        """
        plain_s = self.plain_s(num_sequences, runs_ahead=runs_ahead)
        if not plain_s or not gains or not self.knows(num_sequences, runs_ahead=runs_ahead):
            return 0
        turn_s = 0.0
        if in_flight and (alone_s := self.alone.expect(num_sequences)) is not None:
            turn_s = self._turns * max(alone_s - plain_s, 0.0)
        best, best_rate = 0, MIN_GAIN * num_sequences / plain_s
        if self._trial:
            if (num_sequences + sum(gains)) / (ASSUMED_SLOWDOWN * plain_s + turn_s) <= best_rate:
                return 0
            # Times of a few steps say little: they choose among counts, and speak against all of
            # them only where drafts are far too slow.
            best_rate *= HOPELESS if self._trial <= TRIAL - FEW else 0.0
        expected, counted = float(num_sequences), 0
        most = GROWTH * max(num_sequences, self.drafted.largest)
        for count in _counts(len(gains)):
            if num_sequences + count > most:
                break
            expected += sum(gains[counted:count])
            counted = count
            # Sizes that have not been timed are taken to be cheap, so that one step times them:
            # without drafts they would cost nothing, and a larger step no more than a smaller.
            seconds = self.drafted.expect(num_sequences + count, origin=(num_sequences, plain_s))
            assert seconds is not None
            rate = expected / (max(seconds, plain_s) + turn_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _plain(self, runs_ahead: bool) -> StepTimes:
        return self.ahead if runs_ahead else self.alone


def _counts(most: int) -> list[int]:
    """The counts to compare: all small ones, then about four in each octave."""
    counts = [count for count in range(1, most) if count <= 8]
    count = 10
    while count < most:
        counts.append(count)
        count += max(2, count // 4)
    return [*counts, most]
