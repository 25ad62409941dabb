"""The endpoints around generation: models, health, metrics, statistics, and the small adapters."""

from __future__ import annotations

import json
import logging

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forge_jax.engine.thread import Engine
from forge_jax.telemetry.phases import PHASES
from forge_serve.config import ServerConfig
from forge_serve.server.service import Service


async def test_models_lists_the_served_one(server):
    models = await server.openai.models.list()
    assert [model.id for model in models.data] == [server.model]
    assert models.data[0].max_model_len == 1024
    assert (await server.openai.models.retrieve(server.model)).id == server.model


async def test_served_name_can_be_chosen(start):
    server = await start(Engine.fake(), ServerConfig(served_model_name="org/model"))
    assert (await server.openai.models.retrieve("org/model")).id == "org/model"
    answer = await server.openai.completions.create(model="org/model", prompt="a", max_tokens=1)
    assert answer.model == "org/model"
    status, _ = await server.post(
        "/v1/completions", {"model": server.engine.name, "prompt": "a", "max_tokens": 1}
    )
    assert status == 404


async def test_health_is_503_until_an_engine_is_ready_and_after_it_stops(start, listening):
    service = Service(ServerConfig())
    async with listening(service) as url, aiohttp.ClientSession() as http:
        for path in ("/health", "/healthz", "/forge/v1/health"):
            async with http.get(url + path) as response:
                assert response.status == 503
                assert (await response.json())["status"] == "starting"
        async with http.post(url + "/v1/completions", json={"prompt": "a"}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            assert (await response.json())["error"]["code"] == "not_ready"
        async with http.get(url + "/v1/models") as response:
            assert response.status == 503
        async with http.get(url + "/metrics") as response:
            assert response.status == 200
    server = await start(Engine.fake())
    assert await server.get("/health") == (200, {"status": "ready"})
    status, answer = await server.get("/forge/v1/health")
    assert (status, answer["model"]) == (200, server.model)
    server.service.stopping = True
    assert await server.get("/health") == (503, {"status": "stopping"})
    status, _ = await server.post("/v1/completions", {"prompt": "a"})
    assert status == 503


async def test_metrics_count_the_work(start):
    server = await start(Engine.fake(step_time_s=0.002))
    prompt = "the same beginning " * 10
    body = {"prompt": prompt, "max_tokens": 10, "ignore_eos": True, "n": 2}
    for _ in range(2):
        await server.events("/v1/completions", {"prompt": "a", "stream": True})
        await server.post("/v1/completions", body)
    await server.post("/v1/completions", {"prompt": "a", "top_p": 7})
    await server.http.get(server.url + "/made/up/path")
    await server.idle()
    async with server.http.head(server.url + "/metrics") as response:
        assert response.status == 200
    async with server.http.get(server.url + "/metrics") as response:
        assert response.content_type == "text/plain"
        families = list(text_string_to_metric_families(await response.text()))
    samples = {
        (s.name, *sorted((k, v) for k, v in s.labels.items() if k != "engine")): s.value
        for family in families
        for s in family.samples
    }
    model = ("model_name", server.model)
    num_prompt = len(server.engine.tokenizer.encode(prompt))
    stats = server.engine.stats()
    assert samples["vllm:num_requests_running", model] == 0
    assert samples["vllm:num_requests_waiting", model] == 0
    assert samples["vllm:kv_cache_usage_perc", model] == 0
    assert samples["vllm:prompt_tokens_total", model] == stats.prompt_tokens > 2 * num_prompt
    assert samples["vllm:generation_tokens_total", model] == stats.generation_tokens
    assert samples["vllm:prefix_cache_queries_total", model] > 0
    assert samples["vllm:prefix_cache_hits_total", model] > 0
    assert samples["vllm:num_preemptions_total", model] == 0
    assert samples["forge:compilations_after_ready_total", model] == 0
    assert samples["vllm:time_to_first_token_seconds_count", model] == 4
    assert samples["vllm:e2e_request_latency_seconds_count", model] == 4
    assert samples["vllm:inter_token_latency_seconds_count", model] > 0
    assert samples["vllm:request_prompt_tokens_sum", model] >= 2 * num_prompt
    assert samples["vllm:request_generation_tokens_sum", model] >= 40
    phases = {family.name: family for family in families}["forge:step_phase_seconds"]
    assert phases.type == "histogram"
    without = {"draft", "mask"}  # neither drafts nor grammars
    for phase in without:
        assert samples["forge:step_phase_seconds_count", model, ("phase", phase)] == 0
    for phase in set(PHASES) - without:
        labels = model, ("phase", phase)
        count = samples["forge:step_phase_seconds_count", *labels]
        assert count == samples["forge:step_phase_seconds_bucket", ("le", "+Inf"), *labels] > 0
        assert count == stats.step_phases[phase].count
        assert samples["forge:step_phase_seconds_sum", *labels] > 0
    finished = [samples["vllm:request_success_total", ("finished_reason", r), model]
                for r in ("stop", "length")]  # fmt: skip
    assert sum(finished) == 6
    http = {key[2][1:] + key[1][1:]: value for key, value in samples.items()
            if key[0] == "http_requests_total"}  # fmt: skip
    assert http["/v1/completions", "200"] == 4
    assert http["/v1/completions", "400"] == 1
    assert http["/*", "404"] == 1


async def test_stats_are_the_engines(server):
    status, stats = await server.get("/stats")
    assert status == 200
    assert stats["state"] == "ready"
    assert stats["num_used_blocks"] == 0
    assert set(stats["step_phases"]) == set(PHASES)
    assert stats["step_phases"]["read"]["total_s"] == 0.0


@pytest.mark.parametrize(
    ("path", "limit"), [("/generate", "max_tokens"), ("/v1/generate", "max_new_tokens")]
)
async def test_small_adapters_map_requests_and_answers(server, path, limit):
    body = {"prompt": "Hello", limit: 7, "temperature": 0.5, "seed": 1, "ignore_eos": True}
    status, answer = await server.post(path, body)
    assert status == 200
    counts = {"prompt_tokens", "completion_tokens", "generated_tokens", "latency_ms"}
    assert set(answer) == {"text", "finish_reason", "request_id", "model", *counts}
    assert answer["completion_tokens"] == answer["generated_tokens"] == 7
    assert answer["finish_reason"] == "length"
    *events, done = await server.events(path, {**body, "stream": True})
    assert done == "[DONE]"
    assert "".join(json.loads(event)["text"] for event in events) == answer["text"]
    status, answer = await server.post(path, {**body, "n": 2})
    assert (status, answer["error"]["param"]) == (400, "n")


async def test_one_line_is_logged_per_request(start, caplog):
    caplog.set_level(logging.INFO, "forge_serve.requests")
    for config, lines in ((ServerConfig(), 2), (ServerConfig(request_log=False), 0)):
        caplog.clear()
        server = await start(Engine.fake(), config)
        await server.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
        await server.post("/v1/completions", {"prompt": "a", "top_p": 7})
        await server.get("/health")
        logged = [r.getMessage() for r in caplog.records if r.name == "forge_serve.requests"]
        assert len(logged) == lines
    assert caplog.records == [] or lines == 0
