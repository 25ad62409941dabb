"""`--engine-process` over HTTP: killing the engine is invisible to the streams' clients."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from forge_jax.engine.process import launcher
from forge_jax.engine.process.client import EngineProcess
from forge_jax.engine.thread import Engine
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
        assert 'forge:engine_restarts_total{model_name="forge-fake"} 2.0' in await response.text()
    await server.idle()


@pytest.mark.parametrize("separate", [False, True])
def test_flag_decides_where_the_engine_runs(separate):
    from forge_jax.config import EngineConfig

    config = ServerConfig(fake=True, engine_process=separate, max_queued_requests=7)
    engine = load_engine(EngineConfig(), config)
    try:
        assert isinstance(engine, EngineProcess) is separate
        assert engine.streams.queue_limits.samples == 7
    finally:
        asyncio.run(engine.stop())
