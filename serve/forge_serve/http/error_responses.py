"""Conversion of exceptions, including aiohttp's, to HTTP responses."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import hdrs, web

from forge_serve.errors import BodyTooLargeError, ErrorReply, error_reply

# Headers that a status requires, in addition to `Retry-After`.
STATUS_HEADERS: Mapping[int, tuple[str, str]] = {
    401: (hdrs.WWW_AUTHENTICATE, "Bearer"),
    415: (hdrs.ACCEPT_ENCODING, "gzip, deflate"),
    426: (hdrs.UPGRADE, "websocket"),
}


def reply_to(error: BaseException) -> ErrorReply:
    """Return the reply to an exception of a handler or of aiohttp."""
    match error:
        case web.RequestPayloadError():
            message = "the body of the request does not match its headers"
            return ErrorReply(400, message, "invalid_request_error")
        case web.HTTPRequestEntityTooLarge():
            return error_reply(BodyTooLargeError())
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"this method is not allowed for this path: use {allowed}"
            return ErrorReply(405, message, "invalid_request_error", None, "method_not_allowed")
        case web.HTTPException():
            kind = "server_error" if error.status >= 500 else "invalid_request_error"
            return ErrorReply(error.status, error.reason, kind)
    return error_reply(error)


def error_response(reply: ErrorReply, body: bytes | None = None) -> web.Response:
    """Return the HTTP response of an error.

    Args:
      reply: the error.
      body: the body in another protocol's format; default: OpenAI's format.
    """
    body = reply.body() if body is None else body
    response = web.Response(status=reply.status, body=body, content_type="application/json")
    if reply.retry_after is not None:
        response.headers[hdrs.RETRY_AFTER] = reply.retry_after
    if reply.status in STATUS_HEADERS:
        name, value = STATUS_HEADERS[reply.status]
        response.headers[name] = value
    return response
