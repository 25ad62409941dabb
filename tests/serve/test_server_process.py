"""`--engine-process` over HTTP: killing the engine is invisible to the streams' clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forge_jax.engine.process import launcher
from forge_jax.engine.process.client import EngineProcess
from forge_jax.engine.process.group import EngineGroup
from forge_jax.engine.thread import Engine
from forge_jax.errors import EngineError
from forge_serve.config import ServerConfig
from forge_serve.server.process import load_engine

STREAMS = 64


def body(i: int) -> dict:
    return {
        "prompt": f"story {i} " * (1 + i % 9),
        "max_tokens": 60 + i,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": i,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 1 if i % 5 == 0 else None,
    }


async def text(server, i: int) -> tuple[str, list, dict]:
    events = await server.events("/v1/completions", body(i))
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    tokens = [t for c in choices if c.get("logprobs") for t in c["logprobs"]["tokens"]]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    usage = chunks[-1]["usage"]
    counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    return "".join(choice["text"] for choice in choices), tokens, counts


DIES = """
import os, signal
from forge_jax.engine.process import worker
from forge_jax.testing import FakeDevice

dispatch = FakeDevice.dispatch

def dispatch_or_die(self, plan):
    if self.num_steps == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return dispatch(self, plan)

FakeDevice.dispatch = dispatch_or_die
worker.main()
"""


@pytest.fixture
def launches(monkeypatch) -> threading.Semaphore:
    """Limit how many successors may start; further ones wait."""
    allowed, launch = threading.Semaphore(0), launcher.launch

    def launch_when_allowed(*args):
        assert allowed.acquire(timeout=60)
        return launch(*args)

    monkeypatch.setattr(launcher, "launch", launch_when_allowed)
    return allowed


async def test_sixty_four_streams_survive_kills(start, launches, monkeypatch):
    """Two processes die after 20 steps, before any stream of 60 tokens can end."""
    expected_server = await start(Engine.fake())
    expected = await asyncio.gather(*(text(expected_server, i) for i in range(STREAMS)))

    worker = launcher.WORKER
    monkeypatch.setattr(launcher, "WORKER", ("-c", DIES))
    engine = EngineProcess.fake()
    server = await start(engine)
    assert (await server.get("/health"))[0] == 200
    streams = [asyncio.ensure_future(text(server, i)) for i in range(STREAMS)]
    for deaths in (1, 2):
        async with asyncio.timeout(60):
            while engine.stats().restarts < deaths or len(engine.streams) < STREAMS:
                await asyncio.sleep(0.01)
        assert await server.get("/health") == (503, {"status": "recovering"})
        assert not any(stream.done() for stream in streams)
        if deaths == 2:
            monkeypatch.setattr(launcher, "WORKER", worker)
        launches.release()
    assert await asyncio.gather(*streams) == expected
    assert (await server.get("/health"))[0] == 200
    assert (await server.get("/stats"))[1]["restarts"] == 2
    async with server.http.get(server.url + "/metrics") as response:
        found = 'forge:engine_restarts_total{engine="0",model_name="forge-fake"} 2.0'
        assert found in await response.text()
    await server.idle()


async def test_server_reports_each_engine_of_a_group(start, monkeypatch):
    server = await start(await asyncio.to_thread(EngineGroup.fake, 2))
    shared = "Once upon a time, there was a dog with a very long story. " * 9
    cached = []
    for end in ("He", "She", "They"):
        _, answer = await server.post("/v1/completions", {"prompt": shared + end, "max_tokens": 4})
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and min(cached[1:]) > 400  # all on the engine with the prefix
    several = {"prompt": ["a", "b"], "n": 2, "max_tokens": 4}
    _, answer = await server.post("/v1/completions", several)
    assert len(answer["choices"]) == 4

    assert await server.get("/health") == (200, {"status": "ready", "engines": ["ready"] * 2})
    async with asyncio.timeout(5):
        while server.engine.stats().generation_tokens < 28:  # statistics arrive a little later
            await asyncio.sleep(0.01)
    _, stats = await server.get("/stats")
    generated = [each["generation_tokens"] for each in stats["engines"]]
    assert all(generated) and sum(generated) == stats["generation_tokens"] == 28
    assert (await server.get("/server_info"))[1]["dp_size"] == 2
    _, loads = await server.get("/v1/loads")
    assert [each["dp_rank"] for each in loads["loads"]] == [0, 1]
    async with server.http.get(server.url + "/metrics") as response:
        text = await response.text()
    series: dict[str, dict[str | None, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            engine = sample.labels.get("engine")
            of_name = series.setdefault(sample.name, {})
            of_name[engine] = of_name.get(engine, 0.0) + sample.value
    for name, values in series.items():
        if name.startswith("vllm:") and not name.endswith("_created"):
            shared_by_all = name == "vllm:admission_rejections_total"
            assert set(values) == ({None} if shared_by_all else {"0", "1"}), name
    tokens = series["vllm:generation_tokens_total"]
    assert list(tokens.values()) == generated
    assert series["vllm:request_generation_tokens_sum"] == tokens
    assert sum(series["vllm:request_success_total"].values()) == 7
    assert series["forge:engine_serving"] == {"0": 1.0, "1": 1.0}

    def refuse(*_):
        raise EngineError("planted")

    monkeypatch.setattr(launcher, "launch", refuse)
    monkeypatch.setattr("forge_jax.engine.process.backoff.FIRST_S", 1e-3)
    os.kill(server.engine.engines[0].pid, signal.SIGKILL)
    expected = 200, {"status": "serving", "engines": ["unavailable", "ready"]}
    async with asyncio.timeout(10):
        while await server.get("/health") != expected:
            await asyncio.sleep(0.01)
    async with server.http.get(server.url + "/metrics") as response:
        text = await response.text()
    assert 'forge:engine_serving{engine="0",model_name="forge-fake"} 0.0' in text


@pytest.mark.parametrize(
    ("flags", "kind"),
    [({}, Engine), ({"engine_process": True}, EngineProcess), ({"data_parallel": 2}, EngineGroup)],
)
def test_flags_decide_where_the_engine_runs(flags, kind):
    from forge_jax.config import EngineConfig

    config = ServerConfig(fake=True, max_queued_requests=7, **flags)
    engine = load_engine(EngineConfig(), config)
    try:
        assert type(engine) is kind
        assert engine.streams.queue_limits.samples == 7
    finally:
        asyncio.run(engine.stop())
