"""The endpoints of OpenAI's protocol, and related ones from other servers.

`/score`, `/rerank`, `/tokenize` and the LoRA endpoints are vLLM's, `/generate` is SGLang's, and
`/invocations` is SageMaker's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from aiohttp import web

from forge_jax.errors import RequestError
from forge_serve.errors import UnknownModelError
from forge_serve.http.auth import TENANT, tenant_salt
from forge_serve.http.exchange import EXCHANGE
from forge_serve.http.replies import encoded_response, json_response
from forge_serve.http.routes import Route, get, post
from forge_serve.openai import loras, operations, tokens
from forge_serve.openai.embeddings import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from forge_serve.openai.handler import GenerationHandler
from forge_serve.openai.loras import LoadLoraRequest, UnloadLoraRequest
from forge_serve.openai.models import model_cards
from forge_serve.openai.openapi import INVOKED
from forge_serve.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from forge_serve.openai.response_types import Models
from forge_serve.openai.serializers import (
    ChatSerializer,
    CompletionSerializer,
    GenerateSerializer,
)
from forge_serve.openai.validation import fields_of

if TYPE_CHECKING:
    from forge_serve.generation.workers import TextWork


class OpenAIEndpoints:
    """Handlers of OpenAI's endpoints."""

    ROUTES: ClassVar[tuple[Route, ...]] = (
        post("completions", "/v1/completions", "/completions"),
        post("chat_completions", "/v1/chat/completions", "/chat/completions"),
        post("embeddings", "/v1/embeddings", "/embeddings"),
        post("score", "/v1/score", "/score"),
        post("rerank", "/v1/rerank", "/rerank"),
        post("invocations", "/invocations"),
        post("generate", "/generate", "/v1/generate"),
        get("models", "/v1/models", "/models"),
        get("model", "/v1/models/{name:.*[^/]}", "/models/{name:.*[^/]}"),
        post("load_lora_adapter", "/v1/load_lora_adapter"),
        post("unload_lora_adapter", "/v1/unload_lora_adapter"),
        post("tokenize", "/tokenize", "/v1/tokenize"),
        post("detokenize", "/detokenize", "/v1/detokenize"),
        get("tokenizer_info", "/tokenizer_info"),
    )

    def __init__(self, handler: GenerationHandler):
        self._handler = handler
        self._service = handler.service

    async def completions(self, http: web.Request) -> web.StreamResponse:
        request = await self._handler.read(http, CompletionRequest)
        return await self._handler.generate(http, request, CompletionSerializer)

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        request = await self._handler.read(http, ChatRequest)
        return await self._handler.generate(http, request, ChatSerializer)

    async def generate(self, http: web.Request) -> web.StreamResponse:
        request = await self._handler.read(http, GenerateRequest)
        return await self._handler.generate(http, request, GenerateSerializer)

    async def embeddings(self, http: web.Request) -> web.StreamResponse:
        return await self._pool(http, EmbeddingRequest)

    async def score(self, http: web.Request) -> web.StreamResponse:
        return await self._pool(http, ScoreRequest)

    async def rerank(self, http: web.Request) -> web.StreamResponse:
        return await self._pool(http, RerankRequest)

    async def invocations(self, http: web.Request) -> web.StreamResponse:
        """Serve any of five kinds of requests, distinguished by their fields."""
        self._service.ready_engine()
        limits = self._service.config.limits
        fields = await self._handler.bodies.decode(http, lambda body: fields_of(body, limits))
        endpoints = {
            ChatRequest: self.chat_completions,
            CompletionRequest: self.completions,
            RerankRequest: self.rerank,
            ScoreRequest: self.score,
            EmbeddingRequest: self.embeddings,
        }
        for kind, names in INVOKED.items():
            if fields & names:
                endpoint = endpoints[kind]
                http[EXCHANGE].log.handler = endpoint.__name__
                return await endpoint(http)
        raise RequestError(
            "messages is required for a chat; other bodies need prompt (completion), input "
            "(embedding), query and documents (reranking), or text_1 and text_2 (score)",
            param="messages",
        )

    async def models(self, http: web.Request) -> web.StreamResponse:
        cards = list(model_cards(self._service).values())
        return encoded_response(Models(data=cards))

    async def model(self, http: web.Request) -> web.StreamResponse:
        name, cards = http.match_info["name"], model_cards(self._service)
        if name not in cards:
            raise UnknownModelError.listing(list(cards), name)
        return encoded_response(cards[name])

    async def load_lora_adapter(self, http: web.Request) -> web.StreamResponse:
        service = self._service
        engine, folder = service.ready_engine(), service.config.lora_folder
        request = await self._handler.decode_form(http, LoadLoraRequest)
        return web.Response(text=await loras.load(engine, request, folder, service.model_name))

    async def unload_lora_adapter(self, http: web.Request) -> web.StreamResponse:
        engine, folder = self._service.ready_engine(), self._service.config.lora_folder
        request = await self._handler.decode_form(http, UnloadLoraRequest)
        return web.Response(text=await loras.unload(engine, request, folder))

    async def tokenize(self, http: web.Request) -> web.StreamResponse:
        engine = self._service.ready_engine()
        request = await self._handler.decode(http, TokenizeRequest)
        request.check_sampling()
        return encoded_response(await tokens.tokenize(engine, request, self._text_work(http)))

    async def detokenize(self, http: web.Request) -> web.StreamResponse:
        engine = self._service.ready_engine()
        request = await self._handler.decode(http, DetokenizeRequest)
        request.check_sampling()
        return encoded_response(await tokens.detokenize(engine, request, self._text_work(http)))

    async def tokenizer_info(self, http: web.Request) -> web.StreamResponse:
        return encoded_response(tokens.tokenizer_info(self._service.ready_engine()))

    async def _pool(self, http: web.Request, kind: type[PoolingRequest]) -> web.StreamResponse:
        request = await self._handler.read(http, kind)
        exchange = http[EXCHANGE]
        generation = await operations.begin_pooling(
            self._service,
            request,
            unique_id=lambda: exchange.adopt_id(request.request_id),
            cache_salt=tenant_salt(http, request.cache_salt),
            tenant=http.get(TENANT, ""),
            lora=exchange.lora,
        )
        exchange.log.generation = generation
        try:
            return json_response(
                await operations.pooled_response(self._service, request, generation)
            )
        finally:
            generation.close()

    def _text_work(self, http: web.Request) -> TextWork:
        return self._service.text_work(http.get(TENANT, ""))
