"""GET /v1/responses: the requests and events of POST /v1/responses over a WebSocket.

A message of the client is what a body is to a POST, and is served by the same code: it becomes a
request of its own, a clone of the one that opened the connection, with its own checks, line in the
log and count in the metrics. Messages are answered one after the other. While one is answered
others are read and wait, so that a client that leaves is noticed.

aiohttp does the handshake, reads messages, and closes. Events are written as those of a stream are
(`http.sse`), each as a text message.
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

MAX_WAITING = 16  # messages, while one is answered
ONE_AT_A_TIME = "send the next message after the last event of a response"
PING_S = 30.0  # without a message; a client that is idle has as long to answer
CONNECTION_S = 3600.0  # Open Responses: "limited to 60 minutes"
_LONGEST_SHORT, _LONGEST_MEDIUM = 125, 0xFFFF  # payloads by the form of their length, RFC 6455 5.2
_TEXT = 0x80 | WSMsgType.TEXT  # in one frame

log = logging.getLogger(__name__)
_json = msgspec.json.Encoder().encode

type Message = bytes | Exception  # an exception: the message could not be taken


def text_frame(payload: bytes) -> bytes:
    """A text message as a server sends it: in one frame, neither masked nor compressed."""
    size = len(payload)
    if size <= _LONGEST_SHORT:
        head = bytes((_TEXT, size))
    elif size <= _LONGEST_MEDIUM:
        head = bytes((_TEXT, _LONGEST_SHORT + 1)) + size.to_bytes(2, "big")
    else:
        head = bytes((_TEXT, _LONGEST_SHORT + 2)) + size.to_bytes(8, "big")
    return head + payload


def error_event(reply: ErrorReply, stream_id: str | None = None) -> bytes:
    """The JSON of the event that answers a message without a response."""
    error = SocketErrorDetails(reply.type, reply.name, reply.text, reply.param)
    if reply.retry_after is not None:
        error.headers = {hdrs.RETRY_AFTER: reply.retry_after}
    return _json(SocketError(reply.status, error, UNSET if stream_id is None else stream_id))


class SocketSerializer(ResponsesSerializer):
    """A response whose events are messages of a WebSocket.

    A failure has no `error` event beside `response.failed`: a client that takes the first for the
    end would take the second for an answer to its next message.
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
    """Writes one generation's events to a WebSocket that is open, and stays open."""

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
    """aiohttp's WebSocket. It closes after a message over the limit: here with an error first."""

    def __init__(self, max_bytes: int):
        # Compressed messages would have to be read to know how long they are.
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
      local: what it can go on from without storing it.
      max_bytes: the limit of a message, and of all that wait together.
      stall_s: after which a client that takes nothing is given up.
      answer: answers a message, with everything that goes wrong with it.
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
        self.num_messages = 0  # that have been answered, or are
        self._max_bytes = max_bytes
        self._stall_s = stall_s
        self._answer = answer
        self._waiting: deque[Message] = deque()
        self._waiting_bytes = 0
        self._updates = asyncio.Event()  # a message waits, or it is to end
        self._busy = False  # a message is answered
        self._pinged = False  # and nothing has come since
        self._ending: tuple[ErrorReply, WSCloseCode] | None = None

    async def run(self) -> web.StreamResponse:
        """Opens the connection, and answers its messages until it is closed.

        Raises:
          UpgradeRequiredError: the request opens no WebSocket.
        """
        http, response = self.http, self.response
        if http.method != hdrs.METH_GET or not response.can_prepare(http):
            raise UpgradeRequiredError(
                "a GET of this path opens a WebSocket: send Upgrade: websocket, Connection: "
                "Upgrade, Sec-WebSocket-Version: 13 and a Sec-WebSocket-Key, or send a POST"
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
            pass  # the client went while it was answered a ping
        finally:
            expiry.cancel()
            # Nothing is awaited here: the connection's end may cancel this task a second time.
            answering.add_done_callback(lambda _: self.local.close())
            answering.cancel()
        if floods:
            error = RequestError(f"more than {MAX_WAITING} messages wait: {ONE_AT_A_TIME}")
            self.refuse(error_reply(error))
            await response.close(code=WSCloseCode.POLICY_VIOLATION)
        return response

    def stop(self) -> None:
        """Closes the connection when the response that runs is over: the server shuts down."""
        reply = error_reply(NotReadyError("the server is shutting down"))
        self._end(reply, WSCloseCode.SERVICE_RESTART)

    def write(self, frames: bytes) -> None:
        """Writes whole frames, unless the connection is closed."""
        transport = self.http.transport
        if transport is not None and not transport.is_closing() and not self.response.closed:
            transport.write(frames)

    def refuse(self, reply: ErrorReply, stream_id: str | None = None) -> None:
        """Answers a message with an error."""
        self.write(text_frame(error_event(reply, stream_id)))

    # ---- reading -------------------------------------------------------------------------------

    async def _read_all(self) -> bool:
        """Reads until the connection is closed, by either side, or too many messages wait: True."""
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
                    error = "a message must be JSON in a text message: this one was binary"
                    taken = self._take(RequestError(error))
                case WSMsgType.PING:
                    if not self.http.protocol.writing_paused:  # else nobody reads the answers
                        await self.response.pong(message.data)
                    continue
                case WSMsgType.PONG:
                    continue
                case _:
                    return False
            if not taken:
                return True

    async def _ping(self) -> bool:
        """False if the client is gone. Of one that reads a response, its stream decides that."""
        if self.http.protocol.writing_paused:
            return True
        if self._pinged and not self._busy:
            self._abort()
            return False
        self._pinged = True
        await self.response.ping()
        return True

    def _take(self, message: Message) -> bool:
        """Has a message answered in its turn. Returns False if too many wait."""
        if len(self._waiting) >= MAX_WAITING:
            return False
        size = 0 if isinstance(message, Exception) else len(message)
        if self._waiting_bytes + size > self._max_bytes:
            what = f"more than {self._max_bytes} bytes of messages wait"
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
        """Waits until the client has read answers that no stream waited for."""
        try:
            async with asyncio.timeout(self._stall_s):
                await self.http.writer.drain()
        except TimeoutError:
            log.warning("gave up a client that read nothing for %.0f s", self._stall_s)
            self._abort()

    def _expire(self) -> None:
        reply = ErrorReply(
            400,
            f"this connection has reached its limit of {CONNECTION_S / 60:.0f} minutes: open "
            "another one",
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
