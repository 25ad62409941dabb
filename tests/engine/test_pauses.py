"""Pauses and sleep: a trainer stops an engine, and its requests continue with the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import jax
import pytest

from forge_jax import Engine, EngineConfig, RequestError, SamplingParams
from forge_jax.engine.commands import ActivateExecutables
from forge_jax.schedule.request import Request
from forge_jax.testing import core_of, drafts_always_pay

PROMPTS = [[5, 6, 7, 8, 9] * n for n in (1, 8, 14)]
LONG = SamplingParams(max_tokens=160, seed=3, ignore_eos=True, detokenize=False)


@asynccontextmanager
async def running(load: Callable[[], Engine]) -> AsyncIterator[Engine]:
    engine = await asyncio.to_thread(load)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def fake(step_time_s: float = 0.0, **options: Any) -> AsyncIterator[Engine]:
    """Run an engine whose device checks that each sequence's KV matches its tokens."""
    config = EngineConfig.from_options(**options)
    async with running(
        lambda: Engine.fake(check=True, step_time_s=step_time_s, config=config)
    ) as engine:
        yield engine


async def tokens(engine: Engine, prompt: list[int], params: SamplingParams = LONG) -> list[int]:
    return [t async for delta in engine.generate(prompt, params) for t in delta.token_ids]


async def ended(engine: Engine, prompt: list[int], params: SamplingParams = LONG) -> str | None:
    """Return the finish reason of a request."""
    return [delta.finish_reason async for delta in engine.generate(prompt, params)][-1]


async def started(engine: Engine, count: int = 3) -> None:
    """Wait until this many requests have output."""
    while engine.streams.num_waiting or len(engine.streams) < count:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("speculation", ["off", "ngram"])
@pytest.mark.parametrize("asleep", [False, True])
async def test_kept_requests_get_the_tokens_of_an_undisturbed_run(asleep, speculation):
    async with fake(step_time_s=0.001, speculation=speculation) as engine:
        alone = [await tokens(engine, prompt) for prompt in PROMPTS]
        requests = [asyncio.create_task(tokens(engine, prompt)) for prompt in PROMPTS]
        await started(engine)
        await (engine.control.sleep(1, "keep") if asleep else engine.control.pause("keep"))
        steps = engine.stats().steps
        late = asyncio.create_task(tokens(engine, PROMPTS[0]))
        await asyncio.sleep(0.05)
        stats = engine.stats()
        assert stats.steps == steps and stats.paused and stats.sleeping == asleep
        assert stats.healthy and stats.stalled_s == 0 and engine.lifecycle.healthy
        assert not any(request.done() for request in [*requests, late])
        assert stats.num_waiting == (4 if asleep else 1)
        await (engine.control.wake_up() if asleep else engine.control.resume())
        assert await asyncio.gather(*requests) == alone
        assert await late == alone[0]
        stats = engine.stats()
        assert not stats.paused and not stats.sleeping and stats.num_used_blocks == 0


async def test_pause_with_abort_ends_unfinished_requests():
    async with fake(step_time_s=0.001) as engine:
        requests = [asyncio.create_task(ended(engine, prompt)) for prompt in PROMPTS]
        await started(engine)
        await engine.control.pause("abort")
        assert await asyncio.gather(*requests) == ["abort"] * 3
        assert engine.stats().num_used_blocks == 0


async def test_pause_with_wait_finishes_requests_and_holds_new_ones():
    async with fake(step_time_s=0.002) as engine:
        alone = await tokens(engine, PROMPTS[1])
        request = asyncio.create_task(tokens(engine, PROMPTS[1]))
        await started(engine, 1)
        pause = asyncio.create_task(engine.control.pause("wait"))
        while not engine.control.paused:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(tokens(engine, PROMPTS[1]))
        await pause
        assert await request == alone and not late.done()
        assert engine.stats().num_waiting == 1 and engine.stats().num_running == 0
        await engine.control.pause("wait")  # nothing is left to wait for
        await engine.control.resume()
        assert await late == alone


async def test_resume_ends_the_wait_of_a_pause():
    async with fake(step_time_s=0.002) as engine:
        request = asyncio.create_task(tokens(engine, PROMPTS[1]))
        await started(engine, 1)
        pause = asyncio.create_task(engine.control.pause("wait"))
        while not engine.control.paused:
            await asyncio.sleep(0.001)
        await engine.control.resume()
        with pytest.raises(RequestError, match="resumed before its requests finished"):
            await pause
        assert len(await request) == LONG.max_tokens


async def test_wait_does_not_end_while_another_pause_freezes_its_requests():
    async with fake(step_time_s=0.002) as engine:
        request = asyncio.create_task(tokens(engine, PROMPTS[1]))
        await started(engine, 1)
        wait = asyncio.create_task(engine.control.pause("wait"))
        while not engine.control.paused:
            await asyncio.sleep(0.001)
        await engine.control.pause("keep")
        await asyncio.sleep(0.05)
        assert not wait.done() and not request.done()
        await engine.control.pause("abort")
        await wait
        assert len(await request) < LONG.max_tokens


async def test_waiting_requests_can_be_aborted_and_do_not_outlive_the_engine():
    async with fake() as engine:
        await engine.control.pause("keep")
        first = asyncio.create_task(ended(engine, PROMPTS[0]))
        second = asyncio.create_task(ended(engine, PROMPTS[0]))
        await asyncio.sleep(0.01)
        engine.abort(engine.streams.request_ids()[0])
        assert await first == "abort" and not second.done()
        assert engine.stats().num_waiting == 1
    assert await second == "abort"


