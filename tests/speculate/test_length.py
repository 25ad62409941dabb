"""The number of drafts: the best by measurements, and none if they do not pay."""

import itertools
import random

import numpy as np
import pytest

from forge_jax.speculate.draft_length import (
    ASSUMED_SLOWDOWN,
    CONTROL,
    CONTROL_AFTER,
    FEW,
    FIRST_RETRY,
    HIGHEST,
    TRIAL,
    Acceptance,
    Experience,
    LengthPolicy,
    StepTimes,
)


def policy(ahead_s=lambda n: 1.0, waited_s=lambda n: 1.0, sizes=range(1, 257)) -> LengthPolicy:
    made = LengthPolicy()
    for size in sizes:
        for _ in range(CONTROL):
            made.ahead.record(size, ahead_s(size))
        made.drafted.record(size, waited_s(size))
    for _ in range(TRIAL):
        made.tried(1)
    return made


def best(num_sequences, gains, ahead_s, waited_s):
    rates = [num_sequences / ahead_s(num_sequences) * 1.02]
    for count in range(1, len(gains) + 1):
        rates.append((num_sequences + sum(gains[:count])) / waited_s(num_sequences + count))
    return max(range(len(rates)), key=rates.__getitem__), rates


@pytest.mark.parametrize("seed", range(20))
def test_chosen_draft_count_is_near_optimal(seed):
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


def test_step_whose_cost_is_its_tokens_takes_no_drafts():
    assert policy(lambda n: float(n), lambda n: float(n)).choose(4, [0.9] * 8) == 0


def test_drafting_waits_for_a_timed_step():
    assert LengthPolicy().choose(1, [1.0] * 7) == 0


def timed(seconds: float = 1.0) -> LengthPolicy:
    made = LengthPolicy()
    for _ in range(CONTROL):
        made.ahead.record(1, seconds)
    return made


def steps(made: LengthPolicy, count: int, seconds) -> list[int]:
    """Return each step's draft count; a step with drafts takes `seconds`, one without takes 1 s."""
    taken = []
    for _ in range(count):
        made.step(bool(taken and taken[-1]))
        chosen = made.choose(1, [0.5])
        assert made.choose(1, [0.5]) == chosen  # choosing has no side effect
        taken.append(chosen)
        if chosen:
            made.tried(1)
            made.drafted.record(1 + chosen, seconds)
        else:
            made.ahead.record(1, 1.0)
    return taken


def test_unprofitable_drafts_are_retried_ever_less_often():
    made = timed()
    taken = steps(made, 8 * FIRST_RETRY, seconds=1.6)
    begun = [i for i in range(len(taken)) if taken[i] and not (i and taken[i - 1])]
    assert all(taken[i : i + TRIAL + 1] == [1] * TRIAL + [0] for i in begun)
    pauses = [later - earlier - TRIAL for earlier, later in itertools.pairwise(begun)]
    # Before each trial, steps without drafts are timed again.
    assert begun[1] == FIRST_RETRY - 1 + CONTROL
    wanted = [FIRST_RETRY - TRIAL, 2 * FIRST_RETRY - TRIAL, 4 * FIRST_RETRY - TRIAL]
    assert pauses == pytest.approx(wanted, abs=CONTROL)


def test_trial_resets_unfavorable_times():
    made = timed()
    assert sum(steps(made, FIRST_RETRY - 1, seconds=5.0)) == FEW  # they were far too slow
    taken = steps(made, 4 * FIRST_RETRY, seconds=1.1)
    assert taken[-4 * CONTROL_AFTER :].count(0) <= 5 * CONTROL


def test_steps_without_drafts_are_retimed_for_a_few_steps():
    made = timed(3.0)  # everything was slow at the beginning
    taken = steps(made, CONTROL_AFTER + CONTROL + TRIAL + 200, seconds=1.8)
    assert taken[:CONTROL_AFTER] == [1] * CONTROL_AFTER
    assert taken[CONTROL_AFTER:] == [0] * (CONTROL + TRIAL + 200)


def cpu_step_s(num_tokens: int) -> float:
    """Return the time on two cores with a model of 1.1 billion parameters: free up to 8 tokens."""
    known = {1: 43, 8: 43, 16: 63, 32: 90, 64: 150, 128: 260}
    return float(np.interp(num_tokens, [*known], [*known.values()])) / 1e3


