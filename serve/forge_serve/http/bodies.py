"""Request bodies: received in time, decompressed, and parsed without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from aiohttp import web

from forge_serve.errors import BodyTimeoutError
from forge_serve.generation.workers import Lane
from forge_serve.http.auth import TENANT
from forge_serve.http.content_coding import content_coding, decompressed
from forge_serve.http.exchange import EXCHANGE


class BodyReader:
    """Reader of request bodies.

    Args:
      lane: the threads for bodies that take long to decompress or parse.
      max_bytes: maximum size of a decompressed body.
      inline_bytes: bodies up to this size are parsed on the event loop.
      timeout_s: maximum time for the whole body to arrive.
    """

    def __init__(self, lane: Lane, *, max_bytes: int, inline_bytes: int, timeout_s: float):
        self._lane = lane
        self._max_bytes = max_bytes
        self._inline_bytes = inline_bytes
        self._timeout_s = timeout_s

    async def decode[T](self, http: web.Request, decode: Callable[[bytes], T]) -> T:
        """Return `decode(body)`. A large body is decoded in a thread.

        Raises:
          BodyTimeoutError: the body did not arrive in time.
          BodyTooLargeError, HTTPRequestEntityTooLarge: the body exceeds the limit.
          ContentCodingError: the content coding is not supported.
          RequestPayloadError: the body does not match its headers.
          OverloadedError: too many bodies are waiting.
        """
        body = await self._read(http)
        return await self.parse(http, partial(decode, body))

    async def parse[T](self, http: web.Request, parse: Callable[[], T]) -> T:
        """Return `parse()`, which takes time in proportion to the size of the body.

        Raises:
          OverloadedError: the body is large, and too many bodies are waiting.
        """
        num_bytes = http[EXCHANGE].body_bytes
        if num_bytes <= self._inline_bytes:
            return parse()
        return await self._in_thread(http, num_bytes, parse)

    async def _read(self, http: web.Request) -> bytes:
        exchange = http[EXCHANGE]
        if exchange.message is not None:
            body = exchange.message
        else:
            coding = content_coding(http.headers)
            body = await self._receive(http)
            if coding is not None:
                decompress = partial(decompressed, body, coding, self._max_bytes)
                body = await self._in_thread(http, len(body), decompress)
        exchange.body_bytes = len(body)
        return body

    async def _receive(self, http: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await http.read()
        except TimeoutError as error:
            message = f"the body did not arrive within {self._timeout_s:.0f} s"
            raise BodyTimeoutError(message) from error

    async def _in_thread[T](self, http: web.Request, num_bytes: int, work: Callable[[], T]) -> T:
        tenant = http.get(TENANT, "")
        with self._lane.admit(tenant, num_bytes):
            return await self._lane.run(tenant, work)
