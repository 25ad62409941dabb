"""Streams under failures: disconnects, stalled readers, failing engines, split characters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from asyncio.selector_events import _SelectorSocketTransport as Transport
from collections.abc import Iterator
from typing import Any

import pytest

from forge_jax.config import EngineConfig
from forge_jax.engine.thread import Engine
from forge_jax.testing import core_of
from forge_serve.http import sse as event_stream
from forge_serve.http.sse import EventStream
from forge_serve.http.timeouts import Timeouts
from forge_serve.openai.serializers import CompletionSerializer

HIGH_WATER = 64 * 1024  # bytes at which asyncio's transports pause their protocol
STEP_S = 0.03
LONG = {"prompt": "Hello", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture
def writes(monkeypatch) -> list[bytes]:
    """Record what is written to any connection, write by write."""
    seen: list[bytes] = []
    write, writelines = Transport.write, Transport.writelines
    monkeypatch.setattr(Transport, "write", lambda self, d: (seen.append(d), write(self, d))[1])
    monkeypatch.setattr(
        Transport, "writelines", lambda self, ds: (seen.append(b"".join(ds)), writelines(self, ds))
    )
    return seen


@pytest.fixture
def buffered(monkeypatch) -> list[int]:
    """Record the bytes in a connection's transport after each write of an event stream."""
    seen: list[int] = []
    write = EventStream._write

    def spy(stream: EventStream, data: bytes) -> None:
        write(stream, data)
        seen.append(stream._transport.get_write_buffer_size())

    monkeypatch.setattr(EventStream, "_write", spy)
    return seen


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


async def test_each_step_is_one_write(start, writes):
    server = await start(Engine.fake(step_time_s=0.01))
    body = {"prompt": ["a", "b"], "n": 4, "max_tokens": 20, "ignore_eos": True, "stream": True}
    await server.events("/v1/completions", {**body, "return_token_ids": True})
    sent = [data for data in writes if b"data: " in data]
    assert sum(data.count(b"data: ") for data in sent) == 2 * 4 * 20 + 1
    assert len(sent) <= 25
    assert any(data.count(b"data: ") == 8 for data in sent), "all samples of all prompts"


async def test_last_step_and_end_are_one_write(start, writes):
    server = await start(Engine.fake(step_time_s=0.005))
    await server.events("/v1/completions", {**LONG, "max_tokens": 3, "stream": True, "seed": 2})
    (last,) = [data for data in writes if b"[DONE]" in data]
    assert b'"finish_reason":"length"' in last and last.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["one", ["one", "two"]])
async def test_client_disconnect_frees_its_blocks_within_two_steps(start, stream, prompt):
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
    # Two steps after the server notices it, which may be during the step in which it happens.
    assert server.engine.stats().steps - before <= 3
    assert _aborted(server) == (2 if isinstance(prompt, str) else 4)
    assert await _statuses(server) == {"499": 1}


async def test_disconnect_found_while_writing_is_logged_as_one(start, monkeypatch, caplog):
    caplog.set_level("INFO", "forge_serve.requests")

    def gone(stream: EventStream, data: bytes) -> None:
        raise ConnectionResetError("the other end has closed")

    monkeypatch.setattr(EventStream, "_write", gone)
    server = await start(Engine.fake())
    response = await server.http.post(server.url + "/v1/completions", json={**LONG, "stream": True})
    response.close()
    await server.idle()
    assert await _statuses(server) == {"499": 1}
    assert "/v1/completions 499 " in caplog.text and " 200 " not in caplog.text


