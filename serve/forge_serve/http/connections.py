"""Connections of aiohttp with our own answer to what is not HTTP, and one more limit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http_exceptions import LineTooLong

from forge_serve.errors import ErrorReply, TransferCodingError
from forge_serve.http.error_responses import error_response

# A body in chunks of one byte is six times as long on the wire: no honest one is longer than this.
WIRE_BYTES_PER_BODY_BYTE = 8
OTHER_BYTES = 64 * 1024  # of a body that is nearly empty

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def only_chunked(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Refuse bodies that are compressed on the way; aiohttp takes them for plain ones.

    A body may be compressed itself, which `Content-Encoding` says.

    Raises:
      TransferCodingError: `Transfer-Encoding` is anything but `chunked`.
    """
    for coding in request.headers.getall(hdrs.TRANSFER_ENCODING, []):
        if coding.strip().lower() != "chunked":
            raise TransferCodingError(
                "the only Transfer-Encoding that this server takes is chunked: "
                "use Content-Encoding for a compressed body"
            )
    return await handler(request)


class Connection(web.RequestHandler):
    """One client's connection.

    The limit on a body does not count what the chunked coding adds to it: extensions of chunks can
    be of any length, and are read and dropped. So bytes on the wire are counted as well.
    """

    __slots__ = ("_counted", "_is_websocket", "_wire_bytes", "_wire_limit")

    def __init__(self, manager: Connections, **options: Any):
        super().__init__(manager, **options)
        self._wire_limit = WIRE_BYTES_PER_BODY_BYTE * manager.body_bytes + OTHER_BYTES
        self._wire_bytes = 0
        self._counted: web.BaseRequest | None = None
        self._is_websocket = False

    def become_websocket(self) -> None:
        """Count no more bytes: each message has its own limit, and there may be many."""
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
        """The error as ours are: JSON, and nothing of what was sent.

        Raises:
          ConnectionError: an answer has begun already.
        """
        super().handle_error(request, status, exc, message)  # its line in the log
        if status >= 500:
            reply = ErrorReply(status, "internal error", "server_error", None, "internal_error")
        else:
            what = "the request is not valid HTTP"
            if isinstance(exc, LineTooLong):
                what = "the first line or a header of the request is longer than this server takes"
            reply = ErrorReply(status, what, "invalid_request_error", None, "invalid_http")
        response = error_response(reply)
        response.headers[hdrs.SERVER] = "forge-jax"
        response.force_close()
        return response


class Connections(web.Server):
    """Makes a `Connection` for each client."""

    body_bytes: int

    def __call__(self) -> Connection:
        return Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """An application with such connections.

    Args:
      body_bytes: the limit on a body.
    """

    __slots__ = ("_body_bytes",)

    def __init__(self, app: web.Application, *, body_bytes: int, **options: Any):
        super().__init__(app, **options)
        self._body_bytes = body_bytes

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        # aiohttp has no other place to name the class of its connections.
        server.__class__ = Connections
        assert isinstance(server, Connections)
        server.body_bytes = self._body_bytes
        return server