def test_many_sequences_verify_few_drafts_if_tokens_are_costly():
    """All drafts of 16 sequences would cost more than they gain; one or two each pay."""
    drafting_s = 0.014
    num_sequences, gains = 16, sorted([0.8**k for k in range(1, 8)] * 16, reverse=True)

    def rate(count):
        step_s = cpu_step_s(num_sequences + count) + drafting_s
        return (num_sequences + sum(gains[:count])) / step_s

    plain_rate = num_sequences / cpu_step_s(num_sequences)
    assert rate(len(gains)) < plain_rate
    made = LengthPolicy()
    for _ in range(CONTROL):
        made.ahead.record(num_sequences, cpu_step_s(num_sequences))
    largest = num_sequences
    rates = []
    for _ in range(2 * TRIAL):
        made.step(True)
        count = made.choose(num_sequences, gains)
        made.tried(num_sequences)
        assert num_sequences + count <= 2 * largest
        largest = max(largest, num_sequences + count)
        made.drafted.record(num_sequences + count, cpu_step_s(num_sequences + count) + drafting_s)
        rates.append(rate(count) / plain_rate)
    best_rate = max(rate(count) for count in range(1, len(gains) + 1)) / plain_rate
    assert min(rates[TRIAL:]) > 0.97 * best_rate > 1.1
    assert sum(rates) / len(rates) > 1.0  # earlier trials did not cost more than they gained


def test_first_step_after_a_run_of_drafts_is_charged():
    """It is dispatched with nothing in flight, so its tokens come late."""
    gains, kept = (
        [0.7, 0.7],
        [0.1, 0.7],
    )  # gains of drafts that need a synchronous step, and of those that do not
    for rows, wanted in ((1, 0), (20, 2)):
        made = policy(lambda n: 1.0, lambda n: 1.8)
        for _ in range(CONTROL):
            made.alone.record(1, 2.0)
        for step in range(30 * (rows + 1)):
            made.step(bool(step % (rows + 1)))
        assert made.choose(1, gains) == 2  # nothing is in flight, so the cost is paid anyway
        assert made.choose(1, gains, in_flight=True) == wanted
        assert made.choose(1, kept) == 0


def test_synchronous_steps_are_compared_with_synchronous_ones():
    made = policy(lambda n: 1.0, lambda n: 1.5)
    assert made.choose(1, [0.4]) == 0
    assert made.choose(1, [0.4], runs_ahead=False) == 0 and not made.knows(1, runs_ahead=False)
    for _ in range(CONTROL):
        made.alone.record(1, 1.3)
    assert made.knows(1, runs_ahead=False)
    assert made.choose(1, [0.4], runs_ahead=False) == 1
    for _ in range(CONTROL_AFTER):
        made.tried(1, runs_ahead=False)
    assert made.knows(1) and not made.knows(1, runs_ahead=False)


def test_trial_needs_drafts_that_may_pay():
    made = timed()
    assert made.choose(1, [ASSUMED_SLOWDOWN - 1]) == 0
    assert made.choose(1, [ASSUMED_SLOWDOWN - 1 + 0.05]) == 1


def test_times_are_shared_by_near_sizes_and_interpolated_otherwise():
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


def test_confidence_is_calibrated_by_acceptance():
    acceptance, rng, other = Acceptance(), random.Random(0), Experience()
    for _ in range(3000):
        confidence = rng.choice((0.2, 0.9))
        right = rng.random() < {0.2: 0.6, 0.9: 0.3}[confidence]
        acceptance.learn((confidence,), int(right), Experience())
    (low,), (high,) = acceptance.reach((0.2,), other), acceptance.reach((0.9,), other)
    assert low == pytest.approx(0.6, abs=0.08) and high == pytest.approx(0.3, abs=0.08)


def test_request_with_wrong_drafts_gets_fewer_and_another_chance():
    acceptance, bad, good = Acceptance(), Experience(), Experience()
    for _ in range(20):
        acceptance.learn((0.7, 0.7, 0.7), 0, bad)
        acceptance.learn((0.7, 0.7, 0.7), 3, good)
    (first, second), (better, _) = (acceptance.reach((0.7, 0.7), e) for e in (bad, good))
    assert second < first < 0.5 * better and better <= HIGHEST
    for _ in range(300):
        bad.fade()
    assert acceptance.reach((0.7,), bad)[0] > 0.8 * acceptance.reach((0.7,), Experience())[0]


def test_only_verified_drafts_update_the_acceptance_rate():
    """Tokens after the first wrong one were never verified."""
    one, several = Acceptance(), Acceptance()
    experience = Experience()
    one.learn((0.5,), 0, experience)
    several.learn((0.5, 0.5, 0.5), 0, Experience())
    assert one == several and experience.expected == 0.5625