async def test_slow_reader_gets_everything_in_bounded_memory(start, buffered, monkeypatch):
    monkeypatch.setattr(event_stream, "PIECE", 16)
    server = await start(Engine.fake(max_model_len=8192), send_buffer=4096)
    body = {**LONG, "max_tokens": 2000, "n": 2, "logprobs": 5, "seed": 3}
    with _reader() as reader:
        await _post(reader, server, {**body, "stream": True})
        async with asyncio.timeout(60):
            while server.engine.stats().generation_tokens < 4000:
                await asyncio.sleep(0.01)
        await server.idle()
        events = await _read_stream(reader, pause_s=0.0005)
    assert events[-1] == "[DONE]" and len(events) > 2000
    texts = ["", ""]
    for event in events[:-1]:
        (choice,) = json.loads(event)["choices"]
        texts[choice["index"]] += choice["text"]
    _, whole = await server.post("/v1/completions", body)
    assert texts == [choice["text"] for choice in whole["choices"]]
    largest = max(map(len, map(str.encode, events)))
    assert 4096 < max(buffered) <= HIGH_WATER + 16 * (largest + 16)
    assert await _statuses(server, 2) == {"200": 2}


async def test_failure_reaches_a_slow_reader_after_all_earlier_events(start, monkeypatch):
    server = await start(Engine.fake(max_model_len=8192), send_buffer=4096)
    device = core_of(server.engine).device
    monkeypatch.setattr(device, "_fault", lambda scheduled: scheduled.num_output == 1500)
    body = {**LONG, "max_tokens": 2000, "stream": True, "return_token_ids": True, "logprobs": 5}
    with _reader() as reader:
        await _post(reader, server, body)
        async with asyncio.timeout(60):
            while server.engine.stats().generation_tokens < 1500:
                await asyncio.sleep(0.01)
        *chunks, last = await _read_stream(reader)
    assert json.loads(last)["error"]["code"] == "numerical_error"
    assert sum(len(json.loads(c)["choices"][0]["token_ids"]) for c in chunks) == 1500


async def test_stalled_reader_that_leaves_ends_its_request(start):
    engine = Engine.fake(max_model_len=8192, step_time_s=0.002)
    server = await start(engine, send_buffer=4096)
    with _reader() as reader:
        await _post(reader, server, {**LONG, "max_tokens": 8000, "stream": True, "logprobs": 20})
        async with asyncio.timeout(60):
            while server.engine.stats().generation_tokens < 300:
                await asyncio.sleep(0.01)
    before = server.engine.stats().steps
    await server.idle()
    assert server.engine.stats().steps - before <= 20, "not to the end of 8000"
    assert await _statuses(server) == {"499": 1}


async def test_http_1_0_client_gets_plain_events(server):
    with _reader() as reader:
        await _post(reader, server, {**LONG, "max_tokens": 5, "stream": True}, version="1.0")
        data = b""
        async with asyncio.timeout(60):
            while more := await asyncio.get_running_loop().sock_recv(reader, 65536):
                data += more
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert body.startswith(b"data: {") and body.endswith(b"\n\ndata: [DONE]\n\n")


async def test_stalled_reader_times_out(start, caplog):
    caplog.set_level("INFO", "forge_serve.requests")
    # Slow enough that the client is dropped before the engine is done.
    engine = Engine.fake(max_model_len=8192, step_time_s=0.002)
    server = await start(engine, timeouts=Timeouts(write_stall_s=0.2), send_buffer=4096)
    with _reader() as reader:
        stalled = {**LONG, "max_tokens": 3000, "n": 2, "stream": True, "logprobs": 20}
        await _post(reader, server, stalled)
        other = await server.post("/v1/completions", {"prompt": "a", "max_tokens": 5})
        assert other[0] == 200, "others are served meanwhile"
        await server.idle(timeout_s=20)
        async with asyncio.timeout(60):
            while _aborted(server) != 2:
                await asyncio.sleep(0.01)
        assert await _statuses(server, 2) == {"200": 1, "499": 1}
        assert "/v1/completions 499 " in caplog.text


@pytest.mark.parametrize("stream", [True, False])
async def test_mid_stream_failure_is_an_error(start, monkeypatch, stream):
    server = await start(Engine.fake())
    device = core_of(server.engine).device
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


