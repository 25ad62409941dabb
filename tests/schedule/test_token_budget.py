"""Steps that meet an inter-token latency target, on a device with virtual time."""

import random
from itertools import pairwise

import pytest
from loop import Loop, output

from forge_jax.schedule.plan import StepPlan
from forge_jax.schedule.token_budget import SHARE, TokenBudget

MOST = 512
PROMPT = 2000


def slow_device(base_s=0.02, token_s=0.002, *, noise=0.0, seed=0, sizes=()):
    """Return a step's seconds as a function: a constant, plus its tokens rounded up to `sizes`."""
    rng = random.Random(seed)

    def step_s(plan: StepPlan) -> float:
        tokens = plan.num_tokens
        if plan.chunks:
            tokens = next((size for size in sizes if size >= tokens), tokens)
        return (base_s + token_s * tokens) * (1 + rng.uniform(-noise, noise))

    return step_s


def loop_of(target_s, step_s, *, sizes=None, **options) -> Loop:
    budget = None if target_s is None else TokenBudget(target_s, sizes)
    options = {"max_num_batched_tokens": MOST, "max_num_seqs": 16, **options}
    return Loop(budget=budget, step_s=step_s, num_blocks=4000, max_model_len=6000, **options)


def with_streams(loop: Loop, count=4, max_tokens=3000):
    """Add decoding sequences, of which one token each was read."""
    seqs = [loop.add_one([i + 1] * 8, max_tokens=max_tokens) for i in range(count)]
    while not all(output(seq) for seq in seqs):
        loop.step()
    for _ in range(4):
        loop.step()
    return seqs


def serve(loop: Loop, prompt_len=PROMPT, start=0):
    """Serve one more prompt; return TTFT in s, all step times, and its steps' token counts."""
    prompt = loop.add_one([start + i % 700 for i in range(prompt_len)], max_tokens=1)
    arrived_s = loop.now_s
    times, sizes = [loop.now_s], []
    while not prompt.finished:
        plan = loop.step()
        times.append(loop.now_s)
        if plan is not None and plan.chunks:
            sizes.append(plan.num_tokens)
    return loop.now_s - arrived_s, [after - before for before, after in pairwise(times)], sizes


# ---- in virtual time ----------------------------------------------------------------------------


def test_streams_meet_the_target_during_a_long_prompt():
    loop = loop_of(0.2, slow_device())
    with_streams(loop)
    ttft_s, itls_s, _ = serve(loop)
    assert max(itls_s) <= 0.2
    without = loop_of(None, slow_device())
    with_streams(without)
    full_ttft_s, full_itls_s, _ = serve(without)
    assert max(full_itls_s) > 1.0, "without a target a stream waits for a whole step"
    assert ttft_s < 1.3 * full_ttft_s


def test_prompts_get_half_the_time_if_decodes_alone_exceed_the_target():
    step_s = slow_device(base_s=0.3, token_s=0.01)
    loop, without = loop_of(0.2, step_s), loop_of(None, step_s)
    with_streams(loop)
    with_streams(without)
    ttft_s, itls_s, _ = serve(loop)
    full_ttft_s, full_itls_s, _ = serve(without)
    decode_s = 0.3 + 0.01 * 4
    assert max(itls_s) <= decode_s / (1 - SHARE) + 1e-9 < max(full_itls_s) / 5
    assert ttft_s < 2.2 * full_ttft_s


def test_prompt_gets_full_steps_if_no_sequence_decodes():
    loop = loop_of(0.01, slow_device())
    _, _, sizes = serve(loop)
    assert sizes == [512, 512, 512, 464]


def test_budget_grows_again_when_decodes_end():
    loop = loop_of(0.2, slow_device())
    streams = with_streams(loop)
    loop.add_one([7] * 5000, max_tokens=1)
    for _ in range(4):
        plan = loop.step()
        assert plan is not None and plan.num_tokens < 128
    assert loop.scheduler.token_budget < 128
    for seq in streams:
        loop.scheduler.abort(seq.request_id)
    plan = loop.step()
    assert plan is not None and plan.num_tokens == loop.scheduler.token_budget == MOST


