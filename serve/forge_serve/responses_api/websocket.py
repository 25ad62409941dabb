"""GET /v1/responses: the requests and events of POST /v1/responses over a WebSocket.

The same code serves a WebSocket message and the body of a POST. Each message becomes a clone of the
request that opened the connection, with its own checks, log entry and metrics. Messages are
answered in order. While one is answered, others are read and queued, so that a disconnect is
noticed.

aiohttp handles the handshake, incoming messages and closing. Events are written like those of a
stream (`http.sse`), each as a text message.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import WSCloseCode, WSMsgType, hdrs, web
from msgspec import UNSET

from forge_jax.errors import RequestError
from forge_jax.host import supervise
from forge_serve.errors import (
    BodyTooLargeError,
    ErrorReply,
    NotReadyError,
    UpgradeRequiredError,
    error_reply,
)
from forge_serve.generation.generation import Generation
from forge_serve.http.connections import Connection
from forge_serve.http.sse import EventStream
from forge_serve.responses_api.events import ResponsesSerializer
from forge_serve.responses_api.requests import ResponsesChat
from forge_serve.responses_api.response_types import (
    DoneStatus,
    Event,
    SocketError,
    SocketErrorDetails,
)
from forge_serve.responses_api.store import LocalResponses

MAX_WAITING = 16  # queued messages, while one is answered
ONE_AT_A_TIME = "send the next message after the last event of a response"
PING_S = 30.0  # idle time before a ping, and to answer it
CONNECTION_S = 3600.0  # Open Responses: "limited to 60 minutes"
_LONGEST_SHORT, _LONGEST_MEDIUM = 125, 0xFFFF  # payload lengths by encoding, RFC 6455 5.2
_TEXT = 0x80 | WSMsgType.TEXT  # FIN and opcode

log = logging.getLogger(__name__)
_json = msgspec.json.Encoder().encode

type Message = bytes | Exception  # an exception: the message was rejected


def text_frame(payload: bytes) -> bytes:
    """Return a text message as one frame of a server, unmasked and uncompressed."""
    size = len(payload)
    if size <= _LONGEST_SHORT:
        head = bytes((_TEXT, size))
    elif size <= _LONGEST_MEDIUM:
        head = bytes((_TEXT, _LONGEST_SHORT + 1)) + size.to_bytes(2, "big")
    else:
        head = bytes((_TEXT, _LONGEST_SHORT + 2)) + size.to_bytes(8, "big")
    return head + payload


def error_event(reply: ErrorReply, stream_id: str | None = None) -> bytes:
    """Return the JSON of an error event for a message without a response."""
    error = SocketErrorDetails(reply.type, reply.name, reply.text, reply.param)
    if reply.retry_after is not None:
        error.headers = {hdrs.RETRY_AFTER: reply.retry_after}
    return _json(SocketError(reply.status, error, UNSET if stream_id is None else stream_id))


class SocketSerializer(ResponsesSerializer):
    """Serializer of a response whose events are WebSocket messages.

    A failure sends only `response.failed` and no `error` event. A client that treats the `error`
    event as the end would attribute `response.failed` to its next message.
    """

    def __init__(self, request: ResponsesChat, *args: Any, **kwargs: Any):
        super().__init__(request, *args, **kwargs)
        stream_id = getattr(request.asked, "stream_id", None)
        if stream_id is not None:
            self._stream_id = stream_id
        self._only_prepares = getattr(request.asked, "generate", None) is False

    def _framed(self, name: str, data: bytes) -> bytes:
        return text_frame(data)

    def _error(self, reply: ErrorReply) -> list[Event]:
        return []

    def _status(self) -> DoneStatus:
        return "completed" if self._only_prepares else super()._status()


class SocketStream(EventStream):
    """Writes one generation's events to an open WebSocket, which stays open."""

    def __init__(
        self,
        http: web.Request,
        generation: Generation,
        serializer: SocketSerializer,
        socket: ResponsesSocket,
        *,
        stall_s: float,
    ):
        super().__init__(http, generation, serializer, stall_s=stall_s)
        self.response = socket.response
        self._socket = socket

    async def _open(self) -> None:
        pass

    def _write(self, events: bytes) -> None:
        if events:
            self._socket.write(events)

    async def _end(self, last: bytes) -> None:
        self._socket.write(last)
        await self._http.writer.drain()


class _Response(web.WebSocketResponse):
    """aiohttp's WebSocket, with an error event before it closes because of a too large message."""

    def __init__(self, max_bytes: int):
        # The size of a compressed message is only known after reading it.
        super().__init__(autoping=False, compress=False, max_msg_size=max_bytes, decode_text=False)
        self.on_too_large: Callable[[], None] | None = None

    async def close(
        self, *, code: int = WSCloseCode.OK, message: bytes = b"", drain: bool = True
    ) -> bool:
        if code == WSCloseCode.MESSAGE_TOO_BIG and not self.closed and self.on_too_large:
            self.on_too_large()
        return await super().close(code=code, message=message, drain=drain)


