"""Fixtures: a server that has answered one request, and its metrics."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from forge_jax.config import EngineConfig, SpeculationConfig
from forge_jax.engine.thread import Engine
from forge_serve.config import ServerConfig
from forge_serve.server.process import make_runner
from forge_serve.server.service import Service


@dataclass(frozen=True)
class Exposition:
    """The text of /metrics."""

    before: str  # the text before the request
    text: str
    model: str

    @property
    def families(self) -> dict[str, Metric]:
        return {family.name: family for family in text_string_to_metric_families(self.text)}

    @property
    def labels(self) -> dict[str, dict[str, set[str]]]:
        """Return the label values of each series, by its name in the text."""
        found: dict[str, dict[str, set[str]]] = {}
        for family in self.families.values():
            for sample in family.samples:
                labels = found.setdefault(sample.name, {})
                for label, value in sample.labels.items():
                    labels.setdefault(label, set()).add(value)
        return found


@pytest.fixture(scope="session")
def after_one_request() -> Exposition:
    import asyncio

    return asyncio.run(_exposition())


async def _exposition() -> Exposition:
    # Speculation is on, because otherwise its series are missing.
    config = EngineConfig(speculation=SpeculationConfig(speculation="suffix"))
    service = Service(ServerConfig())
    service.engine = Engine.fake(max_model_len=1024, config=config)
    service.engine.start()
    runner = make_runner(service, last_bytes_s=0.1)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        await web.SockSite(runner, sock).start()
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        body = {"prompt": "Hello, my name is", "max_tokens": 5, "ignore_eos": True}
        async with aiohttp.ClientSession(url) as http:
            async with http.get("/metrics") as response:
                before = await response.text()
            async with http.post("/v1/completions", json=body) as response:
                assert response.status == 200
            async with http.get("/metrics") as response:
                text = await response.text()
        await runner.cleanup()
    await service.engine.stop()
    return Exposition(before, text, service.model_name)
