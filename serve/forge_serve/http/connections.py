"""Connections of aiohttp with JSON errors for invalid HTTP and a limit on bytes on the wire."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http_exceptions import LineTooLong

from forge_serve.errors import ErrorReply, TransferCodingError
from forge_serve.http.error_responses import error_response

# Chunks of one byte make a body six times as long on the wire; regular clients stay below 8.
WIRE_BYTES_PER_BODY_BYTE = 8
OTHER_BYTES = 64 * 1024  # allowance for small bodies

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def only_chunked(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Reject compressed transfer codings, because aiohttp treats such bodies as plain.

    `Content-Encoding` is allowed.

    Raises:
      TransferCodingError: `Transfer-Encoding` is anything but `chunked`.
    """
    for coding in request.headers.getall(hdrs.TRANSFER_ENCODING, []):
        if coding.strip().lower() != "chunked":
            raise TransferCodingError(
                "Transfer-Encoding must be chunked: use Content-Encoding for a compressed body"
            )
    return await handler(request)


class Connection(web.RequestHandler):
    """Connection of one client.

    The limit on a body does not include the overhead of the chunked coding, whose extensions can
    have any length. The connection therefore also limits the bytes on the wire.
    """

    __slots__ = ("_counted", "_is_websocket", "_wire_bytes", "_wire_limit")

    def __init__(self, manager: Connections, **options: Any):
        super().__init__(manager, **options)
        self._wire_limit = WIRE_BYTES_PER_BODY_BYTE * manager.body_bytes + OTHER_BYTES
        self._wire_bytes = 0
        self._counted: web.BaseRequest | None = None
        self._is_websocket = False

    def become_websocket(self) -> None:
        """Stop counting bytes, because WebSocket messages have their own limit."""
        self._is_websocket = True

    def data_received(self, data: bytes) -> None:
        request = self._current_request
        if request is not self._counted:
            self._counted, self._wire_bytes = request, 0
        self._wire_bytes += len(data)
        within = self._wire_bytes <= self._wire_limit or self._is_websocket
        if request is None or within:
            super().data_received(data)
        elif request.content.exception() is None:
            request.content.set_exception(web.RequestPayloadError("chunk extensions without end"))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return a JSON error that contains nothing of the request.

        Raises:
          ConnectionError: the response has already started.
        """
        super().handle_error(request, status, exc, message)  # logs the error
        if status >= 500:
            reply = ErrorReply(status, "internal error", "server_error", None, "internal_error")
        else:
            what = "the request is not valid HTTP"
            if isinstance(exc, LineTooLong):
                what = "the request line or a header exceeds the server's limit"
            reply = ErrorReply(status, what, "invalid_request_error", None, "invalid_http")
        response = error_response(reply)
        response.headers[hdrs.SERVER] = "forge-jax"
        response.force_close()
        return response


class Connections(web.Server):
    """Factory of a `Connection` for each client."""

    body_bytes: int

    def __call__(self) -> Connection:
        return Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runner of an application whose connections are `Connection`s.

    Args:
      app: the application.
      body_bytes: maximum size of a body.
      options: options of `web.AppRunner`.
    """

    __slots__ = ("_body_bytes",)

    def __init__(self, app: web.Application, *, body_bytes: int, **options: Any):
        super().__init__(app, **options)
        self._body_bytes = body_bytes

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        # aiohttp has no option for the class of its connections.
        server.__class__ = Connections
        assert isinstance(server, Connections)
        server.body_bytes = self._body_bytes
        return server