async def test_pause_outlasts_the_sleep_within_it():
    async with fake() as engine:
        await engine.control.pause("keep")
        await engine.control.sleep(1, "keep")
        with pytest.raises(RequestError, match="wake it up with POST /wake_up"):
            await engine.control.resume()
        await engine.control.wake_up(["kv_cache"])
        assert engine.control.sleeping
        await engine.control.wake_up(["weights"])
        assert not engine.control.sleeping and engine.control.paused
        await engine.control.resume()
        assert len(await tokens(engine, PROMPTS[0])) == LONG.max_tokens


async def test_executables_are_activated_after_the_sleep():
    class Late:
        activated = 0

        def activate(self) -> bool:
            self.activated += 1
            return False

    async with fake() as engine:
        late: Any = Late()
        await engine.control.sleep(1, "keep")
        engine._thread.send(ActivateExecutables(late))
        await engine.control.reset_prefix_cache()  # passes the engine thread
        assert late.activated == 0  # it would run a step
        await engine.control.wake_up()
        assert late.activated == 1


async def test_invalid_arguments_change_nothing():
    async with fake() as engine:
        for call in (
            engine.control.pause("stop"),  # type: ignore[arg-type]
            engine.control.sleep(3),
            engine.control.sleep(1, "later"),  # type: ignore[arg-type]
            engine.control.wake_up(["kv"]),
        ):
            with pytest.raises(RequestError, match="must be"):
                await call
        assert not engine.control.paused
        await engine.control.resume()
        await engine.control.wake_up()  # neither has anything to do


@pytest.mark.parametrize("eviction", ["lru", "fifo"])
async def test_prefix_cache_is_emptied_on_request(eviction):
    async with fake(step_time_s=0.001, eviction=eviction) as engine:
        prompt, pool = list(range(60)), engine._core.scheduler.pool
        short = SamplingParams(max_tokens=2)
        for _ in range(2):
            await tokens(engine, prompt, short)
        hits = engine.stats().prefix_cache_hits
        assert hits > 0 and pool.num_cached > 0
        await engine.control.reset_prefix_cache()
        assert pool.num_cached == 0
        pool.check()
        await tokens(engine, prompt, short)
        assert engine.stats().prefix_cache_hits == hits
        alone = await tokens(engine, PROMPTS[1])
        request = asyncio.create_task(tokens(engine, PROMPTS[1]))
        await started(engine, 1)
        await engine.control.reset_prefix_cache(running=True)
        assert await request == alone


@pytest.fixture(scope="module")
def load(short_stories) -> Callable[..., Engine]:
    def load(**options: Any) -> Engine:
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
        options = {"deterministic": True, "dtype": "float32", **sizes, **options}
        return Engine.load(EngineConfig.from_options(model=str(short_stories), **options))

    return load


@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, "self", "own"])
async def test_sleep_moves_weights_and_kv_cache_off_the_device(load, short_stories, draft):
    options: dict[str, Any] = {} if draft is None else {"speculation": "draft"}
    if draft == "self":
        options |= {"draft_model": "self", "draft_layers": 1}
    elif draft == "own":
        options["draft_model"] = str(short_stories)
    async with running(lambda: load(**options)) as engine:
        while engine.lifecycle.state != "ready":
            await asyncio.sleep(0.01)
        if draft is not None:
            drafts_always_pay(core_of(engine).speculator.policy)
        alone = [await tokens(engine, prompt) for prompt in PROMPTS]
        for tags in ([], ["weights"], ["kv_cache"]):
            requests = [asyncio.create_task(tokens(engine, prompt)) for prompt in PROMPTS]
            await started(engine)
            await engine.control.sleep(1, "keep")
            state = engine._parts.offload._runner.state
            assert all(leaf.is_deleted() for leaf in engine.leaves) and not state.kv
            for each in [tags, []]:
                await engine.control.wake_up(each)
            assert not any(leaf.is_deleted() for leaf in engine.leaves)
            assert jax.tree.leaves(state.kv)
            assert await asyncio.gather(*requests) == alone
        stats = engine.stats()
        assert stats.recoveries == 0 and stats.compilations_after_ready == 0
        assert draft is None or sum(stats.speculation.accepted_per_position) > 0


@pytest.mark.slow
async def test_weights_dropped_by_sleep_come_back_with_an_update(load, short_stories):
    async with running(load) as engine:
        alone = await tokens(engine, PROMPTS[1])
        for first in ("weights", "kv_cache"):
            request = asyncio.create_task(tokens(engine, PROMPTS[1]))
            await started(engine, 1)
            await engine.control.sleep(2, "keep")
            with pytest.raises(RequestError, match="POST /update_weights first"):
                await engine.control.wake_up()
            await engine.control.wake_up([first])
            assert engine.control.sleeping
            await engine.update_weights(short_stories)
            assert engine.control.sleeping == (first == "weights")
            await engine.control.wake_up()
            assert not engine.control.paused
            assert await request == alone


@pytest.mark.slow
async def test_update_replaces_the_weights_that_sleep_keeps_on_the_host(load, short_stories):
    async with running(load) as engine:
        alone = await tokens(engine, PROMPTS[1])
        await engine.control.sleep(1, "keep")
        await engine.update_weights(str(short_stories), version=5)
        assert not any(leaf.is_deleted() for leaf in engine.leaves)
        assert not engine._parts.offload.has_copy
        await engine.control.wake_up()
        assert await tokens(engine, PROMPTS[1]) == alone
        assert engine.stats().weight_version == 5


def test_paused_core_returns_the_deltas_of_the_step_in_flight():
    engine = Engine.fake(check=True)
    core = core_of(engine)
    core.add(Request(request_id="r", prompt_token_ids=PROMPTS[0], params=LONG, seed=1))
    core.tick()
    core.pause()
    assert core.has_work
    assert core.tick()["r"] and not core.has_work and core.scheduler.has_work
    assert core.tick() == {}
    core.resume()
    assert core.has_work
