"""Which web pages may read the server's answers in a browser: none, unless origins are listed.

An API key is in a header that the page's own script sets. What a browser would add by itself, its
"credentials", is nothing that this server knows, and never allowed.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import hdrs, web

MAX_AGE_S = 600  # that a browser may remember the answer to a preflight
_METHODS = "DELETE, GET, POST"
_READABLE_HEADERS = "X-Request-Id, Retry-After"
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{0,1024}", re.ASCII)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Cors:
    """`origins` are exact (`https://example.org`), or `*` for all."""

    def __init__(self, origins: Sequence[str]):
        self._any = "*" in origins
        self._origins = frozenset(origins)

    @web.middleware
    async def middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Answers a browser that asks whether it may send a request; that question has no key."""
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        if request.method != hdrs.METH_OPTIONS or asked is None or not self._allowed(request):
            return await handler(request)
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
            hdrs.ACCESS_CONTROL_MAX_AGE: str(MAX_AGE_S),
        }
        names = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        if names and _HEADER_NAMES.fullmatch(names):
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = names
        return web.Response(status=204, headers=headers)

    async def add_headers(self, http: web.Request, response: web.StreamResponse) -> None:
        """To every answer, errors and streams among them: whether the page may read it."""
        if self._any:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*"
        elif self._origins:
            response.headers[hdrs.VARY] = hdrs.ORIGIN
            if not self._allowed(http):
                return
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = http.headers[hdrs.ORIGIN]
        if self._origins:
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _READABLE_HEADERS

    def _allowed(self, http: web.Request) -> bool:
        origin = http.headers.get(hdrs.ORIGIN)
        return origin is not None and (self._any or origin in self._origins)
