"""The HTTP application: routes, and how a generation becomes an answer.

It owns no policy of its own: requests are read by `protocol`, answers are written by `responses`,
and the engine decides what runs. Nothing here can block the engine: a slow reader only holds up
its own answer, and one that takes nothing for `WRITE_STALL_S` is given up.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from aiohttp import hdrs, web

from forge_jax.config.suggest import did_you_mean
from forge_jax.errors import RequestError
from forge_jax.host.panics import is_panic
from forge_serve.anthropic import messages
from forge_serve.anthropic.messages import MessagesRequest, MessagesSerializer
from forge_serve.anthropic.response_types import CountAnswer
from forge_serve.config import ServerConfig
from forge_serve.errors import (
    BodyTimeoutError,
    NotReadyError,
    TransferCodingError,
    UnknownModelError,
    UnknownPathError,
    error_reply,
)
from forge_serve.generation.generation import Generation
from forge_serve.generation.workers import TextWork, Workers
from forge_serve.http.auth import TENANT, ApiKeys, tenant_salt
from forge_serve.http.browsers import BrowserGuard
from forge_serve.http.connections import only_chunked
from forge_serve.http.content_coding import content_coding, decompressed
from forge_serve.http.cors import Cors
from forge_serve.http.memory import MemoryGuard
from forge_serve.http.sse import EventStream
from forge_serve.limits import Limits
from forge_serve.openai import loras, tokens
from forge_serve.openai import operations as answering
from forge_serve.openai.chat_output import ChatAnswers
from forge_serve.openai.embeddings import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from forge_serve.openai.loras import LoadLoraRequest, UnloadLoraRequest
from forge_serve.openai.openapi import INVOKED
from forge_serve.openai.prompts import encode_prompts
from forge_serve.openai.requests import (
    REQUEST_ID,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    GenerationRequest,
    TokenizeRequest,
)
from forge_serve.openai.response_types import ModelCard, Models
from forge_serve.openai.serializers import (
    ChatSerializer,
    CompletionSerializer,
    GenerateSerializer,
    ResponseSerializer,
)
from forge_serve.openai.validation import (
    SMALL_BODY_BYTES,
    check_converted,
    decode,
    decode_form,
    fields_of,
    glance,
)
from forge_serve.openapi.schema import About
from forge_serve.parsers.families import families
from forge_serve.responses_api.compaction import CompactRequest, CompactSerializer
from forge_serve.responses_api.endpoints import (
    LOCAL,
    StoredResponses,
    json_response,
    whole_number,
)
from forge_serve.responses_api.events import ResponsesSerializer
from forge_serve.responses_api.replay import Replay
from forge_serve.responses_api.requests import MessageHead, ResponseCreate, ResponsesRequest
from forge_serve.responses_api.response_types import InputTokens
from forge_serve.responses_api.store import LocalResponses, ResponseStore
from forge_serve.responses_api.websocket import (
    Message,
    ResponsesSocket,
    SocketSerializer,
    SocketStream,
)
from forge_serve.server import openapi, routes
from forge_serve.server.page import Page
from forge_serve.server.profiles import Profiles
from forge_serve.telemetry import info
from forge_serve.telemetry.engine_view import EngineView
from forge_serve.telemetry.metrics import CONTENT_TYPE, Metrics
from forge_serve.telemetry.request_log import RequestLog
from forge_serve.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from forge_jax.engine.adapters import LoadedAdapter
    from forge_jax.engine.async_engine import AsyncEngine

BODY_S = 60.0  # for the body of a request to arrive
WRITE_STALL_S = 30.0
SERVES = ("serving", "ready")  # states; "ready" is when nothing is left to be compiled
MAX_NAMES, MAX_NAME_CHARS = 5, 64  # of served models, in an error
CLIENT_CLOSED = 499  # what the log and the metrics call an answer that nobody waited for
OVER_WEBSOCKET = "WEBSOCKET"  # likewise the method of a WebSocket's message

log = logging.getLogger(__name__)

_ids = random.Random()
_REQUEST_LOG = web.RequestKey("trail", RequestLog)
_LORA = web.RequestKey("lora", str)  # the adapter that the model's name means, if it does
_REQUEST_ID_KEY = web.RequestKey("request_id", str)
_CLIENTS_ID = web.RequestKey("clients_id", bool)  # whether a header of the client's has it
_BODY_BYTES = web.RequestKey("body_bytes", int)
_MESSAGE = web.RequestKey("message", bytes)  # of a WebSocket, in the place of a body
_CLIENT_LEFT = web.RequestKey("client_left", bool)  # in the middle of a stream, or was given up

Kind = type[CompletionRequest | ChatRequest | GenerateRequest | MessagesRequest | ResponsesRequest]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Service:
    """The server's state: an engine as soon as there is one, and whether it takes requests.

    Raises `ConfigError` if its API keys cannot be read, or OpenTelemetry is not there.
    """

    def __init__(self, config: ServerConfig):
        self.config = config
        self.api_keys = ApiKeys.of(config)
        self.engine: AsyncEngine | None = None
        self.stopping = False
        self._broken = False  # a part of the server has failed that it cannot do without
        self.created_s = int(time.time())
        self.metrics = Metrics(lambda: self.model_name, lambda: self.engine, lambda: self.state)
        self.tracing = Tracing.of(config)
        self.memory = MemoryGuard(config.memory_watermark, self._shed)
        self.profiles = Profiles(config.profile_dir)
        self.workers = Workers()
        self.responses = ResponseStore(config.max_stored_responses, config.max_stored_bytes)
        self.sockets: set[ResponsesSocket] = set()  # the WebSockets that are open

    @property
    def model_name(self) -> str:
        if self.config.served_model_name is not None:
            return self.config.served_model_name
        return "" if self.engine is None else self.engine.name

    @property
    def state(self) -> info.ServerState:
        """In one word; requests are served when it is "serving" or "ready"."""
        if self.stopping:
            return "stopping"
        if self.engine is None:
            return "starting"
        if self._broken:
            return "failed"
        stats = self.engine.stats()
        if stats.state not in SERVES:
            return stats.state
        if not stats.healthy:
            return "failed"
        return "stalled" if stats.stalled_s > self.config.stall_timeout_s else stats.state

    def stop(self) -> None:
        """Refuses what is new. WebSockets are closed as soon as they have no response."""
        self.stopping = True
        for socket in list(self.sockets):
            socket.stop()

    def fail(self, error: BaseException) -> None:
        """Have /health report "failed": a task that the server cannot do without has ended."""
        self._broken = True

    def request_log(self, http: web.Request) -> RequestLog:
        """Of a request that has just arrived."""
        return RequestLog(
            request_id=http[_REQUEST_ID_KEY],
            method=http.method if http.method in hdrs.METH_ALL else "other",
            path=routes.label(http),
            handler=None if http.match_info.http_exception else http.match_info.handler.__name__,
            logs=self.config.request_log,
            tracing=self.tracing,
            headers=None if self.tracing is None else self.tracing.carried(http.headers),
        )

    def _shed(self) -> bool:
        return self.engine is not None and self.engine.shed()

    def ready_engine(self) -> AsyncEngine:
        """Raises `NotReadyError` while the server is starting or stopping."""
        if self.stopping:
            raise NotReadyError("the server is shutting down")
        if self.engine is None:
            raise NotReadyError("the server is starting: the model is being loaded")
        return self.engine

    def timeout_s(self, asked: float | None) -> float | None:
        """How long a request may take that asks for so long: the server's limit holds for all."""
        most = self.config.request_timeout_s
        return most if asked is None else asked if most is None else min(asked, most)

    def chat_answers(self, request: ChatRequest) -> ChatAnswers:
        """How the answers to a chat are to be read.

        Raises:
          RequestError: it has tools that this server cannot serve.
        """
        engine, config = self.ready_engine(), self.config
        model = families(
            engine.tokenizer, engine.chat_template, config.tool_call_parser, config.reasoning_parser
        )
        return ChatAnswers.of(request, model)

    def text_work(self, tenant: str) -> TextWork:
        """The threads for texts, as one tenant may use them."""
        return TextWork(self.workers, tenant, self.config.limits.text_bytes)

    def lora_of(self, name: str | None) -> str | None:
        """The LoRA adapter that a name means; None: the model itself, as without a name.

        Raises:
          UnknownModelError: for the name of anything that is not served.
        """
        adapters = [] if self.engine is None else [each.name for each in self.engine.loras]
        if name in adapters and name != self.model_name:
            return name
        if name is None or name == self.model_name or self.config.accept_any_model:
            return None
        raise UnknownModelError(_unknown_model(name, [self.model_name, *adapters]), param="model")


