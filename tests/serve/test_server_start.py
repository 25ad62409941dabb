"""The start-up order: a bound socket, then a loading engine, then a server that serves."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import aiohttp
import pytest

from forge_jax.engine import Engine
from forge_jax.errors import ConfigError, ModelError
from forge_serve import server
from forge_serve.config import ServerConfig


def test_an_address_that_is_not_this_machines_is_a_clear_error():
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
        async with asyncio.timeout(5):
            while True:
                async with http.get(url + "/health") as response:
                    if response.status == 200:
                        break
        assert f"serves forge-fake at {url}; try: curl {url}/v1/" in capsys.readouterr().out
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving is True
        with pytest.raises(aiohttp.ClientConnectionError):
            await http.get(url + "/health")


async def test_a_signal_while_the_engine_loads_does_not_wait_for_it():
    loaded = threading.Event()

    def load() -> Engine:
        loaded.wait(10)
        return Engine.fake()

    sock = server.bind("127.0.0.1", 0)
    serving = asyncio.create_task(server._serve(sock, ServerConfig(), load))
    await asyncio.sleep(0.05)
    begin_s = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving is False
    assert time.monotonic() - begin_s < 2
    loaded.set()


async def test_a_model_that_cannot_be_loaded_ends_the_server():
    def load() -> Engine:
        raise ModelError("no such model")

    sock = server.bind("127.0.0.1", 0)
    with pytest.raises(ModelError, match="no such model"):
        await server._serve(sock, ServerConfig(), load)


async def test_draining_lets_requests_finish_and_then_aborts_them():
    for drain_timeout_s, ends_well in ((10.0, True), (0.05, False)):
        sock = server.bind("127.0.0.1", 0)
        url = "http://{}:{}".format(*sock.getsockname())
        config = ServerConfig(drain_timeout_s=drain_timeout_s)
        serving = asyncio.create_task(
            server._serve(sock, config, lambda: Engine.fake(step_time_s=0.02))
        )
        body = {"prompt": "a", "max_tokens": 25, "ignore_eos": True, "stream": True}
        async with aiohttp.ClientSession() as http:
            while True:
                response = await http.post(url + "/v1/completions", json=body)
                if response.status == 200:
                    break
                await asyncio.sleep(0.01)
            await response.content.readany()
            os.kill(os.getpid(), signal.SIGTERM)
            text = (await response.read()).decode()
            assert text.endswith("data: [DONE]\n\n") is ends_well
            assert ('"error"' in text) is not ends_well
        assert await serving is True
