"""Failed steps: nothing is lost, and the request that causes them is isolated."""

import asyncio
import gc
import random
from typing import Any

import jax
import pytest

from forge_jax import LLM, SamplingParams
from forge_jax.config import EngineConfig
from forge_jax.engine.core import EngineCore
from forge_jax.engine.fake import assemble_fake
from forge_jax.engine.fault_isolation import MAX_FAILURES
from forge_jax.engine.thread import Engine
from forge_jax.errors import EngineError, StepError
from forge_jax.schedule.request import Request, Sequence
from forge_jax.testing import FailingDevice, core_of

Outcome = dict[tuple[str, int], tuple[tuple[int, ...], str, tuple, tuple, str | None]]


def fake_parts(**options):
    config = EngineConfig.from_options(**{"max_num_seqs": 8, "num_blocks": 24, **options})
    return assemble_fake(config, step_time_s=0.0, max_model_len=160, check=True)


def requests(count: int, seed: int = 0) -> list[Request]:
    """Return requests named after the seed and their index, such as "0-3"."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        stem = [7] * 40 if rng.random() < 0.5 else []
        made.append(
            Request(
                request_id=f"{seed}-{i}",
                prompt_token_ids=stem + [rng.randrange(200) for _ in range(rng.randint(1, 60))],
                params=SamplingParams(
                    n=rng.choice((1, 1, 1, 3)),
                    max_tokens=rng.randint(1, 50),
                    temperature=rng.choice((0.0, 1.0)),
                    ignore_eos=True,
                    logprobs=rng.choice((None, 1)),
                    prompt_logprobs=rng.choice((None, None, 0)),
                    stop=rng.choice(((), ("garden",))),
                ),
                seed=rng.getrandbits(64),
            )
        )
    return made


def serve(core: EngineCore, arriving: list[Request], *, at_once: int = 12) -> Outcome:
    """Return each sample's outcome; requests arrive while fewer than `at_once` are left."""
    found: dict[tuple[str, int], list] = {}
    waiting = list(reversed(arriving))
    while waiting or core.has_work:
        while waiting and len(core.scheduler.request_ids()) < at_once:
            core.add(waiting.pop())
        for request_id, deltas in core.tick().items():
            for delta in deltas:
                entry = found.setdefault((request_id, delta.index), [(), "", (), (), None])
                assert entry[4] is None, "news after the end"
                entry[0] += delta.token_ids
                entry[1] += delta.text
                entry[2] += delta.logprobs or ()
                entry[3] += delta.prompt_logprobs or ()
                entry[4] = delta.finish_reason
                if delta.finish_reason == "error":
                    assert isinstance(delta.error, StepError)
    assert core.scheduler.pool.num_used == 0
    return {key: tuple(entry) for key, entry in found.items()}  # type: ignore[misc]


def failing(parts, fails) -> tuple[EngineCore, FailingDevice]:
    device = FailingDevice(parts.core.device, fails)
    parts.core.device = device
    parts.core.unrecoverable = (AssertionError,)
    return parts.core, device


@pytest.mark.parametrize("one_step_ahead", [True, False])
@pytest.mark.quick_cases(1)
def test_failing_steps_do_not_change_outputs(one_step_ahead):
    rng = random.Random(1)
    core, device = failing(
        fake_parts(one_step_ahead=one_step_ahead), lambda plan, where: rng.random() < 0.005
    )
    found, expected, rounds = {}, {}, 0
    while core.num_steps < 5_000:
        batch = requests(60, seed=rounds)
        found = serve(core, batch)
        expected = serve(fake_parts().core, batch)
        assert found == expected
        rounds += 1
    assert device.num_failures == core.num_recoveries > 30
    assert core.scheduler.num_preemptions > 20


@pytest.mark.parametrize("first_step_raises", [False, True])
def test_idle_core_keeps_no_sequence(first_step_raises):
    core, device = failing(
        fake_parts(), lambda plan, where: first_step_raises and not device.num_failures
    )
    before = _num_sequences()
    serve(core, requests(40), at_once=40)
    core.tick()
    assert device.num_failures == first_step_raises and _num_sequences() == before


def _num_sequences() -> int:
    gc.collect()
    return sum(isinstance(each, Sequence) for each in gc.get_objects())


def poisoned(*request_ids: str, output: int = 0):
    """Make every step raise that computes one of these requests from this many output tokens on."""

    def fails(plan, where: str) -> bool:
        return where == "read" and any(
            row.seq_key[0] in request_ids and row.num_output >= output for row in plan.sequences
        )

    return fails


@pytest.mark.parametrize("output", [0, 1, 9])
@pytest.mark.parametrize("poison", [("r3",), ("r0",), ("r2", "r9"), ("r4", "r5", "r6")])
def test_request_that_fails_every_step_is_isolated(poison, output):
    batch = [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=[i] * (1 + 5 * i),
            params=SamplingParams(max_tokens=10 + i, ignore_eos=True),
            seed=i,
        )
        for i in range(12)
    ]
    core, device = failing(fake_parts(), poisoned(*poison, output=output))
    found = serve(core, batch)
    expected = serve(fake_parts().core, batch)
    for (request_id, index), outcome in found.items():
        if request_id in poison:
            right = expected[request_id, index]
            assert outcome[4] == "error" and outcome[0] == right[0][: len(outcome[0])]
            assert len(outcome[0]) == output
        else:
            assert outcome == expected[request_id, index]
    # Per culprit: three failures, two for each halving of eight slots, and the last alone.
    assert device.num_failures <= len(poison) * (MAX_FAILURES + 2 * 3 + 2)
    assert not core._bisection._failures and core._bisection.only is None


