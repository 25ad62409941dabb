"""`EngineCore`, tick by tick, on the fake device: its switches and phase times."""

from itertools import pairwise

import pytest

from forge_jax.config import EngineConfig
from forge_jax.engine.fake import assemble_fake
from forge_jax.errors import ConfigError, EngineError
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.request import Request
from forge_jax.telemetry.phases import BOUNDS_S, PHASES, PhaseTimes


def core(**options):
    config = EngineConfig.from_options(**options)
    return assemble_fake(config, step_time_s=0.0, max_model_len=256, check=True).core


def serve(core, num_requests=20) -> tuple[dict[str, list[int]], set[int]]:
    """Return (tokens by request, the numbers of steps in flight after a tick)."""
    for i in range(num_requests):
        params = SamplingParams(max_tokens=5 + i, ignore_eos=True)
        core.add(
            Request(request_id=f"r{i}", prompt_token_ids=[i] * (1 + 3 * i), params=params, seed=i)
        )
    tokens: dict[str, list[int]] = {}
    in_flight = set()
    while core.has_work:
        for request_id, deltas in core.tick().items():
            for delta in deltas:
                tokens.setdefault(request_id, []).extend(delta.token_ids)
        in_flight.add(core.scheduler.num_in_flight)
    return tokens, in_flight


def test_one_step_is_in_flight_after_a_tick():
    _, in_flight = serve(core())
    assert in_flight == {0, 1}  # 0 when all is done


@pytest.mark.parametrize("one_step_ahead", [True, False])
def test_tick_raises_unrecoverable_device_errors(one_step_ahead):
    def fail(plan):
        raise AssertionError("a check of the device")

    checked = core(one_step_ahead=one_step_ahead)
    checked.device.dispatch = fail
    checked.add(Request(request_id="r", prompt_token_ids=[1], params=SamplingParams()))
    with pytest.raises(AssertionError, match="a check of the device"):
        checked.tick()
    with pytest.raises(EngineError, match="an earlier step failed"):
        checked.tick()


def test_no_step_stays_in_flight_without_one_step_ahead():
    tokens, in_flight = serve(core(one_step_ahead=False))
    assert in_flight == {0}
    assert tokens == serve(core())[0]


@pytest.mark.parametrize(
    "switches",
    [
        {"batching": "static"},
        {"chunked_prefill": False},
        {"batching": "static", "chunked_prefill": False, "one_step_ahead": False},
    ],
)
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 4}])
def test_scheduling_switches_do_not_change_tokens(switches, limits):
    assert serve(core(**switches, **limits))[0] == serve(core())[0]


def test_chunk_size_without_chunked_prefill_is_rejected():
    with pytest.raises(ConfigError, match=r"prefill_chunk_size.*chunked_prefill=False"):
        EngineConfig.from_options(prefill_chunk_size=8, chunked_prefill=False)


def test_phases_of_every_step_are_timed():
    engine = core()
    serve(engine)
    totals = engine.phases.totals()
    for phase in ("dispatch", "read", "commit", "text"):
        assert totals[phase].count == engine.num_steps
    assert totals["schedule"].count > engine.num_steps  # the last one had nothing to schedule
    assert totals["deliver"].count == 0  # measured by the engine thread


@pytest.mark.parametrize("options", [{}, {"speculation": "ngram"}, {"one_step_ahead": False}])
def test_deferred_work_runs_while_the_device_computes(options):
    engine, done = core(**options), []
    device = engine.device
    dispatch, read = device.dispatch, device.read
    device.dispatch = lambda plan: done.append("dispatch") or dispatch(plan)
    device.read = lambda pending: done.append("read") or read(pending)
    engine.add(Request(request_id="r", prompt_token_ids=[1, 2], params=SamplingParams(), seed=0))
    while engine.has_work:
        engine.tick(lambda: done.append("wait"))
    assert done.count("read") == done.count("wait") == engine.num_steps > 8
    assert all(before == "wait" for before, now in pairwise(done) if now == "read")
    if not options:
        assert done[:5] == ["dispatch", "dispatch", "wait", "read", "dispatch"]


def test_phase_durations_fall_into_their_buckets():
    now_s = 0.0
    times = PhaseTimes(clock=lambda: now_s)
    times.begin()
    for seconds in (0.25, 0.25, 100.0):
        now_s += seconds
        times.end("read")
    now_s += 0.002
    times.end("commit")
    totals = times.totals()
    assert set(totals) == set(PHASES)
    assert (totals["read"].count, totals["read"].total_s) == (3, 100.5)
    at_quarter = BOUNDS_S.index(0.25)
    assert totals["read"].buckets[at_quarter] == 2 and totals["read"].buckets[-1] == 1
    assert totals["commit"].buckets[BOUNDS_S.index(0.0025)] == 1
    assert totals["schedule"].count == 0
