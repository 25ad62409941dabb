"""Streams on a bad day: clients that leave or stop reading, engines that fail, split characters."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from forge_jax.config import EngineConfig
from forge_jax.engine import Engine
from forge_serve import app

STEP_S = 0.03
LONG = {"prompt": "Hello", "max_tokens": 900, "ignore_eos": True}


async def test_events_never_split_a_character(server):
    body = {**LONG, "max_tokens": 300, "stream": True, "return_token_ids": True, "seed": 1}
    events = await server.events("/v1/completions", body)
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    ids = [id for choice in choices for id in choice["token_ids"]]
    text = "".join(choice["text"] for choice in choices)
    assert text == server.engine.tokenizer.decode(ids)
    raw = b"".join(map(server.engine.tokenizer.token_bytes, ids))
    assert any(b >= 0x80 for b in raw), "the fake device writes characters of several bytes"
    assert any(not choice["text"] for choice in choices), "some tokens are a part of a character"


async def test_a_step_is_one_write(start, monkeypatch):
    writes: list[bytes] = []
    write = app._write

    async def spy(response: Any, data: bytes) -> None:
        writes.append(data)
        await write(response, data)

    monkeypatch.setattr(app, "_write", spy)
    server = await start(Engine.fake(step_time_s=0.01))
    body = {"prompt": ["a", "b"], "n": 4, "max_tokens": 20, "ignore_eos": True, "stream": True}
    await server.events("/v1/completions", {**body, "return_token_ids": True})
    events = sum(data.count(b"data: ") for data in writes)
    assert events == 2 * 4 * 20 + 1
    assert len([data for data in writes if data]) <= 25


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["one", ["one", "two"]])
async def test_a_client_that_leaves_frees_its_blocks_within_two_steps(start, stream, prompt):
    server = await start(Engine.fake(step_time_s=STEP_S))
    body = {**LONG, "prompt": prompt, "n": 2, "stream": stream}
    if stream:
        response = await server.http.post(server.url + "/v1/completions", json=body)
        await response.content.readany()
        leave = response.close
    else:
        task = asyncio.create_task(server.post("/v1/completions", body))
        await asyncio.sleep(5 * STEP_S)
        leave = task.cancel
    assert server.engine.stats().num_used_blocks > 0
    leave()
    before = server.engine.stats().steps
    await server.idle()
    # Two steps after the server knows of it, which may be during the step it happens in.
    assert server.engine.stats().steps - before <= 3
    assert _aborted(server) == (2 if isinstance(prompt, str) else 4)
    assert await _statuses(server) == {"499": 1}


async def test_a_client_that_is_found_gone_while_writing_counts_as_left(start, monkeypatch, caplog):
    caplog.set_level("INFO", "forge_serve.requests")

    async def gone(response: Any, data: bytes) -> None:
        raise ConnectionResetError("the other end has closed")

    monkeypatch.setattr(app, "_write", gone)
    server = await start(Engine.fake())
    response = await server.http.post(server.url + "/v1/completions", json={**LONG, "stream": True})
    response.close()
    await server.idle()
    assert await _statuses(server) == {"499": 1}
    assert "status=499" in caplog.text and "status=200" not in caplog.text


async def test_a_client_that_stops_reading_is_given_up(start, monkeypatch, caplog):
    caplog.set_level("INFO", "forge_serve.requests")
    monkeypatch.setattr(app, "WRITE_STALL_S", 0.2)
    # Slow enough that the engine cannot be done before the client is given up.
    engine = Engine.fake(max_model_len=8192, step_time_s=0.002)
    server = await start(engine, send_buffer=4096)
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(reader, ("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        body = json.dumps({**LONG, "max_tokens": 3000, "n": 2, "stream": True, "logprobs": 20})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(reader, (head + body).encode())
        other = await server.post("/v1/completions", {"prompt": "a", "max_tokens": 5})
        assert other[0] == 200, "others are served meanwhile"
        await server.idle(timeout_s=20)
        async with asyncio.timeout(5):
            while _aborted(server) != 2:
                await asyncio.sleep(0.01)
        assert await _statuses(server, 2) == {"200": 1, "499": 1}
        assert "status=499" in caplog.text


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_fails_in_the_middle_is_an_error(start, monkeypatch, stream):
    server = await start(Engine.fake())
    device = server.engine._core._device
    monkeypatch.setattr(device, "_fault", lambda scheduled: scheduled.num_output == 5)
    body = {**LONG, "stream": stream}
    if stream:
        *chunks, last = await server.events("/v1/completions", body)
        error = json.loads(last)["error"]
        assert chunks and all("choices" in json.loads(chunk) for chunk in chunks)
    else:
        status, answer = await server.post("/v1/completions", body)
        assert status == 500
        error = answer["error"]
    assert error["code"] == "numerical_error"
    monkeypatch.undo()
    status, _ = await server.post("/v1/completions", {"prompt": "a"})
    assert status == 200, "the next request does not suffer"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_fails_ends_its_requests(start, monkeypatch, stream):
    server = await start(Engine.fake(step_time_s=0.01))
    core, tick = server.engine._core, server.engine._core.tick

    def failing() -> Any:
        if core.num_steps > 8:
            raise RuntimeError("device /dev/secret fell off")
        return tick()

    monkeypatch.setattr(core, "tick", failing)
    body = {**LONG, "stream": stream}
    if stream:
        *_, last = await server.events("/v1/completions", body)
        error = json.loads(last)["error"]
    else:
        status, answer = await server.post("/v1/completions", body)
        assert status == 503
        error = answer["error"]
    assert error["code"] == "engine_unavailable"
    assert "secret" not in error["message"]
    status, answer = await server.post("/v1/completions", body)
    assert status == 503
    status, answer = await server.get("/health")
    assert (status, answer) == (503, {"status": "failed"})


async def test_many_streams_at_once(start):
    config = EngineConfig.from_options(max_num_seqs=16)
    server = await start(Engine.fake(config=config))

    async def one(i: int) -> str:
        body = {"prompt": f"client {i}", "max_tokens": 40, "seed": i, "ignore_eos": True}
        events = await server.events("/v1/completions", {**body, "stream": True})
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        _, answer = await server.post("/v1/completions", body)
        assert text == answer["choices"][0]["text"]
        return text

    texts = await asyncio.gather(*(one(i) for i in range(40)))
    assert len(texts) == 40
    await server.idle()


async def _statuses(server: Any, num_requests: int = 1) -> dict[str, float]:
    """How many completions were answered with each status, once there are so many."""
    async with asyncio.timeout(5):
        while True:
            counts = {
                sample.labels["status"]: sample.value
                for metric in server.service.metrics.registry.collect()
                for sample in metric.samples
                if sample.name == "http_requests_total"
                and sample.labels["handler"] == "/v1/completions"
            }
            if sum(counts.values()) >= num_requests:
                return counts
            await asyncio.sleep(0.01)


def _aborted(server: Any) -> float | None:
    labels = {"model_name": server.model, "finished_reason": "abort"}
    return server.service.metrics.registry.get_sample_value("forge:request_success_total", labels)
