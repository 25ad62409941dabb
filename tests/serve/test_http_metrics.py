"""Request metrics: the time by stage, and the tokens by source."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from forge_jax.config import BatchConfig, EngineConfig
from forge_jax.engine.streams import QueueLimits
from forge_jax.engine.thread import Engine
from forge_jax.sampling_params import SamplingParams

PATH = "/v1/completions"
LONG = {"prompt": "the same beginning " * 20, "max_tokens": 8, "ignore_eos": True}


async def scrape(server: Any) -> dict[tuple[str, ...], float]:
    """Return the samples by (name, label values except model_name and engine, in order)."""
    async with server.http.get(server.url + "/metrics") as response:
        text = await response.text()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[(sample.name, *labels.values())] = sample.value
    return found


def one_at_a_time(step_time_s: float = 0.005, **kwargs: Any) -> Engine:
    batch = BatchConfig(max_num_seqs=1)
    return Engine.fake(step_time_s=step_time_s, config=EngineConfig(batch=batch), **kwargs)


async def seen(server: Any, *conditions: tuple[str, ...]) -> dict[tuple[str, ...], float]:
    """Return a scrape as soon as all of these are greater than 0."""
    async with asyncio.timeout(30):
        found = await scrape(server)
        while not all(found[key] for key in conditions):
            await asyncio.sleep(0.001)
            found = await scrape(server)
    return found


@contextlib.asynccontextmanager
async def long_request(server: Any) -> AsyncIterator[None]:
    params = SamplingParams(max_tokens=4000, ignore_eos=True)
    stream = server.engine.submit(list(range(60)), params, request_id="long")
    await anext(stream)
    yield
    stream.abort()


async def test_stages_of_a_request_add_up(start):
    server = await start(one_at_a_time())
    await asyncio.gather(*(server.post(PATH, LONG) for _ in range(3)))
    found = await scrape(server)
    sums = {stage: found[f"vllm:request_{stage}_time_seconds_sum",]
            for stage in ("queue", "prefill", "decode", "inference")}  # fmt: skip
    for stage in sums:
        assert found[f"vllm:request_{stage}_time_seconds_count",] == 3
    assert min(sums.values()) > 0, "two of them wait for another"
    assert abs(sums["prefill"] + sums["decode"] - sums["inference"]) < 1e-6
    assert sums["queue"] + sums["inference"] <= found["vllm:e2e_request_latency_seconds_sum",]
    per_token = found["vllm:request_time_per_output_token_seconds_sum",]
    assert abs(per_token - sums["decode"] / 7) < 1e-6


async def test_unreached_stage_is_not_counted(start):
    server = await start(one_at_a_time())
    async with long_request(server):
        status, answer = await server.post(PATH, {**LONG, "timeout": 0.05})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    found = await scrape(server)
    assert found["vllm:e2e_request_latency_seconds_count",] == 1
    assert found["vllm:request_success_total", "abort"] == 1
    for stage in ("queue", "prefill", "decode", "inference"):
        assert found[f"vllm:request_{stage}_time_seconds_count",] == 0


async def test_prompt_tokens_are_counted_by_source(start):
    server = await start(Engine.fake())
    prompt_tokens = len(server.engine.tokenizer.encode(LONG["prompt"]))
    for _ in range(2):
        await server.post(PATH, {**LONG, "n": 2})
    found = await scrape(server)
    computed = found["vllm:prompt_tokens_by_source_total", "local_compute"]
    cached = found["vllm:prompt_tokens_by_source_total", "local_cache_hit"]
    assert computed + cached == found["vllm:prompt_tokens_total",] == 2 * prompt_tokens
    assert cached == found["vllm:prompt_tokens_cached_total",] > prompt_tokens / 2
    assert cached == found["vllm:prompt_tokens_cached_by_source_total", "device"]
    of_requests = found["vllm:request_prefill_kv_computed_tokens_sum",]
    assert 0 < of_requests <= computed  # counts the sample that found most
    assert found["vllm:request_params_n_sum",] == 4
    assert found["vllm:request_params_max_tokens_sum",] == 16
    assert found["vllm:request_generation_tokens_sum",] == 32
    assert found["vllm:request_max_num_generation_tokens_sum",] == 16


async def test_blocks_are_counted_by_state(start):
    server = await start(Engine.fake(step_time_s=0.005))
    stats = server.engine.stats()
    async with long_request(server):
        found = await seen(server, ("forge:kv_blocks", "used"))
    states = [found["forge:kv_blocks", state] for state in ("used", "cached", "free")]
    assert sum(states) == stats.num_blocks
    await server.idle()
    found = await scrape(server)
    assert found["forge:kv_blocks", "used"] == 0 < found["forge:kv_blocks", "cached"]
    assert found["forge:kv_block_evictions_total",] == 0


async def test_steps_are_counted_with_their_tokens(start):
    server = await start(Engine.fake())
    await server.post(PATH, LONG)
    await server.idle()
    found = await scrape(server)
    steps = found["forge:engine_steps_total",]
    assert found["vllm:iteration_tokens_total_count",] == steps >= 8
    prompt_tokens = len(server.engine.tokenizer.encode(LONG["prompt"]))
    assert found["vllm:iteration_tokens_total_sum",] >= prompt_tokens + 7


async def test_token_budget_is_that_of_the_latest_step_with_prompts(start):
    config = EngineConfig.from_options(itl_target_ms=1)
    server = await start(Engine.fake(config=config, step_time_s=0.005))
    assert (await scrape(server))["forge:step_token_budget",] == 2048
    async with long_request(server):
        await server.post(PATH, {**LONG, "prompt": "the old dog " * 40})
        found = await scrape(server)
    # It at most doubles from one step to the next.
    assert found["forge:step_token_budget",] < 2048
    assert found["forge:expected_step_seconds",] > 0
    unlimited = await scrape(await start(Engine.fake()))
    assert unlimited["forge:step_token_budget",] == 2048
    assert ("forge:expected_step_seconds",) not in unlimited


async def test_waiting_requests_are_counted_by_reason(start):
    server = await start(one_at_a_time())
    name = "vllm:num_requests_waiting_by_reason"
    async with long_request(server):
        ask = asyncio.ensure_future(server.post(PATH, {**LONG, "n": 3}))
        found = await seen(server, (name, "capacity"), (name, "deferred"))
    assert (found[name, "capacity"], found[name, "deferred"]) == (1, 2)
    assert found["vllm:num_requests_waiting",] == 3
    await ask
    found = await scrape(server)
    assert found[name, "capacity"] == found[name, "deferred"] == 0


async def test_rejections_are_counted_by_limit(start):
    limits = QueueLimits(samples=2, prompt_tokens=1000)
    server = await start(one_at_a_time(queue_limits=limits))
    async with long_request(server):
        asks = [asyncio.ensure_future(server.post(PATH, LONG)) for _ in range(5)]
        await seen(server, ("vllm:admission_rejections_total", "max_num_queued_reqs"))
    refused = [answer for status, answer in await asyncio.gather(*asks) if status == 503]
    found = await scrape(server)
    name = "vllm:admission_rejections_total"
    assert found[name, "max_num_queued_reqs"] == len(refused)
    assert found[name, "max_num_queued_tokens"] == 0


async def test_server_state_is_one_of_the_listed_states(start):
    server = await start(Engine.fake())
    states = {key[1]: value for key, value in (await scrape(server)).items()
              if key[0] == "forge:server_state"}  # fmt: skip
    assert [state for state, value in states.items() if value] == ["ready"]
    server.service.stopping = True
    assert (await scrape(server))["forge:server_state", "stopping"] == 1
