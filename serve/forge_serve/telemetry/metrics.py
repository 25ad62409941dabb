"""Prometheus metrics of a server, under vLLM's names where vLLM has them.

Dashboards, alerts and autoscalers for vLLM therefore work with this server. The engine's series
are read from its statistics at each scrape. The server observes its histograms once per step and
request, never per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from forge_serve.telemetry.engine_metrics import EngineCollector, engine_labels
from forge_serve.telemetry.gpus import GpuCollector, Gpus
from forge_serve.telemetry.request_histograms import (
    HistogramFactory,
    Latencies,
    PromptTimes,
    Sizes,
)

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_jax.schedule.outputs import Delta

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error")
_HTTP_S = (0.1, 0.5, 1)  # as in prometheus_fastapi_instrumentator, which vLLM uses


class Metrics:
    """All metrics of `/metrics`.

    Args:
      model_name: returns the name of the served model; empty until it is loaded.
      engine: returns the engine; None until it is loaded.
      state: returns the state of the server, one of `engine_metrics.STATES`.
      gpus: the GPUs whose latest states are included; None: none.
    """

    def __init__(
        self,
        model_name: Callable[[], str],
        engine: Callable[[], AsyncEngine | None],
        state: Callable[[], str],
        gpus: Gpus | None = None,
    ):
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._engine = engine
        self.registry.register(EngineCollector(model_name, engine, state))
        if gpus is not None:
            self.registry.register(GpuCollector(gpus))
        ProcessCollector(registry=self.registry)
        self._http = Counter(
            "http_requests",
            "Completed HTTP requests",
            ("handler", "method", "status", "code"),
            registry=self.registry,
        )
        self._http_s = Histogram(
            "http_request_duration_seconds",
            "Time from a request's headers to the end of its response",
            ("handler", "method"),
            registry=self.registry,
            buckets=_HTTP_S,
        )
        self._success = Counter(
            "vllm:request_success",
            "Finished samples, by finish reason",
            ("model_name", "engine", "finished_reason"),
            registry=self.registry,
        )
        factory = HistogramFactory(self.registry, self._labels, self._context)
        self._latencies = Latencies(factory)
        self._sizes = Sizes(factory)
        # by engine and reason, once the model has a name
        self._finished: dict[tuple[int, str], Counter] = {}

    def http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count a completed request. The label `status` is its class, `code` its number."""
        self._http.labels(handler, method, f"{status // 100}xx", str(status)).inc()
        self._http_s.labels(handler, method).observe(seconds)

    def finished(self, reason: str, engine: int, count: int = 1) -> None:
        """Count samples that have finished on the engine with this index."""
        self._by_reason()[engine, reason].inc(count)

    def submitted(self, n: int, max_tokens: int | None, engine: int) -> None:
        """Observe a prompt that an engine has accepted."""
        self._sizes.n.observe(n, engine)
        if max_tokens is not None:
            self._sizes.max_tokens.observe(max_tokens, engine)

    def first_token(self, seconds: float, engine: int) -> None:
        self._latencies.first_token.observe(seconds, engine)

    def later_tokens(self, seconds: float, deltas: Sequence[Delta], engine: int) -> None:
        """Observe the time since the previous deltas, once for all deltas of a step."""
        steps = len(deltas[0].token_ids)
        if len(deltas) > 1:
            first = deltas[0].index
            steps = sum(len(delta.token_ids) for delta in deltas if delta.index == first)
        self._latencies.inter_token.observe(seconds / max(steps, 1), engine)

    def prompt(self, times: PromptTimes) -> None:
        """Observe a prompt that has finished or was aborted."""
        self._latencies.observe(times)
        self._sizes.observe(times)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        if self._engine() is not None:
            self._by_reason()  # export zeros, so that the first sample of a reason is an increase
        return generate_latest(self.registry)

    def _by_reason(self) -> dict[tuple[int, str], Counter]:
        if not self._finished:
            self._finished = {
                (rank, reason): self._success.labels(*labels.values(), reason)
                for rank, labels in enumerate(self._labels())
                for reason in FINISH_REASONS
            }
        return self._finished

    def _labels(self) -> list[dict[str, str]]:
        name, engine = self._model_name(), self._engine()
        engines = [] if engine is None or not name else engine.engines
        return [engine_labels(name, rank) for rank in range(len(engines))]

    def _context(self) -> float:
        engine = self._engine()
        return math.inf if engine is None else engine.max_model_len
