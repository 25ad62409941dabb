"""Replay of a stored event stream from any event."""

from __future__ import annotations

import asyncio

from aiohttp import web

from forge_serve.http.sse import HEADERS, PIECE
from forge_serve.responses_api.store import EventLog


class Replay:
    """Writes the events of a log from number `first` on, as fast as the client reads.

    The log grows independently of its readers.
    """

    error: str | None = None  # failures of the response are events of the log

    def __init__(self, http: web.Request, log: EventLog, first: int, *, stall_s: float):
        self.response = web.StreamResponse(headers=HEADERS)
        self._http = http
        self._log = log
        self._next = first
        self._stall_s = stall_s

    async def run(self) -> None:
        """Write the headers, the events and the end.

        Raises:
          TimeoutError: the client read nothing for `stall_s`.
          ConnectionError: the client has disconnected.
        """
        await self.response.prepare(self._http)
        while True:
            piece = self._log.events[self._next : self._next + PIECE]
            self._next += len(piece)
            if piece:
                async with asyncio.timeout(self._stall_s):
                    await self.response.write(b"".join(piece))
            elif self._log.over:
                break
            else:
                await self._log.change()
        async with asyncio.timeout(self._stall_s):
            await self.response.write_eof()
