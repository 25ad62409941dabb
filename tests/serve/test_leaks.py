"""Leaks: after thousands of requests, a server holds only what it held before."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import re
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import aiohttp
import psutil
import pytest

from forge_jax.config import EngineConfig
from forge_jax.engine.process.client import EngineProcess
from forge_jax.engine.thread import Engine

CLIENTS = 24
WARM_UP = 0.3  # share of the requests until caches are full and the allocator is warm


def body(rng: random.Random) -> dict[str, Any]:
    words = " ".join(rng.choice(("once", "upon", "a", "time", "7", "+")) for _ in range(20))
    kind: dict[str, Any] = {
        "prompt": words[: rng.randint(1, len(words))],
        "max_tokens": rng.randint(1, 16),
        "temperature": rng.choice((0.0, 1.0)),
        "stream": rng.random() < 0.7,
        "n": rng.choice((1, 1, 1, 3)),
        "logprobs": rng.choice((None, None, None, 2)),
        "stop": rng.choice((None, None, ["dog"])),
        "presence_penalty": rng.choice((0.0, 0.0, 0.5)),
        "echo": rng.random() < 0.05,
    }
    if rng.random() < 0.05:
        kind["temperature"] = "hot"  # refused
    if rng.random() < 0.1:
        kind["max_tokens"] = 150  # the client will leave
    return kind


async def one(http: aiohttp.ClientSession, url: str, rng: random.Random) -> str:
    """Send a request and read the answer, or leave at a random point."""
    leaves = rng.random() < 0.2
    try:
        async with asyncio.timeout(rng.random() * 0.05 if leaves else None):
            async with http.post(url + "/v1/completions", json=body(rng)) as response:
                while await response.content.readany():
                    if leaves and rng.random() < 0.3:
                        response.close()
                        return "left"
                return str(response.status)
    except TimeoutError:
        return "left"


async def many(url: str, count: int, seed: int) -> dict[str, int]:
    found: dict[str, int] = {}
    rng, left = random.Random(seed), count
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:

        async def client() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                outcome = await one(http, url, rng)
                found[outcome] = found.get(outcome, 0) + 1

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return found


# Closed connections disappear after a turn or two of the loop.
TURNS_S = 0.2


async def held(server) -> dict[str, int]:
    await server.idle()
    async with asyncio.timeout(60):
        while server.engine.streams:
            await asyncio.sleep(0.01)
    await asyncio.sleep(TURNS_S)
    gc.collect()
    return {
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "streams": len(server.engine.streams),
        "queued": server.engine.streams.num_waiting,
        "blocks": server.engine.stats().num_used_blocks,
        "rss": psutil.Process().memory_info().rss,
    }


async def held_by(process: psutil.Process, url: str) -> dict[str, int]:
    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        while True:
            async with http.get(url + "/stats") as response:
                stats = await response.json()
            if not (stats["num_running"] or stats["num_waiting"] or stats["num_used_blocks"]):
                break
            await asyncio.sleep(0.01)
    await asyncio.sleep(TURNS_S)
    return {
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "blocks": stats["num_used_blocks"],
        "rss": process.memory_info().rss,
    }


async def check(
    url: str, held: Callable[[], Awaitable[dict[str, int]]], count: int, rss_bound: int = 24 << 20
) -> None:
    async with aiohttp.ClientSession(url) as http, asyncio.timeout(60):
        status = ""
        while status != "ready":  # compiler threads also count
            async with http.get("/health") as response:
                status = (await response.json())["status"]
            await asyncio.sleep(0.05)
    await many(url, int(WARM_UP * count) + CLIENTS, seed=0)
    before = await held()
    found = await many(url, count, seed=1)
    after = await held()
    assert set(found) == {"200", "400", "left"} and min(found.values()) > count // 100, found
    rss_before, rss_after = before.pop("rss"), after.pop("rss")
    assert after == before
    assert not any(after.get(name) for name in ("blocks", "streams", "queued"))
    # After other tests in this process, the allocator's own variation is as large as this.
    assert rss_after - rss_before < rss_bound, (rss_before, rss_after)


CONFIG = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "num_blocks": 256,
}


def engine(kind: str) -> Engine | EngineProcess:
    if kind == "fake":
        return Engine.fake(config=EngineConfig.from_options(**CONFIG))
    if kind == "fake process":
        return EngineProcess.fake(config=EngineConfig.from_options(**CONFIG))
    return Engine.load(EngineConfig.from_options(model="forge-tiny", **CONFIG))


@pytest.mark.parametrize(("kind", "count"), [("fake", 1500), ("fake process", 800), ("real", 600)])
@pytest.mark.slow
async def test_requests_leak_no_objects(start, kind, count):
    server = await start(engine(kind))
    await check(server.url, partial(held, server), count)


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_ten_thousand_real_requests_leak_nothing():
    """A kilobyte per request would exceed the memory bound twice.

    The server runs in its own process. Neither its clients' memory nor the fragmentation left by
    other tests is counted.
    """
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in CONFIG.items()]
    command = [sys.executable, "-m", "forge_serve", "serve", "forge-tiny", "--port", "0"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, "--no-request-log", *flags, stdout=pipe
    )
    try:
        assert process.stdout is not None
        said = re.search(r"http://[\d.]+:\d+", (await process.stdout.readline()).decode())
        assert said, "it does not serve"
        holds = partial(held_by, psutil.Process(process.pid), said[0])
        await check(said[0], holds, 10_000, rss_bound=4 << 20)
        process.terminate()
        assert await process.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


@pytest.mark.slow
async def test_planted_leak_is_detected(start, monkeypatch):
    server = await start(engine("fake"))
    kept: list[bytearray] = []
    submit = Engine.submit_request

    def leak(self, request):
        kept.append(bytearray(b"x" * 20_000))
        with contextlib.suppress(OSError):
            os.dup(0)
        return submit(self, request)

    monkeypatch.setattr(Engine, "submit_request", leak)
    with pytest.raises(AssertionError):
        await check(server.url, partial(held, server), 400)
