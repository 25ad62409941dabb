"""Several engine processes behind one engine: equal results, crashes, adapters, snapshots."""

import asyncio
import os
import signal
import threading

import pytest

from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.hub import resolve
from forge_jax.config import EngineConfig
from forge_jax.engine.process import launcher
from forge_jax.engine.process.group import EngineGroup
from forge_jax.engine.process.messages import Start
from forge_jax.engine.process.totals import total_stats
from forge_jax.engine.streams import QueueLimits
from forge_jax.errors import ConfigError, EngineError, OverloadedError, RequestError
from tests.engine.test_engine_process import WAIT_S, jobs, outcomes, undisturbed, until
from tests.lora_files import write_adapter

LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=1.0, seed=1)


async def tokens(stream) -> list[int]:
    return [each async for deltas in stream for delta in deltas for each in delta.token_ids]


@pytest.fixture
def starts(monkeypatch) -> list[Start]:
    """Record the configurations of launched processes, without those of successors."""
    found: list[Start] = []

    def record(start: Start):
        found.append(start)
        return launcher.launch(start)

    monkeypatch.setattr("forge_jax.engine.process.group.launch", record)
    return found


@pytest.fixture
async def group(starts):
    group = await asyncio.to_thread(
        EngineGroup.fake, 2, step_time_s=0.005, queue_limits=QueueLimits(samples=40)
    )
    group.start()
    yield group
    await group.stop()


@pytest.fixture
def successors(monkeypatch) -> threading.Event:
    """Let no successor of an engine process start until this is set."""
    allowed, launch = threading.Event(), launcher.launch

    def launch_when_allowed(*args):
        assert allowed.wait(WAIT_S)
        return launch(*args)

    monkeypatch.setattr(launcher, "launch", launch_when_allowed)
    return allowed


def submit_to_both(group: EngineGroup) -> list:
    """Submit long requests until each engine has one, however many others each has finished."""
    streams = []
    while len({stream.engine for stream in streams}) < 2:
        streams.append(group.submit([len(streams)], LONG, request_id=f"long{len(streams)}"))
    return streams


async def test_group_survives_kills_with_the_results_of_one_engine(group, successors):
    work = jobs(24)
    expected = await undisturbed(work)
    results = asyncio.create_task(outcomes(group, work))
    await until(lambda: all(each.stats().generation_tokens for each in group.engines), "tokens")
    victim, other = group.engines
    long = submit_to_both(group)
    os.kill(victim.pid, signal.SIGKILL)
    await until(lambda: victim.stats().state == "recovering", "a crash")

    # The other engine continues, and takes all new requests.
    assert group.stats().state == "serving" and group.stats().healthy
    of_other = [stream for stream in long if stream.engine == 1]
    async with asyncio.timeout(WAIT_S):
        found = [await tokens(stream) for stream in of_other]
        new = [group.submit([9], LONG, request_id=f"new{i}") for i in range(3)]
        assert {stream.engine for stream in new} == {1}
        assert all([len(await tokens(stream)) == 400 for stream in new])
    assert victim.streams and other.stats().restarts == 0

    successors.set()
    assert await results == expected
    async with asyncio.timeout(WAIT_S):
        found += [await tokens(stream) for stream in long if stream.engine == 0]
    assert len(found) == len(long) and all(len(each) == 400 for each in found)
    assert group.stats().state == "ready" and group.stats().restarts == 1
    assert not group._running and not group.streams

    # An engine that is not restarted ends only its own streams.
    ends = [group.submit([i], LONG, request_id=f"end{i}") for i in range(2)]
    victim._fail(EngineError("planted"))
    errors = {}
    for stream in ends:
        deltas = [delta async for deltas in stream for delta in deltas]
        errors[stream.engine] = deltas[-1].error
    assert isinstance(errors[0], EngineError) and errors[1] is None
    assert group.stats().state == "serving"
    assert group.submit([1], LONG, request_id="last").engine == 1
    other._fail(EngineError("planted"))
    assert group.stats().state == "failed"
    with pytest.raises(EngineError, match="it is failed"):
        group.submit([1], LONG, request_id="late")


