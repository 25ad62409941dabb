"""The lifecycle of stored responses.

A response is entered into the store when it begins, and finished there with its last event. A
background response runs even if no client waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from forge_jax.errors import RequestError
from forge_jax.host import supervise
from forge_serve.errors import error_reply
from forge_serve.generation.generation import Generation, Updates
from forge_serve.responses_api.events import ResponsesSerializer
from forge_serve.responses_api.items import input_items
from forge_serve.responses_api.requests import ResponsesChat, ResponsesRequest
from forge_serve.responses_api.store import (
    EventLog,
    LocalResponses,
    ResponseStore,
    StoredResponse,
    Turn,
)

_json = msgspec.json.Encoder().encode


class ResponseLifecycle:
    """Enters responses into a store and finishes them."""

    def __init__(self, store: ResponseStore):
        self._store = store

    def translation(
        self, request: ResponsesRequest, tenant: str, local: LocalResponses | None
    ) -> Callable[[], ResponsesChat]:
        """Return a thread-safe function that converts a request to a chat.

        The chat includes the conversation that the request continues.

        Args:
          local: the responses of the request's WebSocket; None: the request came over HTTP.

        Raises:
          UnknownResponseError: the previous response is not stored. Over a WebSocket, the error is
            a PreviousResponseNotFoundError.
          RequestError: the previous response has not finished, or the server stores no responses.
        """
        if not self._store.keeps:
            for name in ("background", "store"):
                if getattr(request, name):
                    raise RequestError(
                        f"{name}: this server stores no responses (--max-stored-responses); "
                        "omit it",
                        param=name,
                    )
        previous = None
        if request.previous_response_id is not None:
            find = self._store.get if local is None else local.previous
            response = find(tenant, request.previous_response_id, param="previous_response_id")
            if response.running:
                raise RequestError(
                    "previous_response_id: the response has not finished; wait for it",
                    param="previous_response_id",
                )
            previous = response.turn
        return partial(request.chat, previous, kept=request.stored and self._store.keeps)

    def begin(
        self, serializer: ResponsesSerializer, tenant: str, local: LocalResponses | None
    ) -> StoredResponse | None:
        """Enter a response that will be stored, or that its WebSocket may continue.

        Returns:
          None for any other response.
        """
        if serializer.kept:
            local = None
        elif local is None:
            return None
        items = list(input_items(serializer.asked.given, serializer.unique_id))
        response = StoredResponse(
            serializer.id,
            tenant,
            Turn(serializer.previous, _json(items)),
            serializer.snapshot,
            background=serializer.background,
            local=local,
        )
        self._store.begin(response)
        if local is not None:
            local.add(response)
        if not serializer.background:  # clients may continue it right after the last event
            serializer.when_concluded = partial(self._finish, response, serializer)
        return response

    def end(
        self,
        response: StoredResponse | None,
        generation: Generation,
        serializer: ResponsesSerializer,
    ) -> None:
        """End a response after its request: it is complete, or its client has disconnected."""
        if response is None or serializer.concluded:
            return
        if serializer.streams:  # the client already has the response's id
            serializer.cancel_events(generation.usage)
        else:
            self._store.delete(response)

    def _finish(self, response: StoredResponse, serializer: ResponsesSerializer) -> None:
        self._store.finish(response, serializer.head, serializer.output)

    def run_in_background(
        self,
        response: StoredResponse,
        generation: Generation,
        serializer: ResponsesSerializer,
        ended: Callable[[str | None], None],
    ) -> None:
        """Run a response without a client.

        Args:
          ended: called at the end, with the name of the error if the response failed.
        """
        _Background(self._store, response, generation, serializer, ended)


class _Background:
    """A background response, driven by the callbacks of its generation."""

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
        supervise.guarded(self._ended, "logging a response", None)(error)
