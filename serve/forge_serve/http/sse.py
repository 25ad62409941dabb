"""Server-sent events: one write to the socket per step, without waking a task.

The engine delivers updates in a callback on the event loop, once per step and request. The callback
writes their events to the connection's transport. The handler's task wakes only for a slow client
or the end of the response.

Backpressure: the buffer for a slow client is bounded. The transport holds its high-water mark,
64 KiB, and the events of at most `PIECE` more deltas. Further deltas are kept and written as the
client reads. Their number is bounded by the request's token limit. A client that reads nothing for
`stall_s` is disconnected. Other clients are not delayed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from aiohttp import hdrs, web

from forge_serve.errors import ErrorReply, error_reply
from forge_serve.generation.generation import Generation, Updates, Usage

if TYPE_CHECKING:
    from forge_jax.schedule.outputs import Delta

HEADERS = {
    hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8",
    hdrs.CACHE_CONTROL: "no-cache",
    "X-Accel-Buffering": "no",
}
PIECE = 256  # maximum number of deltas whose events are written at once
KEEP_ALIVE = b": keep-alive\n\n"  # an SSE comment, which clients ignore


class EventSerializer(Protocol):
    """Serializer of one response's events in the format of its protocol.

    Attributes:
      usage_always: True if every event has the usage so far.
    """

    usage_always: bool

    def beginning(self) -> bytes:
        """Return the events before the first delta."""
        ...

    def events(self, choice: int, delta: Delta, usage: Usage | None = None) -> bytes:
        """Return the events of one delta, or b"" if it has no visible text yet."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Return the last events of a stream that succeeded."""
        ...

    def error_event(self, reply: ErrorReply) -> bytes:
        """Return the last events of a stream that failed."""
        ...


class EventStream:
    """Writer of one generation's events. `run` sends the whole response.

    A failure after the headers is an event with an `error`, which no `[DONE]` follows.

    Args:
      http: the request.
      generation: the generation to stream.
      serializer: writes the events.
      stall_s: seconds after which a client that reads nothing is disconnected.
      keep_alive_s: idle seconds after which the stream sends a keep-alive comment, so that proxies
        keep the connection open; 0: never.
    """

    def __init__(
        self,
        http: web.Request,
        generation: Generation,
        serializer: EventSerializer,
        *,
        stall_s: float,
        keep_alive_s: float = 0.0,
    ):
        self.response = web.StreamResponse(headers=HEADERS)
        self._chunked = False
        self._http = http
        self._generation = generation
        self._serializer = serializer
        self._stall_s = stall_s
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._written_s = self._loop.time()  # time of the last write
        self._alarm: asyncio.TimerHandle | None = None
        self._held: deque[tuple[int, Delta]] = deque()  # deltas of the last step or a slow client
        self._attention = asyncio.Event()  # wakes the handler's task
        self.error: str | None = None  # code of the error event that ended the stream

    async def run(self) -> None:
        """Send the headers, the events and the end of the response.

        Raises:
          TimeoutError: the client read nothing for `stall_s`.
          ConnectionError: the client disconnected.
        """
        await self._open()
        transport = self._http.transport
        if transport is None:
            raise ConnectionResetError("the client disconnected")
        self._transport = transport
        self._protocol = self._http.protocol
        if self._keep_alive_s:
            self._wait_for_silence()
        try:
            last = await self._all_but_the_last()
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            reply = error_reply(error)
            self.error = reply.name
            last = self._serializer.error_event(reply)
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
        async with asyncio.timeout(self._stall_s):
            await self._end(last)

    async def _open(self) -> None:
        """Send the headers."""
        await self.response.prepare(self._http)
        self._chunked = self.response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked"

    async def _end(self, last: bytes) -> None:
        """Send the last events and the end of the response."""
        await self.response.write_eof(last)

    async def _all_but_the_last(self) -> bytes:
        """Write events until the generation is over.

        Returns:
          The last events. The caller sends them with the end of the response in one write.

        Raises:
          Exception: the generation's failure, after the events before it have been written.
        """
        generation = self._generation
        self._write(self._serializer.beginning())
        generation.begin(self._take)
        while not generation.over:
            await self._attention.wait()
            self._attention.clear()
            if not generation.over:
                await self._write_held(down_to=0)
        await self._write_held(down_to=PIECE)
        events = self._events(self._next_piece())
        if generation.failure is not None:
            self._write(events)
            raise generation.failure
        return events + self._serializer.end(generation.usage)

    def _take(self, updates: Updates) -> None:
        """Write the events of a step, or hold them for the handler's task if the client is slow."""
        waits = self._protocol.writing_paused or len(updates) > PIECE
        if self._held or waits or self._generation.over:
            self._held += updates
            self._attention.set()
        else:
            self._write(self._events(updates))

    async def _write_held(self, *, down_to: int) -> None:
        """Write held deltas as fast as the client reads, until `down_to` are left."""
        while len(self._held) > down_to:
            async with asyncio.timeout(self._stall_s):
                await self._http.writer.drain()
            if self._transport.is_closing():
                raise ConnectionResetError("the client disconnected")
            self._write(self._events(self._next_piece()))

    def _next_piece(self) -> Updates:
        held = self._held
        return [held.popleft() for _ in range(min(PIECE, len(held)))]

    def _events(self, updates: Updates) -> bytes:
        events, usage = self._serializer.events, None
        if self._serializer.usage_always:
            usage = self._generation.usage
        if len(updates) == 1:
            return events(*updates[0], usage)
        return b"".join([events(choice, delta, usage) for choice, delta in updates])

    def _wait_for_silence(self) -> None:
        at_s = self._written_s + self._keep_alive_s
        self._alarm = self._loop.call_at(at_s, self._keep_alive)

    def _keep_alive(self) -> None:
        """Write a comment if the stream is idle, unless the client is slow."""
        silent_s = self._loop.time() - self._written_s
        slow = self._held or self._protocol.writing_paused
        if slow or self._transport.is_closing():
            self._written_s += silent_s  # bytes are still being sent
        elif silent_s >= self._keep_alive_s:
            self._write(KEEP_ALIVE)
        self._wait_for_silence()

    def _write(self, events: bytes) -> None:
        if not events:
            return
        self._written_s = self._loop.time()
        if self._chunked:
            events = b"%x\r\n%b\r\n" % (len(events), events)
        self._transport.write(events)
