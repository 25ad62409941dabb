"""`--engine-process` over HTTP: the engine is killed, and nobody who reads a stream can tell."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time

import pytest

from forge_jax.engine import Engine
from forge_jax.process.client import EngineProcess
from forge_serve.config import ServerConfig
from forge_serve.server import load_engine

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
    """Text, logprobs and usage of a stream."""
    events = await server.events("/v1/completions", body(i))
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    tokens = [t for c in choices if c.get("logprobs") for t in c["logprobs"]["tokens"]]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    usage = chunks[-1]["usage"]
    counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    return "".join(choice["text"] for choice in choices), tokens, counts


async def test_sixty_four_streams_survive_kills(start):
    expected_server = await start(Engine.fake())
    expected = await asyncio.gather(*(text(expected_server, i) for i in range(STREAMS)))

    engine = EngineProcess.fake(step_time_s=0.003)
    server = await start(engine)
    streams = [asyncio.ensure_future(text(server, i)) for i in range(STREAMS)]
    for _ in range(2):
        steps = engine.stats().steps
        async with asyncio.timeout(60):
            while engine.stats().num_running < STREAMS // 2 or engine.stats().steps < steps + 10:
                await asyncio.sleep(0.002)
        assert (await server.get("/health"))[0] == 200
        killed_s = time.monotonic()
        os.kill(engine.pid, signal.SIGKILL)
        status, answer = 200, {}
        while status != 503:
            assert time.monotonic() < killed_s + 1.0, "health notices within a second"
            status, answer = await server.get("/health")
        assert answer == {"status": "recovering"}
        async with asyncio.timeout(60):
            while (await server.get("/health"))[0] != 200:
                await asyncio.sleep(0.01)
    assert not all(stream.done() for stream in streams)
    assert await asyncio.gather(*streams) == expected
    assert (await server.get("/stats"))[1]["restarts"] == 2
    async with server.http.get(server.url + "/metrics") as response:
        assert 'forge:engine_restarts_total{model_name="forge-fake"} 2.0' in await response.text()
    await server.idle()


@pytest.mark.parametrize("separate", [False, True])
def test_the_flag_decides_where_the_engine_runs(separate):
    from forge_jax.config import EngineConfig

    config = ServerConfig(fake=True, engine_process=separate, max_queued_requests=7)
    engine = load_engine(EngineConfig(), config)
    try:
        assert isinstance(engine, EngineProcess) is separate
        assert engine._queue._limits.samples == 7
    finally:
        if isinstance(engine, EngineProcess):
            engine._process.end()
