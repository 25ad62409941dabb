"""The endpoints of OpenAI's Responses API, over HTTP and over a WebSocket."""

from __future__ import annotations

from typing import ClassVar, cast

import msgspec
from aiohttp import web

from forge_jax.errors import RequestError
from forge_jax.host.panics import is_panic
from forge_serve.errors import error_reply
from forge_serve.generation.generation import Generation
from forge_serve.http.auth import TENANT
from forge_serve.http.exchange import EXCHANGE, Exchange
from forge_serve.http.query import is_true, whole_number
from forge_serve.http.replies import encoded_response, json_response, send
from forge_serve.http.request_logs import CLIENT_CLOSED, RequestLogs
from forge_serve.http.routes import Route, delete, get, post
from forge_serve.openai import operations
from forge_serve.openai.handler import GenerationHandler
from forge_serve.openai.validation import check_converted, glance
from forge_serve.responses_api.compaction import CompactRequest, CompactSerializer
from forge_serve.responses_api.events import ResponsesSerializer
from forge_serve.responses_api.items import Item
from forge_serve.responses_api.lifecycle import ResponseLifecycle
from forge_serve.responses_api.replay import Replay
from forge_serve.responses_api.requests import (
    PATH,
    MessageHead,
    ResponseCreate,
    ResponsesChat,
    ResponsesRequest,
)
from forge_serve.responses_api.response_types import (
    DeletedResponse,
    InputItems,
    InputTokens,
    Listed,
)
from forge_serve.responses_api.store import LocalResponses, StoredResponse
from forge_serve.responses_api.websocket import (
    Message,
    ResponsesSocket,
    SocketSerializer,
    SocketStream,
)

# `input_tokens` and `compact` are not response ids but endpoints.
RESPONSE_PATH = PATH + "/{id:(?!(?:input_tokens|compact)$)[^/{}]+}"
MAX_PAGE, DEFAULT_PAGE = 100, 20  # input items in one response
SOCKET_METHOD = "WEBSOCKET"  # the method of a WebSocket message in logs and metrics
LOCAL = web.RequestKey("local", LocalResponses)  # set for messages of a WebSocket

_item = msgspec.json.Decoder(Item).decode


