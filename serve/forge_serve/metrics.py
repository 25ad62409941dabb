"""Prometheus metrics: the names that dashboards of this field query, under the prefix `forge:`.

Counters and gauges of the engine are read from its statistics when they are scraped; the server
observes its histograms once per step and request, never per token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from forge_jax.observe.phases import BOUNDS_S
from forge_serve.histogram import ModelHistogram

if TYPE_CHECKING:
    from forge_jax.outputs import Delta
    from forge_jax.streams import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error")

_REQUEST_LATENCY_S = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30),
    *(40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
# Small models answer faster than the usual first bucket of 10 ms.
_INTER_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class Metrics:
    """Everything that /metrics shows.

    `stats` gives the engine's statistics, or None as long as there is no engine.
    """

    def __init__(self, model_name: Callable[[], str], stats: Callable[[], EngineStats | None]):
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.registry.register(_EngineCollector(model_name, stats))
        self._http = Counter(
            "http_requests",
            "HTTP requests answered",
            ("handler", "method", "status"),
            registry=self.registry,
        )
        self._success = Counter(
            "forge:request_success",
            "Finished sequences, by reason",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token", _FIRST_TOKEN_S
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Between the tokens of a sequence", _INTER_TOKEN_S
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From submission to the last token", _REQUEST_LATENCY_S
        )
        self._prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request", _TOKENS
        )
        self._generation_tokens = self._histogram(
            "request_generation_tokens", "Output tokens of a request", _TOKENS
        )
        self._finished: dict[str, Counter] = {}  # by reason, once there is a model to name

    def http(self, handler: str, method: str, status: int) -> None:
        self._http.labels(handler, method, str(status)).inc()

    def finished(self, reason: str, count: int = 1) -> None:
        if not self._finished:
            name = self._model_name()
            self._finished = {r: self._success.labels(name, r) for r in FINISH_REASONS}
        self._finished[reason].inc(count)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def later_tokens(self, seconds: float, deltas: Sequence[Delta]) -> None:
        """`deltas` arrived that long after the ones before them: one observation for them all."""
        steps = len(deltas[0].token_ids)
        if len(deltas) > 1:
            first = deltas[0].index
            steps = sum(len(delta.token_ids) for delta in deltas if delta.index == first)
        self._inter_token.observe(seconds / max(steps, 1))

    def request(self, prompt_tokens: int, generation_tokens: int, e2e_s: float) -> None:
        self._prompt_tokens.observe(prompt_tokens)
        self._generation_tokens.observe(generation_tokens)
        self._e2e.observe(e2e_s)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, doc: str, buckets: Sequence[float]) -> ModelHistogram:
        histogram = ModelHistogram(f"forge:{name}", doc, buckets, self._model_name)
        self.registry.register(histogram)
        return histogram


class _EngineCollector(Collector):
    """The engine's own counters, read when they are asked for."""

    def __init__(self, model_name: Callable[[], str], stats: Callable[[], EngineStats | None]):
        self._model_name = model_name
        self._stats = stats

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        gauges = {
            "num_requests_running": ("Sequences in the running batch", stats.num_running),
            "num_requests_waiting": ("Sequences waiting for a slot", stats.num_waiting),
            "kv_cache_usage_perc": (
                "Part of the KV blocks held by live sequences; 1 is all of them",
                stats.num_used_blocks / max(stats.num_blocks, 1),
            ),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens of admitted requests", stats.prompt_tokens),
            "generation_tokens": ("Output tokens", stats.generation_tokens),
            "num_preemptions": ("Sequences preempted for lack of blocks", stats.preemptions),
            "recoveries": ("Steps that failed, and were computed anew", stats.recoveries),
            "engine_restarts": ("Engine processes started after one died", stats.restarts),
            "prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache",
                stats.prefix_cache_queries,
            ),
            "prefix_cache_hits": (
                "Prompt tokens found in the prefix cache",
                stats.prefix_cache_hits,
            ),
            "engine_steps": ("Steps dispatched", stats.steps),
            "compilations_after_ready": (
                "Compilations after start-up; more than 0 is a defect",
                stats.compilations_after_ready,
            ),
        }
        speculation = stats.speculation
        if speculation is not None:
            counters |= {
                "spec_decode_num_drafts": (
                    "Drafts that were verified",
                    speculation.num_drafts,
                ),
                "spec_decode_num_draft_tokens": (
                    "Tokens of drafts that were verified",
                    speculation.num_draft_tokens,
                ),
                "spec_decode_num_accepted_tokens": (
                    "Tokens of drafts that were right",
                    sum(speculation.accepted_per_position),
                ),
            }
        label = [self._model_name()]
        for name, (doc, value) in gauges.items():
            gauge = GaugeMetricFamily(f"forge:{name}", doc, labels=["model_name"])
            gauge.add_metric(label, value)
            yield gauge
        startup = GaugeMetricFamily(
            "forge:startup_seconds",
            "Time that a phase of the start took; serving and ready: since its beginning",
            labels=["model_name", "phase"],
        )
        for phase, seconds in stats.startup_seconds.items():
            startup.add_metric([*label, phase], seconds)
        yield startup
        for name, (doc, value) in counters.items():
            counter = CounterMetricFamily(f"forge:{name}", doc, labels=["model_name"])
            counter.add_metric(label, value)
            yield counter
        if speculation is not None:
            per_position = CounterMetricFamily(
                "forge:spec_decode_num_accepted_tokens_per_pos",
                "Tokens of drafts that were right, by place in the draft",
                labels=["model_name", "position"],
            )
            for position, count in enumerate(speculation.accepted_per_position):
                per_position.add_metric([*label, str(position)], count)
            yield per_position
        yield _phases(self._model_name(), stats)


def _phases(model_name: str, stats: EngineStats) -> HistogramMetricFamily:
    family = HistogramMetricFamily(
        "forge:step_phase_seconds",
        "Host time of a step by phase; read is the wait for the device",
        labels=["model_name", "phase"],
    )
    bounds = (*BOUNDS_S, math.inf)
    for phase, totals in stats.step_phases.items():
        counts = itertools.accumulate(totals.buckets)
        buckets = [(floatToGoString(b), n) for b, n in zip(bounds, counts, strict=True)]
        family.add_metric([model_name, phase], buckets, totals.total_s)
    return family
