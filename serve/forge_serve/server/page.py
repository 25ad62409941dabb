"""The page at `/`: a chat and a live view of the engine, served from static files of this package.

The files contain no data of the server, so they require no API key. The page sends the key that its
user enters with each request. The content security policy allows only this server and its scripts.
"""

from __future__ import annotations

from aiohttp import ETag, hdrs, web
from aiohttp.typedefs import Handler

from forge_serve.http.page_files import FILES, PAGE_PATHS, page_file

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "font-src 'self'",
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
    hdrs.VARY: hdrs.ACCEPT_ENCODING,
}


def routes() -> list[web.RouteDef]:
    kinds: dict[str, Handler] = {
        ".html": page,
        ".css": page_style,
        ".js": page_script,
        ".svg": page_icon,
        ".woff2": page_font,
    }
    return [web.get(path, kinds[FILES[path].suffix]) for path in sorted(PAGE_PATHS)]


# Logs and metrics name a route after its handler, so each kind of file has one.


async def page(http: web.Request) -> web.StreamResponse:
    return _respond(http)


async def page_style(http: web.Request) -> web.StreamResponse:
    return _respond(http)


async def page_script(http: web.Request) -> web.StreamResponse:
    return _respond(http)


async def page_icon(http: web.Request) -> web.StreamResponse:
    return _respond(http)


async def page_font(http: web.Request) -> web.StreamResponse:
    return _respond(http)


def _respond(http: web.Request) -> web.StreamResponse:
    file = page_file(http.path.rstrip("/") or "/")
    known = http.if_none_match or ()
    if any(each.value in (file.etag, "*") for each in known):
        response = web.Response(status=304, headers=HEADERS)
    else:
        compress = file.is_text and "gzip" in http.headers.get(hdrs.ACCEPT_ENCODING, "")
        response = web.Response(
            body=file.compressed if compress else file.content,
            headers=HEADERS,
            content_type=file.content_type,
            charset="utf-8" if file.is_text else None,
        )
        if compress:
            response.headers[hdrs.CONTENT_ENCODING] = "gzip"
    response.etag = ETag(file.etag, is_weak=True)  # one tag for both encodings
    return response