class ResponsesEndpoints:
    """Handlers of the endpoints under /v1/responses.

    Args:
      logs: receives an entry for each WebSocket message. Entries of HTTP requests are opened
        elsewhere.
    """

    ROUTES: ClassVar[tuple[Route, ...]] = (
        post("responses", PATH),
        get("responses_socket", PATH),
        post("count_input_tokens", f"{PATH}/input_tokens"),
        post("compact_response", f"{PATH}/compact"),
        get("response", RESPONSE_PATH),
        delete("delete_response", RESPONSE_PATH),
        post("cancel_response", f"{RESPONSE_PATH}/cancel"),
        get("input_items", f"{RESPONSE_PATH}/input_items"),
    )

    def __init__(self, handler: GenerationHandler, logs: RequestLogs):
        self._handler = handler
        self._service = handler.service
        self._store = handler.service.responses
        self._lifecycle = ResponseLifecycle(self._store)
        self._logs = logs

    # ---- generating ----------------------------------------------------------------------------

    async def responses(self, http: web.Request) -> web.StreamResponse:
        generation, serializer = await self._begin(http, ResponsesRequest, ResponsesSerializer)
        response = self._lifecycle.begin(serializer, _tenant(http), None)
        if response is not None and response.background:
            return await self._run_in_background(http, response, generation, serializer)
        try:
            return await self._handler.respond(http, generation, serializer)
        finally:
            generation.close()
            self._lifecycle.end(response, generation, serializer)

    async def compact_response(self, http: web.Request) -> web.StreamResponse:
        request = await self._handler.read(http, CompactRequest)
        chat = await self._chat(http, request)
        return await self._handler.generate(http, chat, CompactSerializer, stored=True)

    async def count_input_tokens(self, http: web.Request) -> web.StreamResponse:
        self._service.ready_engine()
        request = await self._handler.decode(http, ResponsesRequest)
        chat = await self._chat(http, request)
        number = await operations.count_prompt_tokens(self._service, chat, _tenant(http))
        return encoded_response(InputTokens(input_tokens=number))

    async def _begin[Serializer: ResponsesSerializer](
        self,
        http: web.Request,
        kind: type[ResponsesRequest],
        serializer_type: type[Serializer],
    ) -> tuple[Generation, Serializer]:
        request = await self._handler.read(http, kind)
        chat = await self._chat(http, request)
        return await self._handler.begin(http, chat, serializer_type, stored=True)

    async def _chat(self, http: web.Request, request: ResponsesRequest) -> ResponsesChat:
        limits = self._service.config.limits
        translate = self._lifecycle.translation(request, _tenant(http), http.get(LOCAL))

        def checked() -> ResponsesChat:
            chat = translate()
            try:
                check_converted(chat, limits)
            except RequestError as error:
                raise chat.translate_params(error) from error
            return chat

        return await self._handler.bodies.parse(http, checked)

    async def _run_in_background(
        self,
        http: web.Request,
        response: StoredResponse,
        generation: Generation,
        serializer: ResponsesSerializer,
    ) -> web.StreamResponse:
        exchange = http[EXCHANGE]
        log = exchange.log
        log.goes_on, log.tenant, log.request_id = True, http.get(TENANT), exchange.request_id

        def ended(error: str | None) -> None:
            log.error = error
            log.end(200)

        self._lifecycle.run_in_background(response, generation, serializer, ended)
        if response.log is not None:
            return await self._replay(http, response, first=0)
        return json_response(response.body())

    # ---- stored responses ----------------------------------------------------------------------

    async def response(self, http: web.Request) -> web.StreamResponse:
        """Return a stored response, or replay the events of a background response."""
        response = self._find(http)
        if not is_true(http, "stream"):
            return json_response(response.body())
        if response.log is None:
            raise RequestError(
                "stream: only responses created with background and stream can be replayed",
                param="stream",
            )
        return await self._replay(
            http, response, first=whole_number(http, "starting_after", -1) + 1
        )

    async def cancel_response(self, http: web.Request) -> web.Response:
        """Cancel a background response. A finished one stays unchanged."""
        response = self._find(http)
        if not response.background:
            raise RequestError(
                "only background responses can be cancelled; to end another one, close its "
                "connection"
            )
        if response.cancel is not None:
            response.cancel()
        return json_response(response.body())

    async def delete_response(self, http: web.Request) -> web.Response:
        response = self._find(http)
        if response.cancel is not None:
            response.cancel()
        self._store.delete(response)
        return encoded_response(DeletedResponse(id=response.id))

    async def input_items(self, http: web.Request) -> web.Response:
        """Return a page of the items in the response's input."""
        items = self._find(http).turn.input_items()
        order = http.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError("order must be asc or desc", param="order")
        limit = whole_number(http, "limit", DEFAULT_PAGE)
        if not 1 <= limit <= MAX_PAGE:
            raise RequestError(f"limit must be between 1 and {MAX_PAGE}", param="limit")
        if order == "desc":
            items.reverse()
        ids = [_item(item).id for item in items]
        after, begin = http.query.get("after"), 0
        if after is not None:
            if after not in ids:
                raise RequestError("after must be the id of one of the items", param="after")
            begin = ids.index(after) + 1
        page = slice(begin, begin + limit)
        shown = ids[page]
        answer = InputItems(
            data=cast(list[Listed], [msgspec.Raw(item) for item in items[page]]),
            first_id=shown[0] if shown else None,
            last_id=shown[-1] if shown else None,
            has_more=begin + limit < len(items),
        )
        return encoded_response(answer)

    def _find(self, http: web.Request) -> StoredResponse:
        """Return the response of the path.

        Raises:
          UnknownResponseError: the response is not stored.
        """
        return self._store.get(_tenant(http), http.match_info["id"])

    async def _replay(
        self, http: web.Request, response: StoredResponse, *, first: int
    ) -> web.StreamResponse:
        assert response.log is not None
        stall_s = self._service.timeouts.write_stall_s
        return await send(http, Replay(http, response.log, first, stall_s=stall_s), stall_s=stall_s)

    # ---- over a WebSocket ----------------------------------------------------------------------

    async def responses_socket(self, http: web.Request) -> web.StreamResponse:
        service = self._service
        service.ready_engine()
        socket = ResponsesSocket(
            http,
            LocalResponses(self._store),
            max_bytes=service.config.limits.body_bytes,
            stall_s=service.timeouts.write_stall_s,
            answer=self._answer_message,
        )
        service.sockets.add(socket)
        try:
            return await socket.run()
        finally:
            service.sockets.discard(socket)

    async def _answer_message(self, socket: ResponsesSocket, message: Message) -> None:
        """Answer one message as a separate request, with its own log entry and metrics."""
        http = _message_request(socket, self._logs)
        exchange = http[EXCHANGE]
        head, status = MessageHead(), CLIENT_CLOSED
        try:
            if isinstance(message, Exception):
                raise message
            exchange.message, exchange.body_bytes = message, len(message)
            limits = self._service.config.limits
            head = await self._handler.bodies.parse(
                http, lambda: glance(message, MessageHead, limits)
            )
            head.check()
            await self._respond_to_message(http, socket)
            status = CLIENT_CLOSED if exchange.client_left else 200
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            reply = error_reply(error)
            exchange.log.error, status = reply.name, reply.status
            socket.refuse(reply, head.valid_stream_id)
        finally:
            if exchange.log.error is not None and isinstance(head.previous_response_id, str):
                socket.local.forget(head.previous_response_id)
            self._logs.close(http, status)

    async def _respond_to_message(self, http: web.Request, socket: ResponsesSocket) -> None:
        generation, serializer = await self._begin(http, ResponseCreate, SocketSerializer)
        response = self._lifecycle.begin(serializer, _tenant(http), socket.local)
        stall_s = self._service.timeouts.write_stall_s
        try:
            stream = SocketStream(http, generation, serializer, socket, stall_s=stall_s)
            await send(http, stream, stall_s=stall_s)
        finally:
            generation.close()
            self._lifecycle.end(response, generation, serializer)
        if http[EXCHANGE].log.error is not None:
            socket.local.forget(serializer.id)


def _message_request(socket: ResponsesSocket, logs: RequestLogs) -> web.Request:
    """Return a request that represents the WebSocket's current message."""
    http = socket.http.clone()
    request_id = f"{socket.http[EXCHANGE].request_id}-{socket.num_messages}"
    log = logs.open(http, request_id)
    log.method, log.handler, log.stream = SOCKET_METHOD, "responses", True
    http[EXCHANGE] = Exchange(request_id=request_id, log=log)
    http[LOCAL] = socket.local
    return http


def _tenant(http: web.Request) -> str:
    return http.get(TENANT, "")
