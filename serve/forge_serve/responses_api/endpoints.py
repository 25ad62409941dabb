"""The endpoints under /v1/responses, as far as they are about what is stored, and responses in the
background, which go on whether or not somebody waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import msgspec
from aiohttp import web

from forge_jax.errors import RequestError
from forge_jax.host import supervise
from forge_serve.errors import error_reply
from forge_serve.generation.generation import Generation, Updates
from forge_serve.http.auth import TENANT
from forge_serve.responses_api.events import ResponsesSerializer
from forge_serve.responses_api.items import Item, input_items
from forge_serve.responses_api.requests import PATH, ResponsesChat, ResponsesRequest
from forge_serve.responses_api.response_types import DeletedResponse, InputItems, Listed
from forge_serve.responses_api.store import (
    EventLog,
    LocalResponses,
    ResponseStore,
    StoredResponse,
    Turn,
)

# `input_tokens` and `compact` are other endpoints.
RESPONSE_PATH = PATH + "/{id:(?!(?:input_tokens|compact)$)[^/{}]+}"
MAX_PAGE, DEFAULT_PAGE = 100, 20  # input items in one answer
LOCAL = web.RequestKey("local", LocalResponses)  # those of the WebSocket, of one of its messages

_json = msgspec.json.Encoder().encode
_item = msgspec.json.Decoder(Item).decode


class StoredResponses:
    """What requests are told of stored responses, and what is kept of them."""

    def __init__(self, store: ResponseStore):
        self._store = store

    def routes(self) -> list[web.RouteDef]:
        """Those that need nothing but the store."""
        return [
            web.delete(RESPONSE_PATH, self.delete_response),
            web.post(f"{RESPONSE_PATH}/cancel", self.cancel_response),
            web.get(f"{RESPONSE_PATH}/input_items", self.input_items),
        ]

    def chat_of(self, http: web.Request, request: ResponsesRequest) -> Callable[[], ResponsesChat]:
        """What makes the same as a chat, with the conversation that it continues; in any thread.

        Raises:
          UnknownResponseError: the previous response is not here; over a WebSocket a
            PreviousResponseNotFoundError.
          RequestError: it has not finished, or nothing is stored here at all.
        """
        if not self._store.keeps:
            for name in ("background", "store"):
                if getattr(request, name):
                    raise RequestError(
                        f"{name}: this server stores no responses (--max-stored-responses): "
                        "leave it out",
                        param=name,
                    )
        previous = None
        if request.previous_response_id is not None:
            find = self._store.get if (local := http.get(LOCAL)) is None else local.previous
            response = find(
                _tenant(http), request.previous_response_id, param="previous_response_id"
            )
            if response.running:
                raise RequestError(
                    "previous_response_id: that response has not finished yet",
                    param="previous_response_id",
                )
            previous = response.turn
        return partial(request.chat, previous, kept=request.stored and self._store.keeps)

    def begin(self, http: web.Request, serializer: ResponsesSerializer) -> StoredResponse | None:
        """Enters a response that is to be stored, or that its WebSocket can go on from."""
        local = None if serializer.kept else http.get(LOCAL)
        if not serializer.kept and local is None:
            return None
        items = list(input_items(serializer.asked.given, serializer.unique_id))
        response = StoredResponse(
            serializer.id,
            _tenant(http),
            Turn(serializer.previous, _json(items)),
            serializer.snapshot,
            background=serializer.background,
            local=local,
        )
        self._store.begin(response)
        if local is not None:
            local.add(response)
        if not serializer.background:  # a client that has been told it is over may go on from it
            serializer.when_concluded = partial(self._keep, response, serializer)
        return response

    def end(
        self,
        response: StoredResponse | None,
        generation: Generation,
        serializer: ResponsesSerializer,
    ) -> None:
        """Ends the response of a client that has been answered, or has gone."""
        if response is None or serializer.concluded:
            return
        if serializer.streams:  # so the client has its id
            serializer.cancel_events(generation.usage)
        else:
            self._store.delete(response)

    def _keep(self, response: StoredResponse, serializer: ResponsesSerializer) -> None:
        self._store.finish(response, serializer.head, serializer.output)

    def run_in_background(
        self,
        response: StoredResponse,
        generation: Generation,
        serializer: ResponsesSerializer,
        ended: Callable[[str | None], None],
    ) -> None:
        """Calls `ended` when it is over, with what its failure is called, if it failed."""
        _Background(self._store, response, generation, serializer, ended)

    def get(self, http: web.Request) -> StoredResponse:
        """The response of the path.

        Raises:
          UnknownResponseError: it is not here.
        """
        return self._store.get(_tenant(http), http.match_info["id"])

    async def cancel_response(self, http: web.Request) -> web.Response:
        """Ends a response in the background; one that is over stays as it is."""
        response = self.get(http)
        if not response.background:
            raise RequestError(
                "only a response in the background can be cancelled; the others end when their "
                "connection is closed"
            )
        if response.cancel is not None:
            response.cancel()
        return json_response(response.body())

    async def delete_response(self, http: web.Request) -> web.Response:
        response = self.get(http)
        if response.cancel is not None:
            response.cancel()
        self._store.delete(response)
        return json_response(_json(DeletedResponse(id=response.id)))

    async def input_items(self, http: web.Request) -> web.Response:
        """A page of the items that the response was made from."""
        items = self.get(http).turn.input_items()
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
                raise RequestError("after is none of these items", param="after")
            begin = ids.index(after) + 1
        page = slice(begin, begin + limit)
        shown = ids[page]
        answer = InputItems(
            data=cast(list[Listed], [msgspec.Raw(item) for item in items[page]]),
            first_id=shown[0] if shown else None,
            last_id=shown[-1] if shown else None,
            has_more=begin + limit < len(items),
        )
        return json_response(_json(answer))


class _Background:
    """A response that goes on by itself, as the engine's news come."""

    def __init__(
        self,
        store: ResponseStore,
        response: StoredResponse,
        generation: Generation,
        serializer: ResponsesSerializer,
        ended: Callable[[str | None], None],
    ):
        self._ended = ended
        self._store = store
        self._response = response
        self._generation = generation
        self._serializer = serializer
        response.cancel = self._cancel
        if serializer.streams:
            response.log = EventLog()
            response.log.add(serializer.beginning_events())
        generation.begin(self._take)

    def _take(self, updates: Updates) -> None:
        for choice, delta in updates:
            if self._response.log is None:
                self._serializer.add(choice, delta)
            else:
                self._response.log.add(self._serializer.delta_events(delta))
        if not self._generation.over:
            return
        failure = self._generation.failure
        if failure is None:
            self._finish(self._serializer.end_events(self._generation.usage))
        else:
            reply = error_reply(failure)
            self._finish(self._serializer.error_events(reply), reply.name)

    def _cancel(self) -> None:
        self._finish(self._serializer.cancel_events(self._generation.usage))

    def _finish(self, events: Sequence[bytes], error: str | None = None) -> None:
        self._generation.close()
        if self._response.log is not None:
            self._response.log.add(events, last=True)
        self._store.finish(self._response, self._serializer.head, self._serializer.output)
        supervise.guarded(self._ended, "the log line of a response", None)(error)


def whole_number(http: web.Request, name: str, default: int) -> int:
    """A number in the query.

    Raises:
      RequestError: it is none.
    """
    text = http.query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise RequestError(f"{name} must be a whole number", param=name)
    return int(text)


def json_response(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _tenant(http: web.Request) -> str:
    return http.get(TENANT, "")