async def test_library_panic_costs_only_its_request(start, monkeypatch):
    class PanicException(BaseException):
        pass

    def panics(*_, **__):
        raise PanicException("a secret")

    server = await start(Engine.fake())
    assert server.engine.tokenizer is not None
    with monkeypatch.context() as patch:  # on the event loop
        patch.setattr(server.engine.tokenizer, "encode", panics)
        status, answer = await server.post("/tokenize", {"prompt": "a"})
    assert status == 500 and answer["error"]["code"] == "internal_error"
    assert "secret" not in answer["error"]["message"]
    with monkeypatch.context() as patch:  # on the engine's thread
        patch.setattr(core_of(server.engine), "add", panics)
        status, answer = await server.post("/v1/completions", {"prompt": "a"})
    assert status == 503 and "secret" not in answer["error"]["message"]
    status, _ = await server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert status == 200, "the next request does not suffer"


@pytest.mark.parametrize("failing", [3, 20], ids=["in the middle", "the last"])
async def test_unserializable_event_is_an_error_of_its_request(start, monkeypatch, failing):
    server = await start(Engine.fake(step_time_s=0.002))
    events = CompletionSerializer.events

    def broken(
        serializer: CompletionSerializer, choice: int, delta: Any, usage: Any = None
    ) -> bytes:
        made = events(serializer, choice, delta, usage)
        seen.append(delta)
        if len(seen) == failing:
            raise ValueError("a secret")
        return made

    seen: list[Any] = []
    monkeypatch.setattr(CompletionSerializer, "events", broken)
    body = {**LONG, "max_tokens": 20, "stream": True}
    *chunks, last = await server.events("/v1/completions", body)
    assert json.loads(last)["error"]["code"] == "internal_error" and "secret" not in last
    assert all("choices" in json.loads(chunk) for chunk in chunks)
    await server.idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_failing_engine_ends_its_requests(start, monkeypatch, stream):
    server = await start(Engine.fake(step_time_s=0.01))
    core, tick = core_of(server.engine), core_of(server.engine).tick

    def failing(before_wait: Any) -> Any:
        if core.num_steps > 8:
            raise RuntimeError("device /dev/secret fell off")
        return tick(before_wait)

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


async def test_many_streams_are_served_at_once(start):
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


@contextlib.contextmanager
def _reader() -> Iterator[socket.socket]:
    """Return a client's socket with almost no buffer."""
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.setblocking(False)
        yield reader


async def _post(
    reader: socket.socket, server: Any, body: dict[str, Any], *, version: str = "1.1"
) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(reader, ("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    data = json.dumps(body)
    head = (
        f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    await loop.sock_sendall(reader, (head + data).encode())


async def _read_stream(reader: socket.socket, *, pause_s: float = 0.0) -> list[str]:
    """Return the data of each event of a chunked answer, read to its end."""
    loop, data = asyncio.get_running_loop(), b""
    async with asyncio.timeout(60):
        while not data.endswith(b"\r\n0\r\n\r\n"):
            data += await loop.sock_recv(reader, 4096)
            await asyncio.sleep(pause_s)
    head, _, rest = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            break
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]
    events = body.decode().removesuffix("\n\n").split("\n\n")
    return [event.removeprefix("data: ") for event in events]


async def _statuses(server: Any, num_requests: int = 1) -> dict[str, float]:
    """Return completions by status, once there are `num_requests`."""
    async with asyncio.timeout(60):
        while True:
            counts = {
                sample.labels["code"]: sample.value
                for metric in server.service.metrics.registry.collect()
                for sample in metric.samples
                if sample.name == "http_requests_total"
                and sample.labels["handler"] == "/v1/completions"
            }
            if sum(counts.values()) >= num_requests:
                return counts
            await asyncio.sleep(0.01)


def _aborted(server: Any) -> float | None:
    labels = {"model_name": server.model, "engine": "0", "finished_reason": "abort"}
    return server.service.metrics.registry.get_sample_value("vllm:request_success_total", labels)