def test_no_prompt_starves_however_small_the_target():
    loop = loop_of(1e-6, slow_device())
    with_streams(loop)
    prompts = [loop.add_one([10 + i] * 300, max_tokens=1) for i in range(6)]
    plans = []
    while not all(prompt.finished for prompt in prompts):
        plans.append(loop.step())
        assert loop.now_s < 100
    assert all(plan.num_tokens - len(plan.decodes) >= 8 for plan in plans[:-8])


@pytest.mark.parametrize("seed", range(5))
def test_noise_stalls_neither_streams_nor_prompts(seed):
    loop = loop_of(0.2, slow_device(noise=0.2, seed=seed))
    with_streams(loop)
    ttft_s, itls_s, sizes = serve(loop)
    assert max(itls_s) <= 1.25 * 0.2
    assert ttft_s < 1.6 * PROMPT * 0.002
    steady = sizes[4:-1]
    assert max(steady) <= 2 * min(steady), "the size of a step jumps"


def test_one_slow_step_does_not_change_the_budget():
    slow = slow_device()
    hiccups: list[float] = []
    loop = loop_of(0.2, lambda plan: hiccups.pop() if hiccups else slow(plan))
    with_streams(loop)
    serve(loop)
    loop.add_one([5] * 2000, max_tokens=1)
    sizes = []
    for index in range(16):
        if index == 8:
            hiccups.append(5.0)
        plan = loop.step()
        assert plan is not None
        sizes.append(plan.num_tokens)
    assert loop.now_s > 5.0 and not hiccups
    assert len(set(sizes[3:])) == 1, sizes


