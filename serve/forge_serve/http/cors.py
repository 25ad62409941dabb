"""CORS: only pages of the listed origins may read responses in a browser.

Scripts send API keys in a header. The server uses no credentials that browsers add by themselves,
such as cookies, so CORS never allows them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import hdrs, web

MAX_AGE_S = 600  # time for which a browser may cache the response to a preflight
_METHODS = "DELETE, GET, POST"
_READABLE_HEADERS = "X-Request-Id, Retry-After"
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{0,1024}", re.ASCII)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Cors:
    """CORS middleware. `origins` are exact (`https://example.org`), or `*` for all."""

    def __init__(self, origins: Sequence[str]):
        self._any = "*" in origins
        self._origins = frozenset(origins)

    @web.middleware
    async def middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Answer preflight requests, which have no API key."""
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
        """Add the CORS headers to every response, including errors and streams."""
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