def _unknown_model(name: str, served: Sequence[str]) -> str:
    """Names the models that are served, as `/v1/models` does, and nothing of the request."""
    shown = [each[:MAX_NAME_CHARS] for each in served[:MAX_NAMES]]
    more = f" and {len(served) - MAX_NAMES} more" if len(served) > MAX_NAMES else ""
    similar = did_you_mean(name, served) if len(served) > 1 else ""
    return (
        f"the model is not served here: use {' or '.join(shown)}{more}, or leave model out{similar}"
    )


def make_app(service: Service) -> web.Application:
    """The application. To be run with `handler_cancellation=True`: leaving must stop the work."""
    endpoints, cors = _Endpoints(service), Cors(service.config.cors_origin)
    guard = BrowserGuard(service.config, has_keys=bool(service.api_keys))
    app = web.Application(
        middlewares=[
            *(endpoints.envelope, only_chunked, guard.middleware),
            *(cors.middleware, service.api_keys.middleware),
        ],
        client_max_size=service.config.limits.body_bytes,
    )
    app.on_response_prepare.append(_add_headers)
    app.on_response_prepare.append(cors.add_headers)
    routes.add_routes(app, endpoints, endpoints.stored)
    app.add_routes(Page().routes())
    return app


class _Endpoints:
    def __init__(self, service: Service):
        self._service = service
        self._document: bytes | None = None  # of /openapi.json, once somebody has asked
        self.stored = StoredResponses(service.responses)
        self._view = EngineView()

    async def completions(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, CompletionRequest, CompletionSerializer)

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, ChatRequest, ChatSerializer)

    async def messages(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, MessagesRequest, MessagesSerializer)

    async def count_tokens(self, http: web.Request) -> web.StreamResponse:
        number = await self._num_prompt_tokens(http, MessagesRequest)
        return _json_response(CountAnswer(number))

    async def count_input_tokens(self, http: web.Request) -> web.StreamResponse:
        number = await self._num_prompt_tokens(http, ResponsesRequest)
        return _json_response(InputTokens(input_tokens=number))

    async def compact_response(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, CompactRequest, CompactSerializer)

    async def _num_prompt_tokens(self, http: web.Request, kind: Kind) -> int:
        engine = self._service.ready_engine()
        request = await self._read(http, kind)
        assert isinstance(request, ChatRequest)
        try:
            params = request.sampling_params()
            self._service.chat_answers(request)
            work = self._text_work(http)
            [prompt] = await encode_prompts(engine, request, params.max_tokens, work)
        except RequestError as error:
            raise request.translate_params(error) from error
        return len(prompt.token_ids)

    def _text_work(self, http: web.Request) -> TextWork:
        return self._service.text_work(http.get(TENANT, ""))

    async def responses(self, http: web.Request) -> web.StreamResponse:
        generation, serializer = await self._begin(http, ResponsesRequest, ResponsesSerializer)
        response = self.stored.begin(http, serializer)
        if response is not None and response.background:
            request_log = http[_REQUEST_LOG]
            request_log.goes_on, request_log.tenant = True, http.get(TENANT)
            request_log.request_id = http[_REQUEST_ID_KEY]

            def ended(error: str | None) -> None:
                request_log.error = error
                request_log.end(200)

            self.stored.run_in_background(response, generation, serializer, ended)
            if response.log is not None:
                return await _send(http, Replay(http, response.log, 0, stall_s=WRITE_STALL_S))
            return json_response(response.body())
        try:
            return await self._answer(http, generation, serializer)
        finally:
            generation.close()
            self.stored.end(response, generation, serializer)

    async def responses_socket(self, http: web.Request) -> web.StreamResponse:
        service = self._service
        service.ready_engine()
        socket = ResponsesSocket(
            http,
            LocalResponses(service.responses),
            max_bytes=service.config.limits.body_bytes,
            stall_s=WRITE_STALL_S,
            answer=self._answer_message,
        )
        service.sockets.add(socket)
        try:
            return await socket.run()
        finally:
            service.sockets.discard(socket)

    async def _answer_message(self, socket: ResponsesSocket, message: Message) -> None:
        """What `envelope` is around a request, around a message of a WebSocket."""
        http = socket.http.clone()
        http[_REQUEST_ID_KEY] = f"{http[_REQUEST_ID_KEY]}-{socket.num_messages}"
        http[_CLIENTS_ID], http[LOCAL] = False, socket.local
        request_log = http[_REQUEST_LOG] = self._service.request_log(http)
        request_log.method, request_log.handler, request_log.stream = (
            OVER_WEBSOCKET,
            "responses",
            True,
        )
        head, status = MessageHead(), CLIENT_CLOSED
        try:
            if isinstance(message, Exception):
                raise message
            http[_MESSAGE], http[_BODY_BYTES] = message, len(message)
            limits = self._service.config.limits
            head = await self._read_apart(http, lambda: glance(message, MessageHead, limits))
            head.check()
            await self._respond(http, socket)
            status = CLIENT_CLOSED if http.get(_CLIENT_LEFT) else 200
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            reply = error_reply(error)
            request_log.error, status = reply.name, reply.status
            socket.refuse(reply, head.valid_stream_id)
        finally:
            if request_log.error is not None and isinstance(head.previous_response_id, str):
                socket.local.forget(head.previous_response_id)
            self._count(http, status)

    async def _respond(self, http: web.Request, socket: ResponsesSocket) -> None:
        generation, serializer = await self._begin(http, ResponseCreate, SocketSerializer)
        response = self.stored.begin(http, serializer)
        try:
            stall_s = WRITE_STALL_S
            await _send(http, SocketStream(http, generation, serializer, socket, stall_s=stall_s))
        finally:
            generation.close()
            self.stored.end(response, generation, serializer)
        if http[_REQUEST_LOG].error is not None:
            socket.local.forget(serializer.id)

    async def response(self, http: web.Request) -> web.StreamResponse:
        response = self.stored.get(http)
        if http.query.get("stream", "").lower() not in ("true", "1"):
            return json_response(response.body())
        if response.log is None:
            raise RequestError(
                "stream: only a response made with background and stream has events to send again",
                param="stream",
            )
        first = whole_number(http, "starting_after", -1) + 1
        return await _send(http, Replay(http, response.log, first, stall_s=WRITE_STALL_S))

    async def embeddings(self, http: web.Request) -> web.StreamResponse:
        return await self._pool(http, EmbeddingRequest)

    async def score(self, http: web.Request) -> web.StreamResponse:
        return await self._pool(http, ScoreRequest)

    async def rerank(self, http: web.Request) -> web.StreamResponse:
        return await self._pool(http, RerankRequest)

    async def tokenize(self, http: web.Request) -> web.StreamResponse:
        engine = self._service.ready_engine()
        request = await self._decode(http, TokenizeRequest)
        request.check_sampling()
        return _json_response(await tokens.tokenize(engine, request, self._text_work(http)))

    async def detokenize(self, http: web.Request) -> web.StreamResponse:
        engine = self._service.ready_engine()
        request = await self._decode(http, DetokenizeRequest)
        request.check_sampling()
        return _json_response(await tokens.detokenize(engine, request, self._text_work(http)))

    async def tokenizer_info(self, http: web.Request) -> web.StreamResponse:
        return _json_response(tokens.tokenizer_info(self._service.ready_engine()))

    async def version(self, http: web.Request) -> web.StreamResponse:
        return _json_response(info.Version())

    async def server_info(self, http: web.Request) -> web.StreamResponse:
        service = self._service
        engine = service.ready_engine()
        return _json_response(info.server_info(engine, service.model_name, service.state))

    async def model_info(self, http: web.Request) -> web.StreamResponse:
        engine = self._service.ready_engine()
        return _json_response(info.model_info(engine, self._service.model_name))

    async def loads(self, http: web.Request) -> web.StreamResponse:
        return _json_response(info.loads(self._service.ready_engine()))

    async def invocations(self, http: web.Request) -> web.StreamResponse:
        """SageMaker's one endpoint for every kind of request: its fields say which it is."""
        self._service.ready_engine()
        body, limits = await self._body(http), self._service.config.limits
        fields = await self._read_apart(http, lambda: fields_of(body, limits))
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
                http[_REQUEST_LOG].handler = endpoint.__name__
                return await endpoint(http)
        raise RequestError(
            "messages is required, or prompt, input, query with documents, or text_1 with text_2: "
            "the body is one of a chat, a completion, an embedding, a ranking or a score",
            param="messages",
        )

    async def ollama_tags(self, http: web.Request) -> web.StreamResponse:
        engine, service = self._service.ready_engine(), self._service
        names = [service.model_name, *(adapter.name for adapter in engine.loras)]
        return _json_response(info.ollama_tags(engine, names, service.created_s))

    async def ollama_version(self, http: web.Request) -> web.StreamResponse:
        return await self.version(http)

    async def ping(self, http: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self._service.state in SERVES else 503)

    async def load(self, http: web.Request) -> web.StreamResponse:
        stats = self._service.ready_engine().stats()
        return _json_response(info.Load(stats.num_running + stats.num_waiting))

    async def generate(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, GenerateRequest, GenerateSerializer)

    async def models(self, http: web.Request) -> web.StreamResponse:
        engine = self._service.ready_engine()
        adapters = [self._adapter_card(adapter) for adapter in engine.loras]
        return _json_response(Models(data=[self._card(), *adapters]))

    async def model(self, http: web.Request) -> web.StreamResponse:
        engine = self._service.ready_engine()
        name, own = http.match_info["name"], self._card()
        cards = {own.id: own, **{each.name: self._adapter_card(each) for each in engine.loras}}
        if name not in cards:
            raise UnknownModelError(_unknown_model(name, list(cards)), param="model")
        return _json_response(cards[name])

    async def load_lora_adapter(self, http: web.Request) -> web.StreamResponse:
        service = self._service
        engine, folder = service.ready_engine(), service.config.lora_folder
        request = await self._serializer(http, LoadLoraRequest)
        return web.Response(text=await loras.load(engine, request, folder, service.model_name))

    async def unload_lora_adapter(self, http: web.Request) -> web.StreamResponse:
        service = self._service
        engine, folder = service.ready_engine(), service.config.lora_folder
        request = await self._serializer(http, UnloadLoraRequest)
        return web.Response(text=await loras.unload(engine, request, folder))

    async def health(self, http: web.Request) -> web.StreamResponse:
        state = self._service.state
        return _json_response(info.Health(state), 200 if state in SERVES else 503)

    async def detailed_health(self, http: web.Request) -> web.StreamResponse:
        state, engine = self._service.state, self._service.engine
        answer = info.DetailedHealth(state, self._service.model_name or None)
        if engine is not None:
            stats = engine.stats()
            answer.max_model_len = engine.max_model_len
            answer.num_running, answer.num_waiting = stats.num_running, stats.num_waiting
            answer.steps = stats.steps
        return _json_response(answer, 200 if state in SERVES else 503)

    async def stats(self, http: web.Request) -> web.StreamResponse:
        engine = self._service.ready_engine()
        return _json_response(info.stats(engine, self._service.model_name))

    async def engine_state(self, http: web.Request) -> web.StreamResponse:
        engine, after_step = self._service.ready_engine(), whole_number(http, "after_step", -1)
        response = _json_response(await self._view.answer(engine, http.get(TENANT, ""), after_step))
        response.headers[hdrs.CACHE_CONTROL] = "no-store"
        return response

    async def metrics(self, http: web.Request) -> web.StreamResponse:
        text = self._service.metrics.text()
        return web.Response(body=text, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

    async def openapi(self, http: web.Request) -> web.StreamResponse:
        engine = self._service.ready_engine()
        if self._document is None:
            about = About.of(self._service.config, engine, self._service.model_name)
            document = await asyncio.to_thread(openapi.document, http.app.router, about)
            self._document = msgspec.json.encode(document)
        return web.Response(body=self._document, content_type="application/json")

    async def start_profile(self, http: web.Request) -> web.StreamResponse:
        name = await self._service.profiles.start(self._service.ready_engine())
        return _json_response(info.Profile(name))

    async def stop_profile(self, http: web.Request) -> web.StreamResponse:
        name = await self._service.profiles.stop(self._service.ready_engine())
        return _json_response(info.Profile(name))

    def _card(self) -> ModelCard:
        engine = self._service.ready_engine()
        return ModelCard(
            id=self._service.model_name,
            created=self._service.created_s,
            root=engine.name,
            max_model_len=engine.max_model_len,
        )

    def _adapter_card(self, adapter: LoadedAdapter) -> ModelCard:
        card = self._card()
        card.id, card.parent = adapter.name, self._service.model_name
        card.root = loras.shown_path(adapter.path, self._service.config.lora_folder)
        return card

    async def _generate(
        self, http: web.Request, kind: Kind, form_type: Callable[..., ResponseSerializer]
    ) -> web.StreamResponse:
        generation, serializer = await self._begin(http, kind, form_type)
        try:
            return await self._answer(http, generation, serializer)
        finally:
            generation.close()

    async def _answer(
        self, http: web.Request, generation: Generation, serializer: ResponseSerializer
    ) -> web.StreamResponse:
        http[_REQUEST_LOG].stream = serializer.streams
        if not serializer.streams:
            return _json(await answering.whole(generation, serializer))
        keep_alive_s = self._service.config.sse_keep_alive_s
        stream = EventStream(
            http, generation, serializer, stall_s=WRITE_STALL_S, keep_alive_s=keep_alive_s
        )
        return await _send(http, stream)

    async def _pool(self, http: web.Request, kind: type[PoolingRequest]) -> web.StreamResponse:
        self._service.ready_engine()
        self._service.memory.admit()
        request = await self._decode(http, kind)
        generation = await answering.begin_pooling(
            self._service,
            request,
            unique_id=lambda: _adopted_id(http, request),
            cache_salt=tenant_salt(http, request.cache_salt),
            tenant=http.get(TENANT, ""),
            lora=http.get(_LORA),
        )
        http[_REQUEST_LOG].generation = generation
        try:
            return _json(await answering.pooled(self._service, request, generation))
        finally:
            generation.close()

    async def _begin[Form: ResponseSerializer](
        self, http: web.Request, kind: Kind, form_type: Callable[..., Form]
    ) -> tuple[Generation, Form]:
        """Reads a request, and submits it. The caller has to close the generation."""
        self._service.ready_engine()
        self._service.memory.admit()
        request = await self._read(http, kind)

        def unique_id() -> str:
            adopted = _adopted_id(http, request)
            stored = issubclass(kind, ResponsesRequest)  # and found again by its id
            return _new_id() if stored else adopted

        generation, serializer = await answering.begin(
            self._service,
            request,
            form_type,
            unique_id=unique_id,
            cache_salt=tenant_salt(http, request.cache_salt),
            tenant=http.get(TENANT, ""),
            lora=http.get(_LORA),
        )
        http[_REQUEST_LOG].generation = generation
        return generation, serializer

    async def _read(
        self, http: web.Request, kind: Kind
    ) -> CompletionRequest | ChatRequest | GenerateRequest:
        request = await self._decode(http, kind)
        limits = self._service.config.limits
        if isinstance(request, MessagesRequest):
            return await self._read_apart(http, lambda: _checked(request.chat(), limits))
        if isinstance(request, ResponsesRequest):
            chat = self.stored.chat_of(http, request)

            def checked() -> ChatRequest:
                made = chat()
                try:
                    return _checked(made, limits)
                except RequestError as error:
                    raise made.translate_params(error) from error

            return await self._read_apart(http, checked)
        return request

    async def _decode[Body: GenerationRequest](self, http: web.Request, kind: type[Body]) -> Body:
        body, limits = await self._body(http), self._service.config.limits
        request = await self._read_apart(http, lambda: decode(body, kind, limits))
        lora = self._service.lora_of(request.model)
        if lora is not None:
            http[_LORA] = lora
        http[_REQUEST_LOG].model = lora or self._service.model_name
        return request

    async def _serializer[Form: msgspec.Struct](self, http: web.Request, kind: type[Form]) -> Form:
        body, limits = await self._body(http), self._service.config.limits
        return await self._read_apart(http, lambda: decode_form(body, kind, limits))

    async def _body(self, http: web.Request) -> bytes:
        if _MESSAGE in http:
            body = http[_MESSAGE]
        else:
            coding = content_coding(http.headers)
            body = await _body(http)
            if coding is not None:
                body = await self._decompressed(http, body, coding)
        http[_BODY_BYTES] = len(body)
        return body

    async def _decompressed(self, http: web.Request, body: bytes, coding: str) -> bytes:
        limit = self._service.config.limits.body_bytes
        work = partial(decompressed, body, coding, limit)
        return await self._in_thread(http, len(body), work)

    async def _read_apart[T](self, http: web.Request, read: Callable[[], T]) -> T:
        """What `read` makes of the request's body; of a large one, in a thread."""
        if http[_BODY_BYTES] <= SMALL_BODY_BYTES:
            return read()
        return await self._in_thread(http, http[_BODY_BYTES], read)

    async def _in_thread[T](self, http: web.Request, num_bytes: int, work: Callable[[], T]) -> T:
        lane, tenant = self._service.workers.bodies, http.get(TENANT, "")
        with lane.admit(tenant, num_bytes):
            return await lane.run(tenant, work)

    @web.middleware
    async def envelope(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Around every request: its id, its error as JSON, its count, its line in the log."""
        given = request.headers.get("X-Request-Id", "")
        request[_CLIENTS_ID] = REQUEST_ID.fullmatch(given) is not None
        request[_REQUEST_ID_KEY] = given if request[_CLIENTS_ID] else _new_id()
        status = CLIENT_CLOSED
        request_log = request[_REQUEST_LOG] = self._service.request_log(request)
        try:
            response = await handler(request)
            status = CLIENT_CLOSED if request.get(_CLIENT_LEFT) else response.status
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            if isinstance(error, web.HTTPNotFound):
                request_log.nearest = routes.nearest(request)
                error = UnknownPathError(request_log.nearest)
            reply = error_reply(error)
            request_log.error = reply.name
            anthropic = request.path.startswith(messages.PATH)
            response = reply.response(messages.error_body(reply) if anthropic else None)
            if isinstance(error, web.HTTPMethodNotAllowed):
                response.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
            if isinstance(error, web.RequestPayloadError | BodyTimeoutError | TransferCodingError):
                response.force_close()  # where this body ends, and the next request begins?
            status = response.status
        finally:
            self._count(request, status)
        if self._service.stopping:
            response.force_close()  # a client that stays would meet nobody here
        return response

    def _count(self, http: web.Request, status: int) -> None:
        request_log = http[_REQUEST_LOG]
        self._service.metrics.http(
            request_log.path, request_log.method, status, request_log.seconds
        )
        if not request_log.goes_on:
            request_log.request_id, request_log.tenant = http[_REQUEST_ID_KEY], http.get(TENANT)
            request_log.end(status)


def _json_response(answer: object, status: int = 200) -> web.Response:
    return _json(msgspec.json.encode(answer), status)


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _checked(request: ChatRequest, limits: Limits) -> ChatRequest:
    check_converted(request, limits)
    return request


async def _body(http: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await http.read()
    except TimeoutError as error:
        raise BodyTimeoutError(f"the body did not arrive within {BODY_S:.0f} s") from error


def _adopted_id(http: web.Request, request: GenerationRequest) -> str:
    """What names a request everywhere: the client's header, or its field, or neither."""
    if request.request_id is not None and not http[_CLIENTS_ID]:
        http[_REQUEST_ID_KEY] = request.request_id
    return http[_REQUEST_ID_KEY]


def _new_id() -> str:
    """128 random bits. Not a secret: `uuid4` would ask the kernel for each, 9 us."""
    return f"{_ids.getrandbits(128):032x}"


async def _add_headers(http: web.Request, response: web.StreamResponse) -> None:
    response.headers[hdrs.SERVER] = "forge-jax"
    request_id = http.get(_REQUEST_ID_KEY)
    if request_id is not None:
        response.headers["X-Request-Id"] = request_id


async def _send(http: web.Request, stream: EventStream | Replay) -> web.StreamResponse:
    try:
        await stream.run()
        if isinstance(stream, EventStream):
            http[_REQUEST_LOG].error = stream.error
    except TimeoutError:
        http[_CLIENT_LEFT] = True
        log.warning("gave up a client that read nothing for %.0f s", WRITE_STALL_S)
        if http.transport is not None:
            http.transport.abort()
    except ConnectionError:
        http[_CLIENT_LEFT] = True  # the caller aborts the generation
    return stream.response