@pytest.fixture
def refusals(monkeypatch) -> threading.Event:
    """While this is set, no successor of an engine process starts. Pauses are short."""
    refused, launch = threading.Event(), launcher.launch

    def launch_unless_refused(*args):
        if refused.is_set():
            raise EngineError("planted")
        return launch(*args)

    monkeypatch.setattr(launcher, "launch", launch_unless_refused)
    monkeypatch.setattr("forge_jax.engine.process.backoff.FIRST_S", 1e-3)
    return refused


async def test_streams_of_an_engine_that_cannot_restart_continue_on_another(group, refusals):
    work = jobs(24)
    expected = await undisturbed(work)
    results = asyncio.create_task(outcomes(group, work))
    await until(lambda: all(each.stats().generation_tokens for each in group.engines), "tokens")
    victim, other = group.engines
    long = submit_to_both(group)
    group.submit([5], LONG, request_id="dropped").abort()
    refusals.set()
    os.kill(victim.pid, signal.SIGKILL)
    await until(lambda: victim.stats().state == "unavailable", "failed launches")

    assert {stream.engine for stream in long} == {1} and not victim.streams
    assert (victim.stats().num_running, victim.stats().num_used_blocks) == (0, 0)
    assert group.stats().state == "serving" and group.stats().healthy
    assert group.submit([9], LONG, request_id="new").engine == 1
    group.abort("new")
    assert await results == expected
    async with asyncio.timeout(WAIT_S):
        assert all([len(await tokens(stream)) == 400 for stream in long])
    assert not group._running and not group.streams and other.stats().restarts == 0

    refusals.clear()
    await until(lambda: group.stats().state == "ready", "the engine to return")
    assert {group.submit([i], LONG, request_id=f"both{i}").engine for i in range(2)} == {0, 1}

    # While no engine takes requests, none is left to move them to.
    refusals.set()
    for each in group.engines:
        os.kill(each.pid, signal.SIGKILL)
    await until(lambda: group.stats().state == "failed", "the end of all launches")
    await until(
        lambda: {each.stats().state for each in group.engines} == {"failed"}, "no more launches"
    )
    assert not group._running and not group.streams


async def test_first_engine_leaves_memory_and_cpus_for_the_other(group, starts):
    first, second = starts
    assert (first.host_sharers, first.num_blocks) == (2, None)
    assert (second.host_sharers, second.num_blocks) == (1, group.engines[0].stats().num_blocks)
    cpus = [os.sched_getaffinity(each.pid) for each in group.engines]
    if len(os.sched_getaffinity(0)) > 1:
        assert not cpus[0] & cpus[1]
    assert cpus[0] | cpus[1] == os.sched_getaffinity(0)


async def test_group_is_used_like_one_engine(group):
    streams = [group.submit([i] * 40, LONG, request_id=f"r{i}") for i in range(6)]
    assert [stream.engine for stream in streams].count(0) == 3
    await until(lambda: group.stats().num_running == 6, "running requests")
    state = await group.look()
    assert state.num_running == 6 == len(state.sequences)
    owners = {holder for _, holder in state.blocks.runs if isinstance(holder, int)}
    assert owners == set(range(6))
    assert state.blocks.num_blocks == sum(each.stats().num_blocks for each in group.engines)
    await until(lambda: group.stats().steps > 20, "steps")
    steps = (await group.look()).steps
    assert [each.step for each in steps] == list(range(len(steps))) and steps
    assert [each.end_s for each in steps] == sorted(each.end_s for each in steps)
    parts = [each.stats() for each in group.engines]
    total = total_stats(parts)
    assert total.num_slots == sum(each.num_slots for each in parts)
    reads = [each.step_phases["read"].buckets for each in parts]
    assert total.step_phases["read"].buckets == tuple(map(sum, zip(*reads, strict=True)))
    assert total.step_tokens.total == sum(each.step_tokens.total for each in parts)

    group.abort("r0")
    async with asyncio.timeout(WAIT_S):
        deltas = [delta async for deltas in streams[0] for delta in deltas]
    assert deltas[-1].finish_reason == "abort"
    (ended,) = (await group.look()).finished
    assert (ended.request_id, ended.finish_reason) == ("r0", "abort")
    waiting = [group.submit([7], LONG, request_id=f"w{i}") for i in range(40)]
    with pytest.raises(OverloadedError, match="40 samples"):
        group.submit([7], LONG, request_id="too many")
    assert group.shed()
    [last] = [delta async for deltas in waiting[-1] for delta in deltas]
    assert isinstance(last.error, OverloadedError)
    group.abort_all()
    await until(lambda: not group.streams and not group._running, "no streams")
    await until(lambda: group.stats().num_used_blocks == 0, "free blocks")
    with pytest.raises(RequestError, match="--max-loras"):
        await group.load_lora("a", "/nowhere")


