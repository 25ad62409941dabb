"""Request log: one line per finished request, and a span if tracing is on.

Both are made from one `RequestRecord`, so they always agree. The request id is the only text of a
client in a record: it has no prompt, output, API key or salt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from forge_jax.telemetry.log import Event

if TYPE_CHECKING:
    from forge_serve.generation.generation import Generation

log = logging.getLogger("forge_serve.requests")

TENANT_CHARS = 12  # length of a tenant's name in logs and traces
# Paths that probes, scrapers and routers poll. They are not logged.
QUIET_PATHS = frozenset(
    ("/health", "/healthz", "/ping", "/forge/v1/health", "/metrics", "/load", "/v1/loads")
)


# Fields at the start of a text line: GET /v1/models 200 0.001s
_HEAD = ("method", "path", "status", "e2e_s")
# Fields that a text line omits if they are 0 or false.
_RARE = frozenset(("stream", "draft_tokens", "accepted_tokens", "preemptions", "cached_tokens"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request from its headers to the end of its response, with the log's field names.

    A field that does not apply to the request is None and is not in its line. The fields of a
    generation are None for all other requests.

    Times are in seconds. `queue_s` is the wait for the first step. `ttft_s` and `e2e_s` count from
    the request's arrival. If there are several prompts, `queue_s` and `ttft_s` are of the earliest.
    """

    method: str
    path: str  # the path of the route, or the class of an unknown path
    status: int
    e2e_s: float
    id: str
    tenant: str | None
    error: str | None  # code of the error that ended the request, as a status or in the stream
    nearest: str | None  # the route that is most similar to an unknown path
    model: str | None
    response: str | None  # the id of the response, if there was one
    stream: bool | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    draft_tokens: int | None
    accepted_tokens: int | None  # accepted draft tokens
    preemptions: int | None
    queue_s: float | None
    ttft_s: float | None
    finish: str | None  # finish reasons of the samples, each once, separated by commas

    def event(self, trace: str | None) -> Event:
        """Return the log line. `trace` is the id of the request's trace, if there is one."""
        given = {name: getattr(self, name) for name in _FIELDS}
        given = {name: value for name, value in given.items() if value is not None}
        if trace is not None:
            given["trace"] = trace
        rest = {
            name: value
            for name, value in given.items()
            if name not in _HEAD and not (name in _RARE and value == 0)
        }
        text = f"{self.method} {self.path} {self.status} {self.e2e_s:.3f}s"
        return Event("request", given, lead=text, shown=rest)


_FIELDS = tuple(field.name for field in fields(RequestRecord))


class RequestLog:
    """Log entry of a request in progress. Call `end` exactly once.

    Args:
      request_id: the request's id.
      method: the HTTP method.
      path: the path of the route, or the class of an unknown path.
      handler: the name of the route's handler; None for an unknown path.
      logs: True if the request gets a log line.
      export: exports the request as a span and returns its trace id; None: tracing is off.
      headers: the request's headers that identify its trace.
    """

    def __init__(
        self,
        *,
        request_id: str,
        method: str,
        path: str,
        handler: str | None = None,
        logs: bool,
        export: Callable[[RequestRecord, RequestLog], str | None] | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        self.request_id = request_id
        self.method = method
        self.path = path
        self.handler = handler
        self.nearest: str | None = None
        self.tenant: str | None = None
        self.model: str | None = None
        self.stream = False
        self.error: str | None = None  # code of the error that ended the request
        self.generation: Generation | None = None
        self.goes_on = False  # continues after its response; the code that sets this calls `end`
        self.headers = headers or {}
        self.begin_ns = time.time_ns()  # since 1970
        self._begin_s = time.monotonic()
        self._logs = logs
        self._export = export

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin_s

    def at_ns(self, monotonic_s: float) -> int:
        """Convert a time of `time.monotonic` to nanoseconds since 1970."""
        return self.begin_ns + round((monotonic_s - self._begin_s) * 1e9)

    def end(self, status: int) -> None:
        if self.path in QUIET_PATHS or not (self._logs or self._export):
            return
        record = self._record(status)
        trace = None if self._export is None else self._export(record, self)
        if self._logs:
            log.info(record.event(trace))

    def _record(self, status: int) -> RequestRecord:
        generation = self.generation
        queue_s = ttft_s = response = finish = None
        if generation is not None:
            queue_s, first_s = generation.queue_s, generation.first_token_at_s
            if first_s is not None:
                ttft_s = first_s - self._begin_s
            response = generation.request_id
            finish = ",".join(generation.finish_reasons) or None
        return RequestRecord(
            method=self.method,
            path=self.path,
            status=status,
            e2e_s=self.seconds,
            id=self.request_id,
            tenant=self.tenant[:TENANT_CHARS] if self.tenant else None,
            error=self.error,
            nearest=self.nearest,
            model=self.model,
            response=response,
            stream=None if generation is None else self.stream,
            prompt_tokens=None if generation is None else generation.num_prompt_tokens,
            cached_tokens=None if generation is None else generation.num_cached_tokens,
            output_tokens=None if generation is None else generation.num_output_tokens,
            draft_tokens=None if generation is None else generation.num_drafted,
            accepted_tokens=None if generation is None else generation.num_accepted,
            preemptions=None if generation is None else generation.num_preemptions,
            queue_s=queue_s,
            ttft_s=ttft_s,
            finish=finish,
        )
