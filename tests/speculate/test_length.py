"""How many drafts: the best of what has been measured, and none where they do not pay."""

import random

import pytest

from forge_jax.speculate.length import (
    FIRST_RETRY,
    HIGHEST,
    Acceptance,
    Experience,
    LengthPolicy,
    StepTimes,
)


def policy(ahead_s=lambda n: 1.0, waited_s=lambda n: 1.0, sizes=range(1, 257)) -> LengthPolicy:
    made = LengthPolicy()
    for size in sizes:
        made.ahead.record(size, ahead_s(size))
        made.waited.record(size, waited_s(size))
    return made


def best(num_sequences, gains, ahead_s, waited_s):
    """By trying every count."""
    rates = [num_sequences / ahead_s(num_sequences) * 1.02]
    for count in range(1, len(gains) + 1):
        rates.append((num_sequences + sum(gains[:count])) / waited_s(num_sequences + count))
    return max(range(len(rates)), key=rates.__getitem__), rates


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_or_nearly(seed):
    rng = random.Random(seed)
    base, slope, wait = rng.uniform(0.5, 2), rng.choice((0.0, 0.01, 0.1)), rng.uniform(0, 0.5)
    num_sequences = rng.choice((1, 4, 16))
    gains = sorted((rng.random() for _ in range(7 * num_sequences)), reverse=True)

    def ahead_s(n):
        return base + slope * n

    def waited_s(n):
        return ahead_s(n) + wait

    chosen = policy(ahead_s, waited_s).choose(num_sequences, gains)
    wanted, rates = best(num_sequences, gains, ahead_s, waited_s)
    assert rates[chosen] > 0.95 * rates[wanted]


def test_a_step_whose_cost_is_its_tokens_takes_no_drafts():
    assert policy(lambda n: float(n), lambda n: float(n)).choose(4, [0.9] * 8) == 0


def test_nothing_is_drafted_before_a_step_has_been_timed():
    assert LengthPolicy().choose(1, [1.0] * 7) == 0


def test_what_has_never_been_timed_is_tried_and_what_was_too_slow_is_doubted_later():
    made = LengthPolicy()
    made.ahead.record(1, 1.0)
    assert made.choose(1, [0.5]) == 1
    made.waited.record(2, 5.0)
    chosen = [made.choose(1, [0.5]) for _ in range(2 * FIRST_RETRY)]
    assert sum(chosen) > 0 and sum(chosen[: FIRST_RETRY - 1]) == 0
    # And each time it is refused, it takes longer.
    again = next(i for i, count in enumerate(chosen) if count)
    made.waited.record(2, 5.0)
    later = [made.choose(1, [0.5]) for _ in range(FIRST_RETRY)]
    assert again <= FIRST_RETRY and sum(later) == 0


def test_times_are_shared_by_sizes_that_are_near_and_lie_between_those_that_are_not():
    times = StepTimes()
    assert times.expect(3) is None
    times.record(8, 1.0)
    assert times.expect(1) == times.expect(100) == 1.0
    times.record(100, 3.0)
    assert times.expect(103) == 3.0
    assert 1.0 < times.expect(30) < times.expect(60) < 3.0
    for _ in range(200):
        times.record(8, 2.0)
    assert times.expect(8) == pytest.approx(2.0, rel=0.01)
    times.record(8, 1e6)  # the machine slept
    assert times.expect(8) < 3.0


def test_a_time_is_a_median_so_that_slow_first_steps_are_forgotten():
    times = StepTimes()
    for seconds in (9.0, 5.0, 1.0, 1.0, 1.0, 1.0):
        times.record(8, seconds)
    assert times.expect(8) == 1.0
    for _ in range(StepTimes.LATEST):
        times.record(8, 2.0)
    assert times.expect(8) == 2.0


def test_confidence_means_what_experience_says():
    acceptance, rng, other = Acceptance(), random.Random(0), Experience()
    for _ in range(3000):
        confidence = rng.choice((0.2, 0.9))
        right = rng.random() < {0.2: 0.6, 0.9: 0.3}[confidence]
        acceptance.learn((confidence,), int(right), Experience())
    (low,), (high,) = acceptance.reach((0.2,), other), acceptance.reach((0.9,), other)
    assert low == pytest.approx(0.6, abs=0.08) and high == pytest.approx(0.3, abs=0.08)


def test_a_request_whose_drafts_are_wrong_is_drafted_for_less_and_given_another_chance():
    acceptance, bad, good = Acceptance(), Experience(), Experience()
    for _ in range(20):
        acceptance.learn((0.7, 0.7, 0.7), 0, bad)
        acceptance.learn((0.7, 0.7, 0.7), 3, good)
    (first, second), (better, _) = (acceptance.reach((0.7, 0.7), e) for e in (bad, good))
    assert second < first < 0.5 * better and better <= HIGHEST
    for _ in range(300):
        bad.fade()
    assert acceptance.reach((0.7,), bad)[0] > 0.8 * acceptance.reach((0.7,), Experience())[0]


def test_only_what_was_seen_counts():
    """Tokens behind the first wrong one were never put to the test."""
    one, several = Acceptance(), Acceptance()
    experience = Experience()
    one.learn((0.5,), 0, experience)
    several.learn((0.5, 0.5, 0.5), 0, Experience())
    assert one == several and experience.expected == 0.5625