async def test_engines_of_a_group_compute_the_same_bits(tmp_path, refusals):
    """Covers sizes, adapters, profiles and requests that move, which need a model."""
    folder = resolve("forge-tiny", None)
    good, changed = (write_adapter(tmp_path / n, folder, seed=i) for i, n in enumerate("ab"))
    config = EngineConfig.from_options(
        model="forge-tiny", deterministic=True, max_num_seqs=4, max_model_len=256, max_loras=2,
        backend="cpu",
    )  # fmt: skip
    group = await asyncio.to_thread(EngineGroup.load, config, 2)
    group.start()
    try:
        first, second = (each.stats() for each in group.engines)
        assert first.num_blocks == second.num_blocks
        assert (await twice(group))[0] is not None
        await group.load_lora("a", str(good))
        base, adapted = (await twice(group))[0], (await twice(group, "a"))[0]
        assert base != adapted
        (changed / "adapter_config.json").unlink()
        with pytest.raises(RequestError, match="adapter_config"):
            await group.load_lora("b", str(changed))
        assert all([each.name for each in one.loras] == ["a"] for one in (group, *group.engines))

        await group.start_profile(tmp_path / "profile")
        await twice(group)
        await group.stop_profile()
        found = {path.relative_to(tmp_path / "profile").parts[0]
                 for path in (tmp_path / "profile").rglob("*.xplane.pb")}  # fmt: skip
        assert found == {"engine0", "engine1"}

        pid = group.engines[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: group.engines[1].num_restarts == 1, "a crash")
        await group.unload_lora("a")  # waits for the successor, which has the adapter
        assert not any(each.loras for each in (group, *group.engines))
        assert group.engines[1].stats().num_blocks == first.num_blocks
        assert (await twice(group))[0] == base

        # The tokens after a move have the same bits. An adapter reaches an engine that is away.
        await group.load_lora("c", str(good))
        assert (await twice(group, "c", lose_one=refusals))[0] == adapted
        await until(lambda: group.engines[0].stats().state == "unavailable", "failed launches")
        await group.unload_lora("c")
        await group.load_lora("d", str(good))
        refusals.clear()
        await until(lambda: group.stats().state == "ready", "the engine to return")
        assert all([one.name for one in each.loras] == ["d"] for each in group.engines)
        assert (await twice(group, "d"))[0] == adapted
    finally:
        await group.stop()


async def twice(
    group: EngineGroup, lora: str | None = None, lose_one: threading.Event | None = None
) -> list[list]:
    """Run a request on both engines. Return its tokens and logprobs, which must be equal.

    Args:
      lose_one: prevents restarts once set. If given, the first engine is killed after a few tokens.
    """
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5, logprobs=2, ignore_eos=True)
    streams = [group.submit(range(3, 23), params, request_id=f"t{i}", lora=lora) for i in range(2)]
    assert {stream.engine for stream in streams} == {0, 1}
    if lose_one is not None:
        lost = group.engines[0]
        await until(lambda: lost._journal.num_tokens, "tokens")
        assert lost.pid is not None
        lose_one.set()
        os.kill(lost.pid, signal.SIGKILL)
        await until(lambda: {stream.engine for stream in streams} == {1}, "a move")
    found = []
    for stream in streams:
        deltas = [delta async for deltas in stream for delta in deltas]
        assert deltas[-1].error is None
        found.append([(delta.token_ids, delta.logprobs) for delta in deltas])
    merged = [
        [sum((ids for ids, _ in each), ()), sum((logprobs or () for _, logprobs in each), ())]
        for each in found
    ]
    assert merged[0] == merged[1] and len(merged[0][0]) == 24
    return merged


def test_offline_use_names_the_remedy():
    for name in ("data_parallel", "data_parallel_size", "dp_size"):
        with pytest.raises(ConfigError, match=rf"{name} is not supported: .*forge-jax serve"):
            LLM("forge-tiny", **{name: 2})
