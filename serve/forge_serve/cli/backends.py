"""Backends of the commands: an engine in this process, or a server.

Both take request bodies of OpenAI's protocol and return the events of its streams, so the commands
treat them the same way.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import Any, Literal, Protocol

import aiohttp
import msgspec

from forge_jax.config import EngineConfig
from forge_jax.host.exits import leave
from forge_serve.config import ServerConfig
from forge_serve.generation.generation import Generation, Updates
from forge_serve.http.client import (
    EventsError,
    ServerError,
    base_url,
    error_message,
    events_of,
    model_card,
    new_session,
    read_events,
)
from forge_serve.openai import operations
from forge_serve.openai.requests import ChatRequest, CompletionRequest
from forge_serve.openai.serializers import ChatSerializer, CompletionSerializer, ResponseSerializer
from forge_serve.server.process import load_engine
from forge_serve.server.service import Service

_COMPILING_S = 0.05  # interval between checks that all executables are compiled

Kind = Literal["chat", "completions"]
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_REQUESTS = {"chat": ChatRequest, "completions": CompletionRequest}
_SERIALIZERS = {"chat": ChatSerializer, "completions": CompletionSerializer}
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class Backend(Protocol):
    """Target of a command's requests.

    Attributes:
      model: the name of the model.
    """

    model: str

    def events(self, kind: Kind, body: dict[str, Any]) -> AsyncGenerator[Any]:
        """Yield the events of a stream, with the usage at the end. Closing it aborts the request.

        Raises:
          ForgeError: the request was rejected or failed.
        """
        ...

    async def close(self) -> None: ...


class LocalBackend:
    """Engine in this process, called through the server's own code.

    `load` blocks. Call all other methods from one event loop.
    """

    def __init__(self, service: Service):
        assert service.engine is not None
        self._service = service
        self._engine = service.engine
        self._started = False
        self._numbers = itertools.count()
        self.compiling = False  # True at close if threads that cannot be stopped are compiling
        self.model = service.model_name
        self.tokenizer = service.engine.tokenizer

    @classmethod
    def load(cls, engine: EngineConfig, server: ServerConfig) -> LocalBackend:
        """Load the engine. Raises the errors of `Engine.load`."""
        service = Service(server)
        service.engine = load_engine(engine, server)
        return cls(service)

    async def events(self, kind: Kind, body: dict[str, Any]) -> AsyncGenerator[Any]:
        generation, serializer = await self._begin(kind, {**body, **_STREAMED})
        steps: asyncio.Queue[tuple[Updates, bool]] = asyncio.Queue()
        try:
            generation.begin(lambda updates: steps.put_nowait((list(updates), generation.over)))
            over = False
            while not over:
                updates, over = await steps.get()
                for choice, delta in updates:
                    for event in events_of(serializer.events(choice, delta)):
                        yield event
            if generation.failure is not None:
                raise generation.failure
            for event in events_of(serializer.end(generation.usage)):
                yield event
        finally:
            generation.close()

    async def whole(self, kind: Kind, body: dict[str, Any]) -> bytes:
        """Return the whole response as JSON.

        Raises:
          ForgeError: the request was rejected or failed.
        """
        generation, serializer = await self._begin(kind, body)
        try:
            return await operations.whole_response(generation, serializer)
        finally:
            generation.close()

    async def finish_compiling(self) -> None:
        """Wait until every executable is compiled, or the engine has failed."""
        self._start()
        while self._engine.stats().state == "serving":
            await asyncio.sleep(_COMPILING_S)

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._engine.start()

    async def _begin(
        self, kind: Kind, body: dict[str, Any]
    ) -> tuple[Generation, ResponseSerializer]:
        self._start()
        return await operations.begin(
            self._service,
            operations.read(self._service, msgspec.json.encode(body), _REQUESTS[kind]),
            _SERIALIZERS[kind],
            unique_id=lambda: str(next(self._numbers)),
            cache_salt="",
        )

    async def close(self) -> None:
        self.compiling = self._engine.stats().state == "serving"
        await self._engine.stop()


class HttpBackend:
    """Server of OpenAI's protocol."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str):
        self._session = session
        self._url = url
        self.model = model

    @classmethod
    async def connect(cls, url: str, *, model: str | None, api_key: str | None) -> HttpBackend:
        """Connect to a server and use the named model, or its first one.

        Raises:
          ServerError: the server does not respond, or does not serve the model.
        """
        url = base_url(url)
        session = new_session(api_key)
        try:
            card = await model_card(session, url, model)
        except BaseException:
            await session.close()
            raise
        return cls(session, url, card["id"])

    async def events(self, kind: Kind, body: dict[str, Any]) -> AsyncGenerator[Any]:
        data = msgspec.json.encode({"model": self.model, **body, **_STREAMED})
        try:
            async with self._session.post(self._url + _PATHS[kind], data=data) as response:
                if response.status != 200:
                    raise ServerError(
                        f"HTTP {response.status}: {error_message(await response.text())}"
                    )
                async for event in read_events(response.content):
                    if isinstance(event, dict) and event.get("error"):
                        raise ServerError(error_message(event["error"]))
                    yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerError(f"{self._url} stopped responding: {error}") from error
        except EventsError as error:
            raise ServerError(f"{self._url}: {error}") from error

    async def close(self) -> None:
        await self._session.close()


def end_with(status: int, backend: LocalBackend | HttpBackend | None) -> int:
    """Return the exit status, or end the process at once if threads are still compiling."""
    if isinstance(backend, LocalBackend) and backend.compiling:
        leave(status)
    return status
