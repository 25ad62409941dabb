"""Records of every request: a line in the request log, a span and HTTP metrics."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import hdrs, web

from forge_serve.http.auth import TENANT
from forge_serve.http.exchange import EXCHANGE
from forge_serve.telemetry.metrics import Metrics
from forge_serve.telemetry.request_log import RequestLog
from forge_serve.telemetry.tracing import Tracing

CLIENT_CLOSED = 499  # the logged status if the client disconnected before the response


class RequestLogs:
    """Factory of log entries. An entry is open from a request's arrival to its end.

    Args:
      metrics: the server's metrics.
      tracing: returns the exporter of spans; None: tracing is off.
      label: returns the label of a request's path in metrics and logs.
      enabled: True if requests are logged.
    """

    def __init__(
        self,
        metrics: Metrics,
        tracing: Callable[[], Tracing | None],
        label: Callable[[web.Request], str],
        *,
        enabled: bool,
    ):
        self._metrics = metrics
        self._tracing = tracing
        self._label = label
        self._enabled = enabled

    def open(self, http: web.Request, request_id: str) -> RequestLog:
        """Open the entry of a new request."""
        tracing = self._tracing()
        return RequestLog(
            request_id=request_id,
            method=http.method if http.method in hdrs.METH_ALL else "other",
            path=self._label(http),
            handler=None if http.match_info.http_exception else http.match_info.handler.__name__,
            logs=self._enabled,
            export=None if tracing is None else tracing.record,
            headers=None if tracing is None else tracing.carried(http.headers),
        )

    def close(self, http: web.Request, status: int) -> None:
        """Count a request that has its response. Log it, unless it continues in the background."""
        exchange = http[EXCHANGE]
        entry = exchange.log
        self._metrics.http(entry.path, entry.method, status, entry.seconds)
        if not entry.goes_on:
            entry.request_id, entry.tenant = exchange.request_id, http.get(TENANT)
            entry.end(status)
