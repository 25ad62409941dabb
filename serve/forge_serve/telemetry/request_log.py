"""What stays of a request when it is over: one line in the log, and a span where there is tracing.

Both are made from one `RequestRecord`, so they cannot tell different stories. Nothing that a client
wrote is in it but the request's id: no prompt, no answer, no key, no salt.
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

TENANT_CHARS = 12  # of a tenant's name that the log and the traces show
# What probes, scrapers and routers ask again and again: there is no line for it.
QUIET_PATHS = frozenset(
    ("/health", "/healthz", "/ping", "/forge/v1/health", "/metrics", "/load", "/v1/loads")
)


# Fields of the line's beginning, which as text are a sentence: GET /v1/models 200 0.001s
_HEAD = ("method", "path", "status", "e2e_s")
# Left out of a line of text where they are 0 or false.
_RARE = frozenset(("stream", "draft_tokens", "accepted_tokens", "preemptions", "cached_tokens"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request from its headers to the end of its answer; the fields' names are the log's.

    A field that does not apply to the request is None, and is not in its line. Those of a
    generation are None for all other requests.

    Times are in seconds. `queue_s` is the wait for the first step; `ttft_s` and `e2e_s` begin with
    the request's arrival. Of several prompts, both are of the one that was first.
    """

    method: str
    path: str  # as the table of routes has it, or the class of an unknown one
    status: int
    e2e_s: float
    id: str
    tenant: str | None
    error: str | None  # the code of the error that it ended with, in its status or in the stream
    nearest: str | None  # the route that an unknown path looks most like
    model: str | None
    response: str | None  # the id of the answer, if there was one
    stream: bool | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    draft_tokens: int | None
    accepted_tokens: int | None  # of the drafts
    preemptions: int | None
    queue_s: float | None
    ttft_s: float | None
    finish: str | None  # its samples' reasons, each once, with commas between

    def event(self, trace: str | None) -> Event:
        """The line of the log."""
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
    """A request that is being answered. `end` is called once.

    Args:
      path: its route's, or the class of an unknown one.
      handler: the name of what answers it; None: nothing does.
      export: exports the request as a span and returns its trace id; None: there is no tracing.
      headers: of the trace that it belongs to.
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
        self.error: str | None = None  # what its answer calls the error that ended it
        self.generation: Generation | None = None
        self.goes_on = False  # after its answer: whoever set it calls `end`
        self.headers = headers or {}
        self.begin_ns = time.time_ns()  # since 1970
        self._begin_s = time.monotonic()
        self._logs = logs
        self._export = export

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin_s

    def at_ns(self, monotonic_s: float) -> int:
        """A time of `time.monotonic`'s clock in nanoseconds since 1970."""
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
