"""Generation requests over HTTP: the steps that the endpoints of all protocols share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from forge_serve.generation.generation import Generation
from forge_serve.http.auth import TENANT, tenant_salt
from forge_serve.http.bodies import BodyReader
from forge_serve.http.exchange import EXCHANGE, new_id
from forge_serve.http.replies import json_response, send
from forge_serve.http.sse import EventStream
from forge_serve.openai import operations
from forge_serve.openai.operations import TextRequest
from forge_serve.openai.requests import GenerationRequest
from forge_serve.openai.serializers import ResponseSerializer
from forge_serve.openai.validation import decode, decode_form

if TYPE_CHECKING:
    from forge_serve.server.service import Service


class GenerationHandler:
    """Reads requests, submits them to the engine, and sends the responses.

    A protocol reads a body with `read`, translates it into one of OpenAI's requests, and passes
    that to `generate` with its own serializer.
    """

    def __init__(self, service: Service, bodies: BodyReader):
        self.service = service
        self.bodies = bodies

    async def read[Body: GenerationRequest](self, http: web.Request, kind: type[Body]) -> Body:
        """Return the body of a request that will use the engine.

        Raises:
          NotReadyError: the server is starting or stopping.
          OverloadedError: the host is low on memory.
          RequestError: the body is invalid.
        """
        self.service.ready_engine()
        self.service.memory.admit()
        return await self.decode(http, kind)

    async def decode[Body: GenerationRequest](self, http: web.Request, kind: type[Body]) -> Body:
        """Return the body after checking its fields, limits and model."""
        limits = self.service.config.limits
        request = await self.bodies.decode(http, lambda body: decode(body, kind, limits))
        lora = self.service.lora_of(request.model)
        exchange = http[EXCHANGE]
        exchange.lora = lora
        exchange.log.model = lora or self.service.model_name
        return request

    async def decode_form[Form: msgspec.Struct](self, http: web.Request, kind: type[Form]) -> Form:
        """Return a body that has no generation fields."""
        limits = self.service.config.limits
        return await self.bodies.decode(http, lambda body: decode_form(body, kind, limits))

    async def begin[Serializer: ResponseSerializer](
        self,
        http: web.Request,
        request: TextRequest,
        serializer_type: Callable[..., Serializer],
        *,
        stored: bool = False,
    ) -> tuple[Generation, Serializer]:
        """Submit a request. The caller must close the generation.

        Args:
          stored: True if clients can retrieve the response by its id later. It then gets a new id,
            because clients may reuse theirs.
        """
        exchange = http[EXCHANGE]

        def unique_id() -> str:
            request_id = exchange.adopt_id(request.request_id)
            return new_id() if stored else request_id

        generation, serializer = await operations.begin(
            self.service,
            request,
            serializer_type,
            unique_id=unique_id,
            cache_salt=tenant_salt(http, request.cache_salt),
            tenant=http.get(TENANT, ""),
            lora=exchange.lora,
        )
        exchange.log.generation = generation
        return generation, serializer

    async def respond(
        self, http: web.Request, generation: Generation, serializer: ResponseSerializer
    ) -> web.StreamResponse:
        """Return the response to a submitted request: an event stream, or a whole body."""
        http[EXCHANGE].log.stream = serializer.streams
        if not serializer.streams:
            return json_response(await operations.whole_response(generation, serializer))
        stall_s = self.service.timeouts.write_stall_s
        stream = EventStream(
            http,
            generation,
            serializer,
            stall_s=stall_s,
            keep_alive_s=self.service.config.sse_keep_alive_s,
        )
        return await send(http, stream, stall_s=stall_s)

    async def generate(
        self,
        http: web.Request,
        request: TextRequest,
        serializer_type: Callable[..., ResponseSerializer],
        *,
        stored: bool = False,
    ) -> web.StreamResponse:
        generation, serializer = await self.begin(http, request, serializer_type, stored=stored)
        try:
            return await self.respond(http, generation, serializer)
        finally:
            generation.close()
