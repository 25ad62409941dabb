"""Outermost middleware: request ids, errors as responses, metrics and log lines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from forge_jax.host.panics import is_panic
from forge_serve.anthropic import requests as messages
from forge_serve.anthropic.serializer import error_body
from forge_serve.errors import BodyTimeoutError, TransferCodingError, UnknownPathError
from forge_serve.http.error_responses import error_response, reply_to
from forge_serve.http.exchange import EXCHANGE, Exchange, new_id
from forge_serve.http.request_logs import CLIENT_CLOSED, RequestLogs
from forge_serve.openai.requests import REQUEST_ID
from forge_serve.server import routes
from forge_serve.server.service import Service

REQUEST_ID_HEADER = "X-Request-Id"
# After these errors, the end of the body and so the next request cannot be found.
_BODY_ERRORS = (web.RequestPayloadError, BodyTimeoutError, TransferCodingError)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Envelope:
    """Outermost middleware of the application."""

    def __init__(self, service: Service, logs: RequestLogs):
        self._service = service
        self._logs = logs

    @web.middleware
    async def middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Answer a request, turn an exception into a response, and close the log entry."""
        exchange = request[EXCHANGE] = self._open(request)
        status = CLIENT_CLOSED
        try:
            response = await handler(request)
            status = CLIENT_CLOSED if exchange.client_left else response.status
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            response = _failure(request, error)
            status = response.status
        finally:
            self._logs.close(request, status)
        if self._service.stopping:
            response.force_close()  # the next request must reach another server
        return response

    def _open(self, request: web.Request) -> Exchange:
        given = request.headers.get(REQUEST_ID_HEADER, "")
        from_header = REQUEST_ID.fullmatch(given) is not None
        request_id = given if from_header else new_id()
        return Exchange(
            request_id=request_id,
            log=self._logs.open(request, request_id),
            id_from_header=from_header,
        )


def _failure(request: web.Request, error: BaseException) -> web.Response:
    """Return the response to a failed request in the format of its protocol."""
    log = request[EXCHANGE].log
    if isinstance(error, web.HTTPNotFound):
        log.nearest = routes.nearest(request)
        error = UnknownPathError(log.nearest)
    reply = reply_to(error)
    log.error = reply.name
    anthropic = request.path.startswith(messages.PATH)
    response = error_response(reply, error_body(reply) if anthropic else None)
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
    if isinstance(error, _BODY_ERRORS):
        response.force_close()
    return response


async def add_headers(http: web.Request, response: web.StreamResponse) -> None:
    """Add the headers that every response has."""
    response.headers[hdrs.SERVER] = "forge-jax"
    exchange = http.get(EXCHANGE)
    if exchange is not None:
        response.headers[REQUEST_ID_HEADER] = exchange.request_id
