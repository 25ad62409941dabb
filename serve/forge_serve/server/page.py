"""The page at `/`: a chat and a live view of the engine, served from static files of this package.

The files contain no data of the server, so they require no API key. The page sends the key that its
user enters with each request. The content security policy allows only this server and its scripts.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from forge_serve.http.auth import PAGE_PATHS

FOLDER = Path(__file__).parent / "static"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # browsers refuse to parse text as HTML
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    hdrs.CACHE_CONTROL: "no-cache",  # browsers may store it, but must revalidate it by its ETag
}


class Page:
    """Handlers of the page's files, which are read once."""

    def __init__(self) -> None:
        names = {path: Path(path).name or "index.html" for path in PAGE_PATHS}
        self._files = {path: (FOLDER / name).read_bytes() for path, name in names.items()}
        self._etags = {
            path: hashlib.sha256(content).hexdigest()[:32] for path, content in self._files.items()
        }

    def routes(self) -> list[web.RouteDef]:
        kinds: dict[str, Handler] = {
            "": self.page,
            ".css": self.page_style,
            ".js": self.page_script,
            ".svg": self.page_icon,
        }
        return [web.get(path, kinds[Path(path).suffix]) for path in sorted(self._files)]

    async def page(self, http: web.Request) -> web.StreamResponse:
        return self._file(http, "text/html")

    async def page_style(self, http: web.Request) -> web.StreamResponse:
        return self._file(http, "text/css")

    async def page_script(self, http: web.Request) -> web.StreamResponse:
        return self._file(http, "text/javascript")

    async def page_icon(self, http: web.Request) -> web.StreamResponse:
        return self._file(http, "image/svg+xml")

    def _file(self, http: web.Request, content_type: str) -> web.StreamResponse:
        path = http.path.rstrip("/") or "/"
        etag = self._etags[path]
        known = http.if_none_match or ()
        if any(each.value in (etag, "*") for each in known):
            response = web.Response(status=304, headers=HEADERS)
        else:
            response = web.Response(
                body=self._files[path],
                headers=HEADERS,
                content_type=content_type,
                charset="utf-8",
            )
        response.etag = etag
        return response
