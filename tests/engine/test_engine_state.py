"""The state of a running engine: sequences, blocks, steps."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import signal

import msgspec
import pytest

from forge_jax.config import EngineConfig
from forge_jax.engine.async_engine import AsyncEngine
from forge_jax.engine.process.client import EngineProcess
from forge_jax.engine.streams import Stream
from forge_jax.engine.thread import Engine
from forge_jax.errors import EngineError
from forge_jax.sampling_params import SamplingParams
from forge_jax.telemetry import engine_state
from forge_jax.telemetry.engine_state import (
    MAX_CELLS,
    MAX_RUNNING,
    MAX_STEPS,
    MAX_WAITING,
    Capture,
    EngineState,
)
from forge_jax.testing import core_of

PROMPT = list(range(1, 60))  # 4 blocks of 16, of which 3 are full
LONG = SamplingParams(max_tokens=2000, ignore_eos=True)


async def until_read(stream: Stream, tokens: int = 4) -> None:
    seen = 0
    async for deltas in stream:
        seen += sum(len(delta.token_ids) for delta in deltas)
        if seen >= tokens:
            return


def cells(state: EngineState) -> list[int | str]:
    return [what for count, what in state.blocks.runs for _ in range(count)]


def check_blocks(state: EngineState) -> None:
    """Check that the runs and the counts of a map with one block per cell agree."""
    blocks, found = state.blocks, cells(state)
    assert blocks.blocks_per_cell == 1 and len(found) == blocks.num_blocks
    assert blocks.num_free == found.count("free")
    assert blocks.num_cached == found.count("cached")
    assert blocks.num_shared == found.count("shared")
    owned = sum(isinstance(what, int) or what == "other" for what in found)
    assert blocks.num_owned == owned
    for place, seq in enumerate(state.sequences):
        assert found.count(place) == seq.blocks - seq.shared_blocks
    for (_, one), (_, other) in itertools.pairwise(blocks.runs):
        assert one != other  # runs are maximal


@pytest.mark.parametrize("kind", [Engine, EngineProcess])
async def test_engine_state_shows_owners_and_fate_of_blocks(kind):
    config = EngineConfig.from_options(num_blocks=300, block_size=16, max_num_seqs=2)
    engine: AsyncEngine = kind.fake(step_time_s=0.002, config=config)
    engine.start()
    first = engine.submit(PROMPT, LONG, request_id="first", cache_salt="mine")
    await until_read(first)  # its prompt is in the prefix cache
    second = engine.submit(PROMPT, LONG, request_id="second", cache_salt="mine")
    third = engine.submit(PROMPT, LONG, request_id="third", cache_salt="other")
    await until_read(second)
    state = await engine.look()
    check_blocks(state)
    assert [(s.request_id, s.status) for s in state.sequences] == [
        ("first", "running"), ("second", "running"), ("third", "waiting")
    ]  # fmt: skip
    assert (state.num_running, state.num_waiting) == (2, 1)
    one, two, three = state.sequences
    assert one.prompt_tokens == two.prompt_tokens == 59 and two.cached_tokens == 48
    assert one.output_tokens > 0 and one.computed_tokens >= 59
    assert one.shared_blocks == two.shared_blocks == state.blocks.num_shared == 3
    assert one.blocks > 3 and three.blocks == 0
    assert (one.cache_salt, three.cache_salt) == ("mine", "other")

    for stream in (first, second, third):
        stream.abort()
    async with asyncio.timeout(10):
        while engine.stats().num_used_blocks:
            await asyncio.sleep(0.005)
    state = await engine.look()
    check_blocks(state)
    assert not state.sequences and not state.blocks.num_owned and not state.blocks.num_shared
    assert state.blocks.num_cached >= 3
    await engine.stop()


async def test_steps_are_recorded_from_the_first_look_on():
    engine = Engine.fake(step_time_s=0.001)
    watcher = core_of(engine).watcher
    engine.start()
    stream = engine.submit(PROMPT, LONG, request_id="a")
    await until_read(stream)
    assert not watcher.watches and not watcher._steps, "nobody has looked"
    assert not (await engine.look()).steps
    await until_read(stream, 20)
    steps = (await engine.look()).steps
    numbers = [record.step for record in steps]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) and len(numbers) >= 10
    for before, record in itertools.pairwise(steps):
        assert record.end_s == pytest.approx(before.end_s + record.seconds)
    assert {(s.sequences, s.tokens, s.rows, s.draft_tokens) for s in steps} == {(1, 1, 1, 0)}
    await engine.stop()


async def test_recording_stops_when_unwatched(monkeypatch):
    engine = Engine.fake(step_time_s=0.001)
    watcher = core_of(engine).watcher
    engine.start()
    stream = engine.submit(PROMPT, LONG, request_id="a")
    await engine.look()
    await until_read(stream, 20)
    assert watcher.watches and watcher._steps
    monkeypatch.setattr(engine_state, "WATCHED_S", 0.0)
    await until_read(stream, 20)
    assert not watcher.watches and not watcher._steps
    await engine.stop()


async def test_drafts_are_reported_with_their_steps():
    config = EngineConfig.from_options(speculation="suffix")
    engine = Engine.fake(config=config, step_time_s=0.002)
    engine.start()
    await engine.look()
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0, seed=1)
    for i in range(3):  # the second can draft from the first
        async for _ in engine.submit(PROMPT, params, request_id=f"{i}"):
            pass
    steps, stats = (await engine.look()).steps, engine.stats().speculation
    assert stats is not None
    assert sum(record.draft_tokens for record in steps) == stats.num_draft_tokens
    assert sum(record.accepted_tokens for record in steps) == stats.num_accepted_tokens
    assert stats.num_draft_tokens, "there was nothing to tell"
    assert any(record.tokens > record.rows for record in steps)  # the prompts
    await engine.stop()


async def test_look_returns_while_the_engine_stops():
    engine = EngineProcess.fake()
    engine.start()
    while engine.lifecycle.state != "ready":
        await asyncio.sleep(0.01)

    async def look_late():
        while engine.lifecycle.state != "stopped":
            await asyncio.sleep(0)
        await engine.look()

    late = asyncio.create_task(look_late())
    await asyncio.sleep(0.05)
    await engine.stop()
    with pytest.raises(EngineError, match="no engine process"):
        await asyncio.wait_for(late, 60)


async def test_engine_state_is_bounded_in_size():
    config = EngineConfig.from_options(num_blocks=100_001, max_num_seqs=256)
    engine = Engine.fake(config=config)
    params = SamplingParams(max_tokens=800, ignore_eos=True, n=32)
    engine.start()
    streams = [engine.submit(PROMPT, params, request_id="r" * 60 + str(i)) for i in range(20)]
    await engine.look()
    await until_read(streams[0], 32 * 600)
    state = await engine.look()
    assert state.num_running == 256 and state.num_waiting == 20 * 32 - 256
    kinds = [seq.status for seq in state.sequences]
    assert kinds == ["running"] * MAX_RUNNING + ["waiting"] * MAX_WAITING
    assert "other" in cells(state) and len(cells(state)) <= MAX_CELLS
    assert state.blocks.blocks_per_cell == 49 and len(state.steps) == MAX_STEPS
    assert len(msgspec.json.encode(state)) < 250_000
    await engine.stop()


def capture(**changed: object) -> Capture:
    few = {
        "time_s": 0.0, "cost_s": 0.0, "num_running": 0, "num_waiting": 0, "block_size": 16,
        "refs": [0] * 5, "cached": [], "sequences": [], "finished": [],
        "steps": [],
    }  # fmt: skip
    return Capture(**(few | changed))


def test_cell_of_several_blocks_shows_held_before_cached(monkeypatch):
    monkeypatch.setattr(engine_state, "MAX_CELLS", 3)
    # Cells of two blocks: held and cached, cached and free, free and free.
    state = capture(refs=[0, 1, 0, 0, 0], cached=[0, 2]).state()
    assert state.blocks.runs == [(1, "other"), (1, "cached"), (1, "free")]
    assert (state.blocks.num_owned, state.blocks.num_cached, state.blocks.num_free) == (1, 2, 2)
    assert state.blocks.blocks_per_cell == 2


def test_block_map_checker_detects_a_wrong_number():
    state = capture(refs=[0, 1, 2, 0, 0], cached=[0]).state()
    check_blocks(state)
    wrong = dataclasses.replace(state.blocks, num_shared=0, num_free=3)
    with pytest.raises(AssertionError):
        check_blocks(dataclasses.replace(state, blocks=wrong))


@pytest.mark.parametrize("kind", [Engine, EngineProcess])
async def test_stopped_engine_rejects_looks(kind):
    engine: AsyncEngine = kind.fake()
    engine.start()
    await engine.stop()
    with pytest.raises(EngineError):
        await engine.look()


async def look_until_it_fails(engine: AsyncEngine) -> None:
    while True:
        await engine.look()


async def test_look_fails_when_the_process_dies_and_succeeds_on_the_next():
    engine = EngineProcess.fake()
    engine.start()
    async with asyncio.timeout(20):
        await asyncio.sleep(0.05)
        await engine.look()
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError):
            await look_until_it_fails(engine)
        while engine.stats().state != "ready":
            await asyncio.sleep(0.01)
        assert (await engine.look()).num_running == 0
    await engine.stop()
