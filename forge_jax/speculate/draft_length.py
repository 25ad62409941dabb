"""The number of drafts to verify, chosen to maximize tokens per second.

The engine learns two things while it runs. One is the duration of a step by its number of tokens,
with another step in flight and without one. The other is the acceptance rate of drafts by
confidence, over all requests and per request. Both give the expected tokens per second of each
choice: the goodput of SmartSpec (Liu et al. 2024, arXiv:2406.14066).

The choice affects only speed, never the output.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

BINS = 8  # Of confidence.
PRIOR = 4.0  # Weight of the prior, in drafts, for a bin or a request.
MIN_GAIN = 1.02  # Drafts must be faster by this factor, because measured times are noisy.
HIGHEST = 0.98  # Upper bound of estimated probabilities.
TRIAL = 16  # Steps with drafts in a trial, which measures their duration.
ASSUMED_SLOWDOWN = (
    1.25  # Duration of a step with drafts during a trial, relative to one without drafts.
)
FEW, HOPELESS = 4, 0.8  # A trial ends after FEW steps if the relative rate is below HOPELESS.
GROWTH = 2  # Limit of a step's tokens, relative to the largest timed step with drafts.
CONTROL = 8  # Steps without drafts that must be timed before there are drafts.
CONTROL_AFTER = 256  # Steps with drafts, after which steps without drafts are timed again.
RUN_END_RATE = 1 / 64  # Weight of a step in the estimated frequency of the ends of draft runs.
FIRST_RETRY, LAST_RETRY = 1024, 16384  # Steps between trials if drafts do not pay.


class StepTimes:
    """The mean duration in seconds of the latest steps, by number of tokens.

    Similar numbers of tokens share a mean.
    """

    LATEST = 32
    OUTLIER = 3.0  # times are clipped at this multiple of the median

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}  # seconds
        self._known: dict[int, tuple[float, float]] = {}  # means of tokens and seconds
        self._stale: set[int] = set()  # places whose mean must be computed again

    def record(self, num_tokens: int, seconds: float) -> None:
        place = _place(num_tokens)
        latest = self._latest.setdefault(place, deque(maxlen=self.LATEST))
        latest.append(seconds)
        tokens, mean_s = self._known.get(place, (num_tokens, seconds))
        self._known[place] = tokens + (num_tokens - tokens) / len(latest), mean_s
        self._stale.add(place)

    def count(self, num_tokens: int) -> int:
        """Return the number of recorded times for this size and similar ones."""
        return len(self._latest.get(_place(num_tokens), ()))

    def forget(self, num_tokens: int) -> None:
        """Drop the times for this size and similar ones."""
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
        """The largest timed size in tokens, or 0 if there is none."""
        return max((tokens for tokens, _ in self._known.values()), default=0.0)

    def expect(self, num_tokens: int, origin: tuple[float, float] | None = None) -> float | None:
        """Return the expected seconds for a size, or None if no times are known.

        Times are interpolated linearly between known sizes. Outside their range, the nearest size's
        time is used. `origin` is an additional known (size, seconds).
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
    """Return the bin of a size: two per octave up to 8 tokens, then 4, where executables differ."""
    if num_tokens <= 8:
        return round(2 * math.log2(num_tokens))
    return round(4 * math.log2(num_tokens))


@dataclass(slots=True)
class Experience:
    """The accepted drafts of one request, compared with the expected number."""

    right: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        return (self.right + PRIOR) / (self.expected + PRIOR)

    def fade(self) -> None:
        """Reduce the weight of old drafts, because a text may become more predictable."""
        self.right *= 0.98
        self.expected *= 0.98