def test_budget_follows_changes_of_machine_speed():
    slow, factors = slow_device(), [1.0]
    loop = loop_of(0.2, lambda plan: factors[-1] * slow(plan))
    with_streams(loop)
    medians = []
    for index, factor in enumerate((1.0, 2.5, 1.0)):
        factors.append(factor)
        _, _, sizes = serve(loop, start=100 * index)
        medians.append(sorted(sizes)[len(sizes) // 2])
    assert medians[1] < 0.5 * medians[0]
    assert medians[2] > 0.9 * medians[0]


def test_executables_that_compute_unused_rows_are_filled():
    sizes = (64, 256, 512)
    loop = loop_of(0.2, slow_device(token_s=0.0005, sizes=sizes), sizes=sizes)
    with_streams(loop)
    _, itls_s, used = serve(loop)
    assert set(used[2:-1]) == {256}
    assert max(itls_s) <= 0.2
    small = loop_of(0.05, slow_device(token_s=0.0005, sizes=sizes), sizes=sizes)
    with_streams(small)
    assert set(serve(small)[2][2:-1]) == {64}


def test_latency_target_does_not_change_the_output():
    outputs = []
    for target_s in (None, 0.05, 0.2):
        loop = loop_of(target_s, slow_device(noise=0.1), next_token=None)
        seqs = [
            loop.add_one(
                [i, *range(40 * i)], max_tokens=30, temperature=1.0, request_seed=i, ignore_eos=True
            )
            for i in range(1, 9)
        ]
        loop.run()
        outputs.append([output(seq) for seq in seqs])
    assert outputs[0] == outputs[1] == outputs[2]


def test_sequence_waiting_for_its_mask_keeps_the_target():
    """No step that is scheduled before its last token was read contains it."""
    loop = loop_of(0.1, slow_device())
    (stream,) = with_streams(loop, count=1)
    stream.needs_host_token = True
    loop.add_one([9] * PROMPT, max_tokens=1)
    plans = [loop.step() for _ in range(8)]
    chunks = [plan.num_tokens for plan in plans if plan is not None and plan.chunks]
    assert any(plan is not None and not len(plan.decodes) for plan in plans)
    assert max(chunks[1:]) < 64


def test_drafts_count_as_decodes():
    budget = measured((4, 0.03), (64, 0.15), (256, 0.53))
    loop = Loop(budget=budget, max_num_batched_tokens=MOST, max_model_len=6000, num_blocks=4000)

    def step(drafts=None) -> StepPlan:
        plan = loop.scheduler.schedule(drafts)
        assert plan is not None
        loop.scheduler.commit(plan, loop.device.read(loop.device.dispatch(plan)))
        return plan

    streams = [loop.add_one([i + 1] * 8, max_tokens=3000) for i in range(4)]
    step()
    loop.add_one([5] * 2000, max_tokens=1)
    plain = step()
    drafted = step({seq: [1] * 7 for seq in streams})
    assert (plain.num_drafts, drafted.num_drafts) == (0, 28)
    chunks = [plan.chunks[-1].num_tokens for plan in (plain, drafted)]
    assert chunks[0] >= chunks[1] + 16
    assert abs(plain.num_tokens - drafted.num_tokens) <= 0.2 * plain.num_tokens


# ---- the estimate -------------------------------------------------------------------------------


def plan_of(num_tokens: int) -> StepPlan:
    loop = Loop(max_num_batched_tokens=num_tokens, max_model_len=6000, num_blocks=4000)
    loop.add_one([1] * (num_tokens + 1), max_tokens=1)
    plan = loop.step()
    assert plan is not None and plan.num_tokens == num_tokens
    return plan


def measured(*times: tuple[int, float]) -> TokenBudget:
    """Return a budget that has recorded steps of (tokens, seconds), oldest first."""
    budget = TokenBudget(0.2)
    now_s = 0.0
    for tokens, seconds in times:
        budget.record(plan_of(tokens), now_s, now_s + seconds)
        now_s += seconds
    return budget


def test_queued_step_is_timed_from_the_end_of_the_one_before():
    budget = TokenBudget(0.2)
    budget.record(plan_of(8), 0.0, 0.1)
    budget.record(plan_of(64), 0.01, 0.6)  # dispatched while the first one ran
    assert budget.seconds(64) == pytest.approx(0.5)
    budget.record(plan_of(256), 5.0, 6.5)  # after a pause
    assert budget.seconds(256) == pytest.approx(1.5)


def test_times_are_interpolated_and_extrapolated_linearly():
    budget = measured((16, 0.1), (64, 0.2))
    assert budget.seconds(40) == pytest.approx(0.15)
    assert budget.seconds(112) == pytest.approx(0.3)
    assert budget.seconds(8) == pytest.approx(0.05)
    assert measured((16, 0.1)).seconds(32) == pytest.approx(0.2)
    assert TokenBudget(0.2).seconds(16) is None


def test_one_outlier_among_three_times_does_not_count():
    assert measured((64, 0.1), (64, 9.0), (64, 0.1)).seconds(64) == pytest.approx(0.1)


def test_newer_time_corrects_contradicting_older_ones():
    slower = measured((16, 0.1), (256, 0.2), (64, 0.5))
    assert slower.seconds(256) == pytest.approx(0.5)
    assert slower.seconds(16) == pytest.approx(0.125)
    faster = measured((16, 0.1), (256, 5.0), (64, 0.1))
    assert faster.seconds(256) == pytest.approx(0.4)


def test_first_step_with_prompts_is_the_smallest():
    assert TokenBudget(0.2).choose(4, MOST) == 12
    assert TokenBudget(0.2, (64, 256, 512)).choose(4, MOST) == 64


def test_steps_at_most_double_beyond_measured_sizes():
    budget = measured((8, 0.010), (16, 0.011))
    assert 16 < budget.choose(4, MOST) <= 32


def test_full_batch_of_decodes_leaves_the_remaining_room():
    assert measured((500, 0.1)).choose(508, MOST) == MOST
    loop = loop_of(0.01, slow_device(), max_num_batched_tokens=5)
    with_streams(loop)
    assert set(serve(loop, prompt_len=20)[2]) == {5}