class ResponsesSocket:
    """One connection.

    Args:
      http: the request that opens it.
      local: unstored responses that it can continue.
      max_bytes: the limit of one message, and of all queued messages together.
      stall_s: the time after which a client that reads nothing is disconnected.
      answer: answers a message and handles all its errors.
    """

    def __init__(
        self,
        http: web.Request,
        local: LocalResponses,
        *,
        max_bytes: int,
        stall_s: float,
        answer: Callable[[ResponsesSocket, Message], Awaitable[None]],
    ):
        self.http = http
        self.local = local
        self.response = _Response(max_bytes)
        self.num_messages = 0  # answered, including the current one
        self._max_bytes = max_bytes
        self._stall_s = stall_s
        self._answer = answer
        self._waiting: deque[Message] = deque()
        self._waiting_bytes = 0
        self._updates = asyncio.Event()  # a message is queued, or the connection must end
        self._busy = False  # True while a message is answered
        self._pinged = False  # True if nothing was received since the last ping
        self._ending: tuple[ErrorReply, WSCloseCode] | None = None

    async def run(self) -> web.StreamResponse:
        """Open the connection and answer its messages until it is closed.

        Raises:
          UpgradeRequiredError: the request has no WebSocket handshake.
        """
        http, response = self.http, self.response
        if http.method != hdrs.METH_GET or not response.can_prepare(http):
            raise UpgradeRequiredError(
                "GET on this path requires a WebSocket handshake (Upgrade: websocket, Connection: "
                "Upgrade, Sec-WebSocket-Version: 13 and a Sec-WebSocket-Key); otherwise use POST"
            )
        response.on_too_large = self._refuse_large
        await response.prepare(http)
        assert isinstance(http.protocol, Connection)
        http.protocol.become_websocket()
        expire = supervise.guarded(self._expire, "ending a WebSocket", lambda _: self._abort())
        expiry = asyncio.get_running_loop().call_later(CONNECTION_S, expire)
        answering = supervise.start_task(
            self._answer_all(), "answering a WebSocket's messages", lambda _: self._abort()
        )
        floods = False
        try:
            floods = await self._read_all()
        except ConnectionError:
            pass  # the client disconnected during the response to its ping
        finally:
            expiry.cancel()
            # There is no await here, because the connection's end may cancel this task again.
            answering.add_done_callback(lambda _: self.local.close())
            answering.cancel()
        if floods:
            error = RequestError(f"more than {MAX_WAITING} messages are queued: {ONE_AT_A_TIME}")
            self.refuse(error_reply(error))
            await response.close(code=WSCloseCode.POLICY_VIOLATION)
        return response

    def stop(self) -> None:
        """Close the connection after the running response, because the server shuts down."""
        reply = error_reply(NotReadyError("the server is shutting down"))
        self._end(reply, WSCloseCode.SERVICE_RESTART)

    def write(self, frames: bytes) -> None:
        """Write whole frames, unless the connection is closed."""
        transport = self.http.transport
        if transport is not None and not transport.is_closing() and not self.response.closed:
            transport.write(frames)

    def refuse(self, reply: ErrorReply, stream_id: str | None = None) -> None:
        """Send an error event for a message."""
        self.write(text_frame(error_event(reply, stream_id)))

    # ---- reading -------------------------------------------------------------------------------

    async def _read_all(self) -> bool:
        """Read until either side closes the connection, or too many messages are queued.

        Returns:
          True in the second case.
        """
        while True:
            try:
                message = await self.response.receive(timeout=PING_S)
            except TimeoutError:
                if not await self._ping():
                    return False
                continue
            self._pinged = False
            match message.type:
                case WSMsgType.TEXT:
                    taken = self._take(message.data)
                case WSMsgType.BINARY:
                    error = "messages must be JSON in text frames, got a binary frame"
                    taken = self._take(RequestError(error))
                case WSMsgType.PING:
                    if not self.http.protocol.writing_paused:  # otherwise pongs would pile up
                        await self.response.pong(message.data)
                    continue
                case WSMsgType.PONG:
                    continue
                case _:
                    return False
            if not taken:
                return True

    async def _ping(self) -> bool:
        """Send a ping, and return False if the client did not answer the previous one.

        While a response is written, its stream detects disconnects instead.
        """
        if self.http.protocol.writing_paused:
            return True
        if self._pinged and not self._busy:
            self._abort()
            return False
        self._pinged = True
        await self.response.ping()
        return True

    def _take(self, message: Message) -> bool:
        """Queue a message. Return False if the queue is full."""
        if len(self._waiting) >= MAX_WAITING:
            return False
        size = 0 if isinstance(message, Exception) else len(message)
        if self._waiting_bytes + size > self._max_bytes:
            what = f"more than {self._max_bytes} bytes of messages are queued"
            message, size = RequestError(f"{what}: {ONE_AT_A_TIME}"), 0
        self._waiting.append(message)
        self._waiting_bytes += size
        self._updates.set()
        return True

    def _refuse_large(self) -> None:
        self.refuse(error_reply(BodyTooLargeError()))

    # ---- answering -----------------------------------------------------------------------------

    async def _answer_all(self) -> None:
        while self._ending is None:
            if not self._waiting:
                self._updates.clear()
                await self._updates.wait()
                continue
            message = self._waiting.popleft()
            self._waiting_bytes -= 0 if isinstance(message, Exception) else len(message)
            self._busy = True
            self.num_messages += 1
            await self._answer(self, message)
            self._busy = False
            await self._drain()
        reply, code = self._ending
        if self._waiting or code == WSCloseCode.GOING_AWAY:
            self.refuse(reply)
        await self.response.close(code=code)

    async def _drain(self) -> None:
        """Wait until the client has read error events, which no stream waits for."""
        try:
            async with asyncio.timeout(self._stall_s):
                await self.http.writer.drain()
        except TimeoutError:
            log.warning("disconnecting a client that read nothing for %.0f s", self._stall_s)
            self._abort()

    def _expire(self) -> None:
        reply = ErrorReply(
            400,
            f"this connection has reached its limit of {CONNECTION_S / 60:.0f} minutes: open a "
            "new one",
            "invalid_request_error",
            None,
            "websocket_connection_limit_reached",
        )
        self._end(reply, WSCloseCode.GOING_AWAY)

    def _end(self, reply: ErrorReply, code: WSCloseCode) -> None:
        if self._ending is None:
            self._ending = reply, code
            self._updates.set()

    def _abort(self) -> None:
        if self.http.transport is not None:
            self.http.transport.abort()