@dataclass
class Acceptance:
    """The estimated acceptance rate of drafts, by the drafter's confidence."""

    _tried: list[float] = field(default_factory=lambda: [PRIOR] * BINS)
    _right: list[float] = field(
        default_factory=lambda: [PRIOR * (i + 0.5) / BINS for i in range(BINS)]
    )

    def reach(self, confidence: Seq[float], experience: Experience) -> list[float]:
        """Return for each token of a draft the probability that it and all before it are right."""
        reached, probabilities, factor = 1.0, [], experience.factor
        for value in confidence:
            reached *= min(self._of_bin(value) * factor, HIGHEST)
            probabilities.append(reached)
        return probabilities

    def learn(self, confidence: Seq[float], num_right: int, experience: Experience) -> None:
        """Record that the first `num_right` tokens of a draft were right."""
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
    """The choice of the number of drafts per step, from measured times and acceptance rates."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.ahead = StepTimes()  # Without drafts, with another step in flight.
        self.alone = StepTimes()  # Without drafts, dispatched with nothing in flight.
        self.drafted = StepTimes()  # With drafts, dispatched with nothing in flight.
        self._turns = 0.5  # Fraction of steps with drafts that are the last of a run.
        self._in_row = False  # True if the last step had drafts.
        self._trial = TRIAL  # Steps left in the trial.
        self._retry_in = self._retry = FIRST_RETRY  # Steps.
        self._since_control: dict[tuple[int, bool], int] = {}  # Steps with drafts.

    def step(self, drafted: bool) -> bool:
        """Count a step, and return True if a trial begins."""
        if self._in_row:
            self._turns += ((not drafted) - self._turns) * RUN_END_RATE
        self._in_row = drafted
        self._retry_in -= 1
        if self._retry_in > 0:
            return False
        # Otherwise unfavorable times would never be measured again. Times of single steps with
        # drafts do not represent a run of them, because their executables are cold.
        self._trial = TRIAL
        for times in (self.ahead, self.alone, self.drafted):
            times.clear()
        self._retry = min(2 * self._retry, LAST_RETRY)
        self._retry_in = self._retry
        return True

    def tried(self, num_sequences: int, *, runs_ahead: bool = True) -> None:
        """Record that the next step verifies the chosen drafts."""
        since = self._since_control.get((num_sequences, runs_ahead), 0) + 1
        if since == CONTROL_AFTER:
            # Conditions may have changed since steps without drafts were timed. While drafts seem
            # to pay, such steps would not be timed again.
            self._plain(runs_ahead).forget(num_sequences)
            since = 0
        self._since_control[num_sequences, runs_ahead] = since
        if self._trial:
            self._trial -= 1
        else:
            self._retry_in = self._retry = FIRST_RETRY

    def knows(self, num_sequences: int, *, runs_ahead: bool = True) -> bool:
        """Return True if enough steps without drafts are timed, which drafts and looks require."""
        return self._plain(runs_ahead).count(num_sequences) >= CONTROL

    def plain_s(self, num_sequences: int, *, runs_ahead: bool = True) -> float | None:
        """Return the expected seconds of a step without drafts, or None if unknown."""
        return self._plain(runs_ahead).expect(num_sequences)

    def choose(
        self,
        num_sequences: int,
        gains: Seq[float],
        *,
        runs_ahead: bool = True,
        in_flight: bool = False,
    ) -> int:
        """Return the number of drafts to verify.

        Args:
          num_sequences: the number of sequences in the step, each with one token.
          gains: the acceptance probabilities of the drafts, the largest first.
          runs_ahead: True if steps without drafts run with another one in flight.
          in_flight: True if a step is in flight, which must be read first. After a run of steps
            with drafts, the first step that runs ahead returns its tokens late. The choice includes
            this cost.

        Returns:
          0 to `len(gains)`; 0 if step times are not known yet.
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
            # Times of few steps are unreliable. They rank the counts, but reject all of them only
            # if drafts are far too slow.
            best_rate *= HOPELESS if self._trial <= TRIAL - FEW else 0.0
        expected, counted = float(num_sequences), 0
        most = GROWTH * max(num_sequences, self.drafted.largest)
        for count in _counts(len(gains)):
            if num_sequences + count > most:
                break
            expected += sum(gains[counted:count])
            counted = count
            # Sizes without times are assumed to be cheap, so that a step measures them. A larger
            # size is assumed to take no longer than the nearest known one.
            seconds = self.drafted.expect(num_sequences + count, origin=(num_sequences, plain_s))
            assert seconds is not None
            rate = expected / (max(seconds, plain_s) + turn_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _plain(self, runs_ahead: bool) -> StepTimes:
        return self.ahead if runs_ahead else self.alone


def _counts(most: int) -> list[int]:
    """Return the counts to compare: all small ones, then about four per octave."""
    counts = [count for count in range(1, most) if count <= 8]
    count = 10
    while count < most:
        counts.append(count)
        count += max(2, count // 4)
    return [*counts, most]
