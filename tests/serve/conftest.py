"""Fixtures: a server on the fake device, behind a real socket, and its clients."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openai import AsyncOpenAI

from forge_jax.config import EngineConfig
from forge_jax.engine.fake import assemble_fake, fake_tokenizer
from forge_jax.engine.thread import Engine
from forge_jax.text import ChatTemplate, Tokenizer
from forge_serve.config import ServerConfig
from forge_serve.http.timeouts import Timeouts
from forge_serve.server.process import bind, make_runner
from forge_serve.server.service import Service


@dataclass
class Server:
    service: Service
    engine: Engine
    url: str
    http: aiohttp.ClientSession

    @cached_property
    def openai(self) -> AsyncOpenAI:
        """Return a client, made on first use because that takes longer than the server's start."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def model(self) -> str:
        return self.service.model_name

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Post JSON, or bytes verbatim; return the status and the answer's JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=io.BytesIO(data)) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """Return the data of each server-sent event of a stream."""
        async with self.http.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            text = (await response.read()).decode()
        assert text.endswith("\n\n")
        events = text.removesuffix("\n\n").split("\n\n")
        assert all(event.startswith("data: ") for event in events)
        return [event.removeprefix("data: ") for event in events]

    async def idle(self, timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while self.engine.stats().num_used_blocks or self.engine.stats().num_waiting:
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def running(
    engine: Engine,
    config: ServerConfig | None = None,
    timeouts: Timeouts | None = None,
    **socket_options: int,
) -> AsyncIterator[Server]:
    service = Service(config or ServerConfig(), timeouts)
    service.engine = engine
    engine.start()
    async with _listening(service, **socket_options) as url:
        try:
            async with aiohttp.ClientSession() as http:
                server = Server(service, engine, url, http)
                yield server
                if "openai" in vars(server):
                    await server.openai.close()
        finally:
            await engine.stop()


@contextlib.asynccontextmanager
async def _listening(service: Service, *, send_buffer: int | None = None) -> AsyncIterator[str]:
    sock = bind("127.0.0.1", 0)
    if send_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    runner = make_runner(service, last_bytes_s=0.1)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with running(Engine.fake(max_model_len=1024)) as server:
        yield server


@pytest.fixture
def listening() -> Callable[[Service], contextlib.AbstractAsyncContextManager[str]]:
    """Serve a service, with or without an engine, on a free port; yield the URL."""
    return _listening


Start = Callable[..., Awaitable[Server]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start a server on an engine of the test's own."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(engine: Engine, *args: Any, **kwargs: Any) -> Server:
            return await stack.enter_async_context(running(engine, *args, **kwargs))

        yield start


def scripted_engine(
    *answers: str, template: str | None = None, special_tokens: Sequence[str] = ()
) -> Engine:
    """Return an engine whose model gives these answers, a byte per token, selected by the seed.

    Args:
      template: The chat template (default: the fake model's).
      special_tokens: Special tokens in addition to "</s>", each one token of an answer.
    """
    backend = copy.deepcopy(fake_tokenizer().backend)
    backend.add_special_tokens(list(special_tokens))
    tokenizer = Tokenizer(backend, {"eos_token": "</s>"})
    assert tokenizer.eos_token_id is not None
    scripts = [[*tokenizer.encode(answer), tokenizer.eos_token_id] for answer in answers]
    prompts: list[list[int]] = []

    def next_token(tokens: Sequence[int], seed: int) -> int:
        so_far = max(len(p) for p in prompts if list(tokens[: len(p)]) == p)
        script = scripts[seed % len(scripts)]
        return script[min(len(tokens) - so_far, len(script) - 1)]

    parts = assemble_fake(
        EngineConfig(), step_time_s=0.0, max_model_len=4096, check=False, tokenizer=tokenizer,
        next_token=next_token,
    )  # fmt: skip
    if template is not None:
        parts.chat_template = ChatTemplate(template, tokenizer.special_tokens)
    engine = Engine(parts)
    submit = engine.submit

    def submit_and_remember(prompt_token_ids: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        prompts.append(list(prompt_token_ids))
        return submit(prompt_token_ids, *args, **kwargs)

    engine.submit = submit_and_remember  # type: ignore[method-assign]
    return engine
