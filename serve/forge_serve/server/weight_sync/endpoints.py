"""Endpoints for trainers. Their paths, parameters and bodies are vLLM's.

All are disabled without `--weight-sync-dir`. The transports of vLLM that need NCCL are rejected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from aiohttp import web

from forge_jax.errors import RequestError
from forge_serve.http.query import is_true, whole_number
from forge_serve.http.replies import encoded_response
from forge_serve.http.routes import Route, get, post
from forge_serve.openai.validation import decode_form
from forge_serve.server.weight_sync.forms import (
    Aborted,
    AbortRequest,
    FinishUpdateRequest,
    Paused,
    Sleeping,
    SyncStatus,
    UpdateWeightsRequest,
    WeightUpdate,
    WorldSize,
)
from forge_serve.server.weight_sync.sync import TRANSPORTS, WeightSync

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_jax.engine.control import Control
    from forge_serve.http.bodies import BodyReader
    from forge_serve.server.service import Service


class WeightSyncEndpoints:
    """Handlers of the endpoints for trainers."""

    ROUTES: ClassVar[tuple[Route, ...]] = (
        post("pause", "/pause"),
        post("resume", "/resume"),
        get("is_paused", "/is_paused"),
        post("abort_requests", "/abort_requests"),
        post("start_weight_update", "/start_weight_update"),
        post("update_weights", "/update_weights"),
        post("finish_weight_update", "/finish_weight_update"),
        get("weight_info", "/weight_info"),
        get("get_world_size", "/get_world_size"),
        post("reset_prefix_cache", "/reset_prefix_cache"),
        post("sleep", "/sleep"),
        post("wake_up", "/wake_up"),
        get("is_sleeping", "/is_sleeping"),
        post(
            "init_weight_transfer_engine",
            "/init_weight_transfer_engine",
            "/init_communicator",
            "/update_named_param",
        ),
    )

    def __init__(self, service: Service, bodies: BodyReader):
        self._service = service
        self._bodies = bodies

    @property
    def _sync(self) -> WeightSync:
        return self._service.weight_sync

    def _engine(self) -> AsyncEngine:
        return self._service.ready_engine()

    def _control(self) -> Control:
        return self._sync.control(self._engine())

    async def _form[Form: msgspec.Struct](self, http: web.Request, kind: type[Form]) -> Form:
        """Return the body, which may be absent. A disabled endpoint does not read it."""
        self._control()
        limits = self._service.config.limits
        return await self._bodies.decode(
            http, lambda body: decode_form(body or b"{}", kind, limits)
        )

    async def pause(self, http: web.Request) -> web.StreamResponse:
        mode: Any = http.query.get("mode", "abort")
        await self._control().pause(mode)
        return encoded_response(SyncStatus("paused"))

    async def resume(self, http: web.Request) -> web.StreamResponse:
        await self._control().resume()
        return encoded_response(SyncStatus("resumed"))

    async def is_paused(self, http: web.Request) -> web.StreamResponse:
        return encoded_response(Paused(self._control().paused))

    async def abort_requests(self, http: web.Request) -> web.StreamResponse:
        form = await self._form(http, AbortRequest)
        number = self._sync.abort(self._engine(), form.request_ids)
        return encoded_response(Aborted("aborted", number))

    async def start_weight_update(self, http: web.Request) -> web.StreamResponse:
        self._engine()
        self._sync.start()
        return self._updated("Weight update started")

    async def update_weights(self, http: web.Request) -> web.StreamResponse:
        form = await self._form(http, UpdateWeightsRequest)
        installed = await self._sync.update(
            self._engine(), form.update_info, form.weight_version, form.in_flight
        )
        return self._updated("Weights updated" if installed else "Weights collected")

    async def finish_weight_update(self, http: web.Request) -> web.StreamResponse:
        form = await self._form(http, FinishUpdateRequest)
        await self._sync.finish(self._engine(), form.weight_version, form.in_flight)
        return self._updated("Weight update finished")

    async def weight_info(self, http: web.Request) -> web.StreamResponse:
        return encoded_response(self._sync.info(self._engine(), self._service.model_name))

    async def get_world_size(self, http: web.Request) -> web.StreamResponse:
        self._control()
        return encoded_response(WorldSize(self._engine().stats().tensor_parallel))

    async def reset_prefix_cache(self, http: web.Request) -> web.StreamResponse:
        running = is_true(http, "reset_running_requests")
        await self._control().reset_prefix_cache(running=running)
        return encoded_response(SyncStatus("reset"))

    async def sleep(self, http: web.Request) -> web.StreamResponse:
        control, level = self._control(), whole_number(http, "level", 1)
        mode: Any = http.query.get("mode", "abort")
        await control.sleep(level, mode)
        return encoded_response(SyncStatus("sleeping"))

    async def wake_up(self, http: web.Request) -> web.StreamResponse:
        control = self._control()
        tags = [tag for text in http.query.getall("tags", []) for tag in text.split(",")]
        await control.wake_up(tags)
        return encoded_response(SyncStatus("sleeping" if control.sleeping else "awake"))

    async def is_sleeping(self, http: web.Request) -> web.StreamResponse:
        return encoded_response(Sleeping(self._control().sleeping))

    async def init_weight_transfer_engine(self, http: web.Request) -> web.StreamResponse:
        self._control()
        raise RequestError(TRANSPORTS)

    def _updated(self, message: str) -> web.StreamResponse:
        return encoded_response(WeightUpdate(message, self._engine().stats().weight_version))
