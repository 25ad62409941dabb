"""What stays of a request when it is over: one line in the log, and a span where there is tracing.

Both are made from one `RequestRecord`, so they cannot tell different stories. Nothing that a client
wrote is in it but the request's id: no prompt, no answer, no key, no salt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from forge_jax.observe.log import Event

if TYPE_CHECKING:
    from forge_serve.generation import Generation
    from forge_serve.tracing import Tracing

log = logging.getLogger("forge_serve.requests")

TENANT_CHARS = 12  # of a tenant's name that the log and the traces show
# What probes, scrapers and routers ask again and again: there is no line for it.
QUIET_PATHS = frozenset(
    ("/health", "/healthz", "/ping", "/forge/v1/health", "/metrics", "/load", "/v1/loads")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request from its headers to the end of its answer; the fields' names are the log's.

    Times are in seconds. `queue_s` is the wait for the first step; `ttft_s` and `e2e_s` begin with
    the request's arrival. Of several prompts, both are of the one that was first.
    """

    id: str
    response: str | None  # the id of the answer, if there was one
    method: str
    path: str  # as the route has it
    status: int
    error: str | None  # the code of the error that it ended with, in its status or in the stream
    tenant: str | None
    model: str | None
    stream: bool
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int  # of the drafts
    preemptions: int
    queue_s: float | None
    ttft_s: float | None
    e2e_s: float
    finish: str | None  # its samples' reasons, each once, with commas between


_FIELDS = tuple(field.name for field in fields(RequestRecord))


class Trail:
    """A request that is being answered. `end` is called once.

    Args:
      headers: of the trace that it belongs to.
    """

    def __init__(
        self,
        *,
        request_id: str,
        method: str,
        path: str,
        logs: bool,
        tracing: Tracing | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        self.request_id = request_id
        self.method = method
        self.path = path
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
        self._tracing = tracing

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin_s

    def at_ns(self, monotonic_s: float) -> int:
        """A time of `time.monotonic`'s clock in nanoseconds since 1970."""
        return self.begin_ns + round((monotonic_s - self._begin_s) * 1e9)

    def end(self, status: int) -> None:
        if self.path in QUIET_PATHS or not (self._logs or self._tracing):
            return
        record = self._record(status)
        trace = None if self._tracing is None else self._tracing.record(record, self)
        if self._logs:
            log.info(Event("request", {**{n: getattr(record, n) for n in _FIELDS}, "trace": trace}))

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
            id=self.request_id,
            response=response,
            method=self.method,
            path=self.path,
            status=status,
            error=self.error,
            tenant=self.tenant[:TENANT_CHARS] if self.tenant else None,
            model=self.model,
            stream=self.stream,
            prompt_tokens=generation.num_prompt_tokens if generation else 0,
            cached_tokens=generation.num_cached_tokens if generation else 0,
            output_tokens=generation.num_output_tokens if generation else 0,
            draft_tokens=generation.num_drafted if generation else 0,
            accepted_tokens=generation.num_accepted if generation else 0,
            preemptions=generation.num_preemptions if generation else 0,
            queue_s=queue_s,
            ttft_s=ttft_s,
            e2e_s=self.seconds,
            finish=finish,
        )
