"""Endpoints about the server itself: health, statistics, metrics, profiles and its schema."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import msgspec
from aiohttp import hdrs, web
from msgspec import UNSET

from forge_serve.http.auth import TENANT
from forge_serve.http.query import whole_number
from forge_serve.http.replies import encoded_response, json_response
from forge_serve.http.routes import Route, get, post
from forge_serve.openapi.schema import About
from forge_serve.server import openapi
from forge_serve.server.service import SERVING_STATES, Service
from forge_serve.telemetry import info
from forge_serve.telemetry.engine_view import EngineView
from forge_serve.telemetry.metrics import CONTENT_TYPE


class ServerEndpoints:
    """Handlers of requests that belong to no generation protocol.

    `/server_info`, `/model_info` and `/v1/loads` are SGLang's, `/ping` is SageMaker's, and
    `/api/...` is Ollama's.
    """

    ROUTES: ClassVar[tuple[Route, ...]] = (
        get("server_info", "/server_info", "/get_server_info"),
        get("model_info", "/model_info", "/get_model_info"),
        get("loads", "/v1/loads"),
        get("ollama_tags", "/api/tags"),
        get("ollama_version", "/api/version"),
        get("ping", "/ping"),
        post("ping", "/ping"),
        get("version", "/version"),
        get("load", "/load"),
        get("health", "/health", "/healthz"),
        get("detailed_health", "/forge/v1/health"),
        get("stats", "/stats"),
        get("engine_state", "/engine_state"),
        get("metrics", "/metrics"),
        get("openapi", "/openapi.json"),
        post("start_profile", "/start_profile"),
        post("stop_profile", "/stop_profile"),
    )

    def __init__(self, service: Service):
        self._service = service
        self._view = EngineView(service.gpus)
        self._document: bytes | None = None  # /openapi.json, made by the first request for it

    async def server_info(self, http: web.Request) -> web.StreamResponse:
        service = self._service
        engine = service.ready_engine()
        return encoded_response(info.server_info(engine, service.model_name, service.state))

    async def model_info(self, http: web.Request) -> web.StreamResponse:
        engine = self._service.ready_engine()
        return encoded_response(info.model_info(engine, self._service.model_name))

    async def loads(self, http: web.Request) -> web.StreamResponse:
        return encoded_response(info.loads(self._service.ready_engine()))

    async def ollama_tags(self, http: web.Request) -> web.StreamResponse:
        engine, service = self._service.ready_engine(), self._service
        names = [service.model_name, *(adapter.name for adapter in engine.loras)]
        return encoded_response(info.ollama_tags(engine, names, service.created_s))

    async def ollama_version(self, http: web.Request) -> web.StreamResponse:
        return await self.version(http)

    async def version(self, http: web.Request) -> web.StreamResponse:
        return encoded_response(info.Version())

    async def ping(self, http: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self._service.serving else 503)

    async def load(self, http: web.Request) -> web.StreamResponse:
        stats = self._service.ready_engine().stats()
        return encoded_response(info.Load(stats.num_running + stats.num_waiting))

    async def health(self, http: web.Request) -> web.StreamResponse:
        service = self._service
        return _health(info.Health(service.state, service.engine_states or UNSET))

    async def detailed_health(self, http: web.Request) -> web.StreamResponse:
        engine = self._service.engine
        service = self._service
        answer = info.DetailedHealth(
            status=service.state,
            engines=service.engine_states or UNSET,
            model=service.model_name or None,
        )
        if engine is not None:
            stats = engine.stats()
            answer.max_model_len = engine.max_model_len
            answer.num_running, answer.num_waiting = stats.num_running, stats.num_waiting
            answer.steps = stats.steps
        return _health(answer)

    async def stats(self, http: web.Request) -> web.StreamResponse:
        engine = self._service.ready_engine()
        return encoded_response(info.stats(engine, self._service.model_name))

    async def engine_state(self, http: web.Request) -> web.StreamResponse:
        engine, after_step = self._service.ready_engine(), whole_number(http, "after_step", -1)
        state = await self._view.answer(engine, http.get(TENANT, ""), after_step)
        response = encoded_response(state)
        response.headers[hdrs.CACHE_CONTROL] = "no-store"
        return response

    async def metrics(self, http: web.Request) -> web.StreamResponse:
        if self._service.gpus is not None:
            await asyncio.to_thread(self._service.gpus.read)
        text = self._service.metrics.text()
        return web.Response(body=text, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

    async def openapi(self, http: web.Request) -> web.StreamResponse:
        engine = self._service.ready_engine()
        if self._document is None:
            about = About.of(self._service.config, engine, self._service.model_name)
            document = await asyncio.to_thread(openapi.document, http.app.router, about)
            self._document = msgspec.json.encode(document)
        return json_response(self._document)

    async def start_profile(self, http: web.Request) -> web.StreamResponse:
        name = await self._service.profiles.start(self._service.ready_engine())
        return encoded_response(info.Profile(name))

    async def stop_profile(self, http: web.Request) -> web.StreamResponse:
        name = await self._service.profiles.stop(self._service.ready_engine())
        return encoded_response(info.Profile(name))


def _health(answer: info.Health | info.DetailedHealth) -> web.Response:
    return encoded_response(answer, 200 if answer.status in SERVING_STATES else 503)
