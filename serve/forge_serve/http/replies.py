"""Responses: JSON bodies, and streams to clients that may disconnect or stop reading."""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec
from aiohttp import web

from forge_serve.http.exchange import EXCHANGE

log = logging.getLogger(__name__)


class Stream(Protocol):
    """Response that is written piece by piece.

    Attributes:
      error: the code of the error event that ended the stream, if there was one.
    """

    error: str | None

    @property
    def response(self) -> web.StreamResponse: ...

    async def run(self) -> None:
        """Write the whole stream.

        Raises:
          TimeoutError: the client stopped reading.
          ConnectionError: the client disconnected.
        """
        ...


def json_response(body: bytes, status: int = 200) -> web.Response:
    """Return a response with an encoded JSON body."""
    return web.Response(body=body, status=status, content_type="application/json")


def encoded_response(answer: object, status: int = 200) -> web.Response:
    """Return a value as JSON."""
    return json_response(msgspec.json.encode(answer), status)


async def send(http: web.Request, stream: Stream, *, stall_s: float) -> web.StreamResponse:
    """Write a stream until it ends or its client disconnects.

    Args:
      http: the request.
      stream: the response's stream.
      stall_s: seconds after which the stream disconnects a client that reads nothing.
    """
    exchange = http[EXCHANGE]
    try:
        await stream.run()
        if stream.error is not None:
            exchange.log.error = stream.error
    except TimeoutError:
        exchange.client_left = True
        log.warning("disconnected a client that read nothing for %.0f s", stall_s)
        if http.transport is not None:
            http.transport.abort()
    except ConnectionError:
        exchange.client_left = True  # the caller aborts the generation
    return stream.response
