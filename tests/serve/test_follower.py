"""`/health` on a host other than host 0. `tests/parallel/test_several_hosts.py` runs real ones."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import aiohttp
import pytest

from forge_jax.config import EngineConfig
from forge_jax.engine.hosts import service
from forge_jax.engine.hosts.service import REFUSED, FollowerService
from forge_jax.errors import ConfigError
from forge_serve.config import ServerConfig
from forge_serve.server.follower import serve_health

CONFIG = EngineConfig.from_options(
    num_hosts=2, tensor_parallel=2, coordinator="127.0.0.1:5005", host_rank=1
)
# A process that writes its ID, follows host 0 once a file exists, and waits for its end.
FOLLOWER = """
import os, sys, time
with open(sys.argv[1] + "/pid", "w") as file:
    file.write(str(os.getpid()))
while not os.path.exists(sys.argv[1] + "/go"):
    time.sleep(0.02)
os.remove(sys.argv[1] + "/go")
os.write(int(sys.argv[2]), b"1")
time.sleep(60)
"""


@pytest.fixture
def follower(tmp_path, monkeypatch) -> FollowerService:
    monkeypatch.setattr(service, "FOLLOWER", ("-c", FOLLOWER, str(tmp_path)))
    return FollowerService(CONFIG, "text")


async def until(session, status: int) -> str:
    """Wait for a response with this status, and return the state in it."""
    async with asyncio.timeout(20):
        while True:
            try:
                async with session.get("/health") as response:
                    if response.status == status:
                        return (await response.json())["status"]
            except aiohttp.ClientConnectorError:
                pass
            await asyncio.sleep(0.02)


async def test_follower_is_healthy_only_while_it_follows(follower, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        serving = asyncio.create_task(serve_health(sock, ServerConfig(), follower))
        async with aiohttp.ClientSession(url) as session:
            assert await until(session, 503) == "starting"
            (tmp_path / "go").touch()
            assert await until(session, 200) == "ready"
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
            assert await until(session, 503) == "starting"
            (tmp_path / "go").touch()  # lets the next process continue
            assert await until(session, 200) == "ready"
            async with session.get("/v1/models") as response:
                assert response.status == 404
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(serving, 10)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_rejected_follower_ends_the_service(follower, monkeypatch):
    code = f"import sys; sys.stdin.buffer.read(4); sys.exit({REFUSED})"
    monkeypatch.setattr(service, "FOLLOWER", ("-c", code))
    with (
        socket.create_server(("127.0.0.1", 0)) as sock,
        pytest.raises(ConfigError, match="host 1 cannot take part"),
    ):
        await asyncio.wait_for(serve_health(sock, ServerConfig(), follower), 20)
