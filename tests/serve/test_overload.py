"""Overload: full queues, deadlines, little memory, slow and idle clients."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import statistics
import time

import aiohttp
import psutil
import pytest

from benchmarks.serving_process import started
from forge_jax.engine.streams import QueueLimits
from forge_jax.engine.thread import Engine
from forge_jax.sampling_params import SamplingParams
from forge_serve.config import ServerConfig
from forge_serve.http import memory
from forge_serve.http.memory import MemoryGuard
from forge_serve.http.timeouts import Timeouts
from forge_serve.server import process as server

LONG = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
SHORT = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}


async def test_full_queue_rejects_with_retry_after(start):
    engine = Engine.fake(step_time_s=0.02, queue_limits=QueueLimits(samples=4))
    server = await start(engine)
    waiting = [
        engine.submit([1], SamplingParams(max_tokens=50), request_id=f"w{i}") for i in range(4)
    ]
    async with server.http.post(server.url + "/v1/completions", json=SHORT) as refused:
        error = (await refused.json())["error"]
        assert refused.status == 503 and 1 <= int(refused.headers["Retry-After"]) <= 60
    assert (error["type"], error["code"]) == ("server_error", "overloaded")
    assert "4 samples" in error["message"]
    await anext(waiting[0])  # requests with a token no longer wait
    await asyncio.sleep(0.05)
    assert (await server.post("/v1/completions", SHORT))[0] == 200


async def test_waiting_tokens_are_limited_except_for_a_lone_request(start):
    engine = Engine.fake(step_time_s=0.02, queue_limits=QueueLimits(prompt_tokens=10))
    server = await start(engine)
    stream = engine.submit([1] * 50, SamplingParams(max_tokens=2), request_id="w")
    status, answer = await server.post("/v1/completions", SHORT)
    assert status == 503 and "50 prompt tokens" in answer["error"]["message"]
    _ = [deltas async for deltas in stream]
    assert (await server.post("/v1/completions", SHORT))[0] == 200


def test_retry_after_follows_the_pace_of_the_queue():
    from forge_jax.engine.streams import WaitingQueue
    from forge_jax.errors import OverloadedError

    now_s = 0.0
    queue = WaitingQueue(QueueLimits(samples=10), lambda: now_s)
    for i in range(10):
        queue.push(f"r{i}", 1, 100)
    for i in range(5):
        now_s += 2.0
        queue.pop(f"r{i}")
        queue.push(f"n{i}", 1, 100)
    with pytest.raises(OverloadedError) as refused:
        queue.push("more", 1, 100)
    # 500 tokens left within 8 s of the first that left; 1,000 wait.
    assert refused.value.retry_after_s == pytest.approx(16.0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["request", "server"])
async def test_deadline_ends_the_request(start, stream, where):
    limit = 0.15 if where == "server" else None
    server = await start(Engine.fake(step_time_s=0.01), ServerConfig(request_timeout_s=limit))
    body = {**LONG, "stream": stream, **({"timeout": 0.15} if where == "request" else {})}
    if stream:
        events = await server.events("/v1/completions", body)
        assert len(events) > 3 and "[DONE]" not in events
        error = json.loads(events[-1])["error"]
    else:
        status, answer = await server.post("/v1/completions", body)
        assert status == 504
        error = answer["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    assert "0.15 s" in error["message"]
    await server.idle()
    assert (await server.post("/v1/completions", SHORT))[0] == 200


async def test_servers_timeout_caps_the_clients(start):
    server = await start(Engine.fake(step_time_s=0.01), ServerConfig(request_timeout_s=0.1))
    assert (await server.post("/v1/completions", {**LONG, "timeout": 3600}))[0] == 504


@pytest.mark.parametrize("timeout", [0, -1, "x", True, [1]])
async def test_invalid_deadline_is_rejected(server, timeout):
    status, answer = await server.post("/v1/completions", {**SHORT, "timeout": timeout})
    assert status == 400 and answer["error"]["param"] == "timeout"


async def test_body_that_does_not_arrive_times_out(start):
    server = await start(Engine.fake(), timeouts=Timeouts(body_s=0.1))
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    )
    async with asyncio.timeout(60):
        answer = await reader.readuntil(b"}}")
    assert answer.startswith(b"HTTP/1.1 408") and b"request_timeout" in answer
    assert b"Connection: close" in answer
    writer.close()
    await writer.wait_closed()


# ---- memory --------------------------------------------------------------------------------------


async def test_requests_are_rejected_while_memory_is_short(start, caplog):
    server = await start(Engine.fake())
    in_use = 0.96
    server.service.memory._in_use = lambda: in_use
    server.service.memory.check()
    status, answer = await server.post("/v1/completions", SHORT)
    assert status == 503 and "memory" in answer["error"]["message"]
    assert "rejecting requests" in caplog.text
    in_use = 0.9
    server.service.memory.check()
    assert (await server.post("/v1/completions", SHORT))[0] == 200


async def test_newest_waiting_request_is_shed_first(start):
    server = await start(Engine.fake(step_time_s=0.05))
    guard = server.service.memory
    posts = [asyncio.ensure_future(server.post("/v1/completions", LONG | {"max_tokens": 2}))]
    await asyncio.sleep(0.02)
    posts.append(asyncio.ensure_future(server.post("/v1/completions", LONG | {"max_tokens": 2})))
    await asyncio.sleep(0.02)
    guard._in_use = lambda: 0.99
    guard.check()
    status, answer = await posts[1]
    assert status == 503 and answer["error"]["code"] == "overloaded"
    guard._in_use = lambda: 0.5
    guard.check()
    assert (await posts[0])[0] == 200
    assert guard.num_shed == 1
    await server.idle()


def test_memory_thresholds_act_in_order(monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(memory, "give_back_freed_memory", lambda: done.append("give back"))
    in_use = 0.0
    guard = MemoryGuard(0.9, lambda: bool(done.append("shed")) or True, lambda: in_use)

    def at(value: float) -> list[str]:
        nonlocal in_use
        in_use = value
        done.clear()
        guard._gave_back_s = -1e9
        guard.check()
        return done.copy()

    assert at(0.89) == at(0.93) == []
    assert at(0.945) == ["give back"]
    assert at(0.98) == ["give back", "shed"]
    in_use = memory.host_memory_in_use()
    assert 0.0 < in_use < 1.0


# ---- signals -------------------------------------------------------------------------------------


async def test_second_signal_ends_every_stream_with_an_error():
    sock = server.bind("127.0.0.1", 0)
    url = "http://{}:{}".format(*sock.getsockname())
    serving = asyncio.create_task(
        server._serve(sock, ServerConfig(), lambda: Engine.fake(step_time_s=0.02))
    )
    async with aiohttp.ClientSession() as http:
        async with asyncio.timeout(60):
            while True:
                async with http.get(url + "/health") as health:
                    if health.status == 200:
                        break
                await asyncio.sleep(0.01)
        body = {**LONG, "stream": True}
        streams = [await http.post(url + "/v1/completions", json=body) for _ in range(8)]
        for response in streams:
            await response.content.readany()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert not serving.done(), "they may finish"
        os.kill(os.getpid(), signal.SIGTERM)
        for response in streams:
            text = (await response.read()).decode()
            last = json.loads(text.rstrip().rpartition("\n\n")[2].removeprefix("data: "))
            assert last["error"]["code"] == "engine_unavailable"
    async with asyncio.timeout(60):
        await serving


# ---- connections ---------------------------------------------------------------------------------


async def test_idle_connections_are_cheap_and_block_no_request(start):
    server.raise_file_limit()
    running = await start(Engine.fake())
    host, port = running.url.removeprefix("http://").split(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(400)]
    assert (await running.post("/v1/completions", SHORT))[0] == 200
    for reader, writer in idle[::40]:
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    for _, writer in idle:
        writer.close()
        await writer.wait_closed()


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_ten_thousand_idle_connections_are_cheap():
    """Runs in a separate process, so that only its memory is counted."""
    count = 10_000
    server.raise_file_limit()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < count + 100:
        pytest.skip("the system allows fewer open files")
    with started(["--fake"]) as process:
        host, port = process.url.removeprefix("http://").split(":")
        child = psutil.Process(process.pid)
        body = {"prompt": "a", "max_tokens": 32, "ignore_eos": True}

        async def first_token_ms(http: aiohttp.ClientSession) -> float:
            times = []
            for _ in range(200):
                begin_s = time.perf_counter()
                async with http.post(process.url + "/v1/completions", json=body) as response:
                    assert response.status == 200
                    await response.read()
                times.append(1e3 * (time.perf_counter() - begin_s))
            return statistics.median(times)

        async with aiohttp.ClientSession() as http:
            alone_ms = await first_token_ms(http)
            rss = child.memory_info().rss
            idle = []
            for _ in range(count // 100):
                opening = (asyncio.open_connection(host, int(port)) for _ in range(100))
                idle += await asyncio.gather(*opening)
            per_connection = (child.memory_info().rss - rss) / count
            among_ms = await first_token_ms(http)
        print(f"{per_connection:.0f} bytes a connection, {alone_ms:.2f} and {among_ms:.2f} ms")
        assert per_connection < 40 * 1024
        assert among_ms < 2.0 * alone_ms
        for reader, writer in idle[:: count // 50]:
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, writer in idle:
            writer.transport.abort()
