"""The start-up order: a bound socket, a loading engine, a serving server."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from forge_jax.config import EngineConfig
from forge_jax.engine.fake import assemble_fake
from forge_jax.engine.thread import Engine
from forge_jax.errors import ConfigError, ModelError
from forge_jax.step.executables import BackgroundCompile, Executables
from forge_serve.config import ServerConfig
from forge_serve.openai import operations
from forge_serve.server import process as server


def test_unavailable_address_is_a_clear_error():
    with pytest.raises(ConfigError, match="--host"):
        server.bind("192.0.2.1", 0)


async def test_health_answers_while_the_engine_loads(capsys):
    loaded = threading.Event()

    def load() -> Engine:
        assert loaded.wait(10)
        return Engine.fake()

    sock = server.bind("127.0.0.1", 0)
    url = "http://{}:{}".format(*sock.getsockname())
    serving = asyncio.create_task(server._serve(sock, ServerConfig(drain_timeout_s=0.0), load))
    async with aiohttp.ClientSession() as http:
        async with http.get(url + "/health") as response:
            assert (response.status, await response.json()) == (503, {"status": "starting"})
        loaded.set()
        async with asyncio.timeout(60):
            while True:
                async with http.get(url + "/health") as response:
                    if response.status == 200:
                        break
        assert f"serves forge-fake at {url}; try: curl {url}/v1/" in capsys.readouterr().out
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
        with pytest.raises(aiohttp.ClientConnectionError):
            await http.get(url + "/health")


class LateExecutables:
    """Two executables that compile on command."""

    def __init__(self) -> None:
        self.background = BackgroundCompile()
        self.active: list[str] = []
        self._arrived = {name: threading.Event() for name in ("first", "second")}
        executables = Executables()
        for name, arrived in self._arrived.items():
            executables.add(name, lambda arrived=arrived: arrived.wait(60) and 0)
        executables.close()
        self.background.add(
            executables, {name: partial(self.active.append, name) for name in self._arrived}
        )

    def arrive(self, name: str) -> None:
        self._arrived[name].set()


def serving_with(late: LateExecutables) -> tuple[str, asyncio.Task[bool]]:
    """Start a server on an engine that is serving and not ready."""
    parts = assemble_fake(EngineConfig(), step_time_s=0.0, max_model_len=1024, check=True)
    parts.late = late.background
    sock = server.bind("127.0.0.1", 0)
    config = ServerConfig(drain_timeout_s=0.0)
    task = asyncio.create_task(server._serve(sock, config, lambda: Engine(parts)))
    return "http://{}:{}".format(*sock.getsockname()), task


async def test_requests_are_served_before_the_last_executable_is_ready():
    late = LateExecutables()
    url, serving = serving_with(late)
    body = {"prompt": "a", "max_tokens": 5, "ignore_eos": True}
    async with aiohttp.ClientSession() as http:
        await (await _until_ready(http, url, body)).read()

        async def get(path: str) -> tuple[int, Any]:
            async with http.get(url + path) as response:
                return response.status, await response.json()

        for path in ("/health", "/forge/v1/health"):
            status, answer = await get(path)
            assert (status, answer["status"]) == (200, "serving")
        assert set((await get("/stats"))[1]["startup_seconds"]) == {"serving"}
        late.arrive("first")
        async with asyncio.timeout(60):
            while late.active != ["first"]:
                await asyncio.sleep(0.001)
        assert await get("/health") == (200, {"status": "serving"})
        late.arrive("second")
        async with asyncio.timeout(60):
            while await get("/health") != (200, {"status": "ready"}):
                await asyncio.sleep(0.001)
        seconds = (await get("/stats"))[1]["startup_seconds"]
        assert 0 < seconds["serving"] < seconds["ready"]
        async with http.get(url + "/metrics") as response:
            metrics = await response.text()
        for phase, value in seconds.items():
            labels = f'engine="0",model_name="forge-fake",phase="{phase}"'
            assert f"forge:startup_seconds{{{labels}}} {value}" in metrics
        os.kill(os.getpid(), signal.SIGTERM)
        await serving


async def test_server_stopped_before_ready_does_not_wait_for_the_compiler():
    late = LateExecutables()
    url, serving = serving_with(late)
    async with aiohttp.ClientSession() as http:
        await _until_ready(http, url, {"prompt": "a", "max_tokens": 1})
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    late.arrive("first")  # its trace ends; nothing waits for it
    assert late.background.complete and not late.active


async def test_signal_during_loading_does_not_wait_for_it():
    loaded = threading.Event()

    def load() -> Engine:
        loaded.wait()
        return Engine.fake()

    sock = server.bind("127.0.0.1", 0)
    serving = asyncio.create_task(server._serve(sock, ServerConfig(), load))
    await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        async with asyncio.timeout(60):
            await serving
    finally:
        loaded.set()


async def test_unloadable_model_ends_the_server():
    def load() -> Engine:
        raise ModelError("no such model")

    sock = server.bind("127.0.0.1", 0)
    with pytest.raises(ModelError, match="no such model"):
        await server._serve(sock, ServerConfig(), load)


async def test_draining_lets_requests_finish_and_then_aborts_them(caplog):
    for drain_timeout_s, ends_well in ((10.0, True), (0.05, False)):
        sock = server.bind("127.0.0.1", 0)
        url = "http://{}:{}".format(*sock.getsockname())
        config = ServerConfig(drain_timeout_s=drain_timeout_s)
        serving = asyncio.create_task(
            server._serve(sock, config, lambda: Engine.fake(step_time_s=0.02))
        )
        body = {"prompt": "a", "max_tokens": 25, "ignore_eos": True, "stream": True}
        async with aiohttp.ClientSession() as http:
            response = await _until_ready(http, url, body)
            await response.content.readany()
            os.kill(os.getpid(), signal.SIGTERM)
            text = (await response.read()).decode()
            assert text.endswith("data: [DONE]\n\n") is ends_well
            assert ('"error"' in text) is not ends_well
        await serving
        assert not [r for r in caplog.records if r.levelno > logging.INFO], "it was to be expected"


async def test_requests_during_a_drain_get_retry_after():
    sock = server.bind("127.0.0.1", 0)
    url = "http://{}:{}".format(*sock.getsockname())
    config = ServerConfig(drain_timeout_s=20)
    serving = asyncio.create_task(
        server._serve(sock, config, lambda: Engine.fake(step_time_s=0.02))
    )
    body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as http:
        response = await _until_ready(http, url, body)
        await response.content.readany()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        for _ in range(2):  # on a new connection each time
            async with http.post(url + "/v1/completions", json=body) as refused:
                assert refused.status == 503
                assert (await refused.json())["error"]["code"] == "not_ready"
                assert int(refused.headers["Retry-After"]) > 0
                assert refused.headers["Connection"] == "close"
            async with http.get(url + "/health") as health:
                assert health.status == 503
                assert await health.json() == {"status": "stopping"}
        assert not serving.done()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await serving
        with pytest.raises(aiohttp.ClientConnectionError):
            await http.get(url + "/health")


async def test_request_tokenized_during_shutdown_gets_retry_after(start, monkeypatch):
    running = await start(Engine.fake())
    encode = operations.encode_prompts

    async def interrupted(*args: Any) -> Any:
        prompts = await encode(*args)
        running.service.stopping = True
        return prompts

    monkeypatch.setattr(operations, "encode_prompts", interrupted)
    status, answer = await running.post("/v1/completions", {"prompt": "a"})
    assert (status, answer["error"]["code"]) == (503, "not_ready")


def test_log_announces_a_long_model_load(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("forge_jax.engine.thread.resolve", lambda *_: Path("folder"))

    def assemble(*_: Any) -> Any:
        raise ModelError("far enough")

    monkeypatch.setattr("forge_jax.engine.builder.assemble", assemble)
    config = EngineConfig.from_options(model="org/model", backend="cuda", device=1)
    with pytest.raises(ModelError, match="far enough"):
        Engine.load(config)
    [message] = caplog.messages
    assert "loading org/model on cuda:1" in message and "compiles" in message


def test_missing_model_fails_before_the_load_is_logged(caplog, monkeypatch):
    caplog.set_level(logging.INFO)

    def resolve(*_: Any) -> Any:
        raise ModelError("no model")

    monkeypatch.setattr("forge_jax.engine.thread.resolve", resolve)
    with pytest.raises(ModelError, match="no model"):
        Engine.load(EngineConfig.from_options(model="org/model"))
    assert caplog.messages == []


def test_options_ignored_by_the_fake_device_are_logged(caplog):
    config = EngineConfig.from_options(model="org/model", dtype="float32", max_model_len=99)
    server.warn_of_ignored(config)
    [message] = caplog.messages
    assert message.endswith("ignores MODEL, --dtype")
    caplog.clear()
    server.warn_of_ignored(EngineConfig())
    assert caplog.messages == []


async def _until_ready(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> aiohttp.ClientResponse:
    """Return the answer to a completion, as soon as the server accepts it."""
    while True:
        response = await http.post(url + "/v1/completions", json=body)
        if response.status == 200:
            return response
        await asyncio.sleep(0.01)
