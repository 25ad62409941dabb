"""The endpoints of Anthropic's protocol."""

from __future__ import annotations

from typing import ClassVar

from aiohttp import web

from forge_serve.anthropic.requests import PATH, MessagesRequest
from forge_serve.anthropic.response_types import CountAnswer
from forge_serve.anthropic.serializer import MessagesSerializer
from forge_serve.anthropic.translation import chat_request
from forge_serve.http.auth import TENANT
from forge_serve.http.replies import encoded_response
from forge_serve.http.routes import Route, post
from forge_serve.openai import operations
from forge_serve.openai.handler import GenerationHandler
from forge_serve.openai.requests import ChatRequest
from forge_serve.openai.validation import check_converted


class MessagesEndpoints:
    """Handlers of Anthropic's endpoints."""

    ROUTES: ClassVar[tuple[Route, ...]] = (
        post("messages", PATH),
        post("count_tokens", f"{PATH}/count_tokens"),
    )

    def __init__(self, handler: GenerationHandler):
        self._handler = handler
        self._service = handler.service

    async def messages(self, http: web.Request) -> web.StreamResponse:
        request = await self._handler.read(http, MessagesRequest)
        chat = await self._chat(http, request)
        return await self._handler.generate(http, chat, MessagesSerializer)

    async def count_tokens(self, http: web.Request) -> web.StreamResponse:
        self._service.ready_engine()
        request = await self._handler.decode(http, MessagesRequest)
        chat = await self._chat(http, request)
        tenant = http.get(TENANT, "")
        number = await operations.count_prompt_tokens(self._service, chat, tenant)
        return encoded_response(CountAnswer(number))

    async def _chat(self, http: web.Request, request: MessagesRequest) -> ChatRequest:
        limits = self._service.config.limits

        def translate() -> ChatRequest:
            chat = chat_request(request)
            check_converted(chat, limits)
            return chat

        return await self._handler.bodies.parse(http, translate)