def test_all_samples_of_a_poisoned_request_end():
    batch = requests(6, seed=3)
    params = SamplingParams(n=3, max_tokens=8, ignore_eos=True)
    batch[2] = Request(request_id="bad", prompt_token_ids=[1] * 33, params=params, seed=5)
    core, _ = failing(fake_parts(), poisoned("bad"))
    found = serve(core, batch)
    expected = serve(fake_parts().core, batch)
    for key, outcome in found.items():
        assert outcome[4] == "error" if key[0] == "bad" else outcome == expected[key]


def test_aborting_a_suspect_unblocks_the_others():
    batch = [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=[i] * 9,
            params=SamplingParams(max_tokens=20, ignore_eos=True),
            seed=i,
        )
        for i in range(8)
    ]
    core, _ = failing(fake_parts(), poisoned("r5"))
    for request in batch:
        core.add(request)
    outputs: dict[str, list] = {}
    aborted = False
    while core.has_work:
        if core._bisection.active and not aborted:
            aborted = True
            suspects = {seq.request_id for seq in core._bisection.only or ()}
            for request_id in suspects | {"r5"}:
                core.abort(request_id)
            core.add(
                Request(
                    request_id="late",
                    prompt_token_ids=[3],
                    params=SamplingParams(max_tokens=2, ignore_eos=True),
                    seed=1,
                )
            )
        for request_id, deltas in core.tick().items():
            outputs.setdefault(request_id, []).extend(deltas)
    assert aborted
    ends = {request_id: deltas[-1].finish_reason for request_id, deltas in outputs.items()}
    assert ends["r5"] == "abort" and ends["late"] == "length"
    assert set(ends.values()) == {"abort", "length"}


def test_device_that_cannot_be_reset_ends_the_engine(monkeypatch):
    parts = fake_parts()
    _, device = failing(parts, lambda plan, where: plan.step == 3)

    def reset():
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(device, "reset", reset)

    async def run():
        engine = Engine(parts)
        engine.start()
        stream = engine.submit([1, 2], SamplingParams(max_tokens=20), request_id="a")
        last = [delta async for deltas in stream for delta in deltas][-1]
        assert last.finish_reason == "error" and isinstance(last.error, EngineError)
        assert not engine.stats().healthy and engine.stats().state == "failed"
        await engine.stop()

    asyncio.run(run())


def test_stall_time_counts_only_pending_work_without_a_step():
    now_s = 0.0
    parts = fake_parts()
    parts.core._clock = lambda: now_s
    core = parts.core
    now_s = 100.0
    assert core.stalled_s == 0.0  # there is no work
    core.add(requests(1)[0])
    assert core.stalled_s == 0.0
    now_s = 130.0
    assert core.stalled_s == 30.0
    core.tick()  # dispatches, reads nothing
    assert core.stalled_s == 30.0
    core.tick()
    assert core.stalled_s == 0.0


def answers(llm: LLM) -> list:
    prompts = [f"Once upon a time there was a {animal}" for animal in ("dog", "cat", "bird")]
    params = [
        SamplingParams(max_tokens=24, temperature=t, seed=i, logprobs=2, ignore_eos=True)
        for i, t in enumerate((0.0, 0.8, 1.0))
    ]
    outputs = llm.generate(prompts, params, progress=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.text) for o in outputs]


@pytest.fixture(scope="module")
def bundled() -> LLM:
    return LLM("forge-tiny", deterministic=True, max_num_seqs=4, max_model_len=256, num_blocks=64)


def test_lost_device_array_is_recreated(bundled):
    """Covers a step that fails after it consumed its buffers, and one that runs out of memory."""
    expected = answers(bundled)
    core = core_of(bundled)
    runner: Any = core.device
    recovered = core.num_recoveries
    dispatch = runner.dispatch
    for lose in ("_kv", "_slots"):
        losses = [5, 17]

        def dispatch_and_lose(plan, lose=lose, losses=losses, first=core.num_steps):
            if losses and core.num_steps - first >= losses[0]:
                losses.pop(0)
                for array in jax.tree.leaves(getattr(runner, lose)):
                    array.delete()
            return dispatch(plan)

        runner.dispatch = dispatch_and_lose
        assert answers(bundled) == expected
        assert not losses
    del runner.dispatch
    assert core.num_recoveries == recovered + 4
    assert answers(bundled) == expected


def test_bundled_model_gives_the_same_bits_after_failures(bundled):
    expected = answers(bundled)
    rng = random.Random(4)
    core = core_of(bundled)
    recovered, device = core.num_recoveries, core.device
    core, failing_device = failing(bundled._parts, lambda plan, where: rng.random() < 0.1)
    try:
        for _ in range(3):
            assert answers(bundled) == expected
    finally:
        core.device = device
    assert core.num_recoveries - recovered == failing_device.num_failures > 5
    assert core.scheduler.pool.num_used == 0


@pytest.mark.full_compile
@pytest.mark.slow
def test_five_thousand_real_steps_survive_failures(bundled):
    rng = random.Random(5)
    expected = answers(bundled)
    core = core_of(bundled)
    begun, device = core.num_steps, core.device
    core, failing_device = failing(bundled._parts, lambda plan, where: rng.random() < 0.005)
    try:
        while core.num_steps - begun < 5_000:
            assert answers(bundled) == expected
    finally:
        core.device = device
    assert failing_device.num_failures > 30
