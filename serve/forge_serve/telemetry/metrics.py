"""Prometheus metrics: vLLM's series under vLLM's names, and what only this engine has, as `forge:`.

So dashboards, alerts and autoscalers that were made for vLLM work against this server as they are.
Counters and gauges of the engine are read from its statistics when they are scraped; the server
observes its histograms once per step and request, never per token.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from forge_jax.telemetry.phases import BOUNDS_S, STEP_TOKENS
from forge_serve.telemetry.histogram import ModelHistogram

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine, EngineStats
    from forge_jax.engine.streams import QueueLimit
    from forge_jax.schedule.outputs import Delta

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error")
STATES = ("starting", "serving", "ready", "recovering", "stalled", "stopping", "stopped", "failed")
ENGINE = "0"  # vLLM numbers the engines of a server; here there is one
REFUSALS: dict[QueueLimit, str] = {
    "samples": "max_num_queued_reqs",
    "prompt_tokens": "max_num_queued_tokens",
}

# The bounds are those of vLLM's vllm/v1/metrics/buckets.py.
_REQUEST_LATENCY_S = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30),
    *(40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
# Small models answer faster than vLLM's first bucket of 10 ms, so there are four before it.
_INTER_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_TOKENS = tuple(m * 10**e for e in range(8) for m in (1, 2, 5))  # shown up to the context's length
_SAMPLES = (1, 2, 5, 10, 20)
_HTTP_S = (0.1, 0.5, 1)  # as prometheus_fastapi_instrumentator, which vLLM uses
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTimes:
    """What was measured of one prompt, from its submission on, in seconds and tokens.

    `queue_s` and `first_token_s` are None if it did not come that far.
    """

    e2e_s: float
    queue_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int  # of all its samples
    longest_output: int  # of one sample, in tokens
    preemptions: int


class Metrics:
    """Everything that /metrics shows.

    Args:
      model_name: the label of that name; empty as long as there is no model.
      engine: the engine, or None as long as there is none.
      state: that of the server, one of `STATES`.
    """

    def __init__(
        self,
        model_name: Callable[[], str],
        engine: Callable[[], AsyncEngine | None],
        state: Callable[[], str],
    ):
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._engine = engine
        self.registry.register(_EngineCollector(model_name, engine, state))
        ProcessCollector(registry=self.registry)
        self._http = Counter(
            "http_requests",
            "HTTP requests answered",
            ("handler", "method", "status", "code"),
            registry=self.registry,
        )
        self._http_s = Histogram(
            "http_request_duration_seconds",
            "From a request's headers to the end of its answer",
            ("handler", "method"),
            registry=self.registry,
            buckets=_HTTP_S,
        )
        self._success = Counter(
            "vllm:request_success",
            "Finished samples, by reason",
            ("model_name", "engine", "finished_reason"),
            registry=self.registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token", _FIRST_TOKEN_S
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Between the tokens of a sample", _INTER_TOKEN_S
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "From the first token to the last, by token",
            _INTER_TOKEN_S,
        )
        self._e2e = self._latency("e2e_request_latency", "From submission to the last token")
        self._queue = self._latency("request_queue_time", "Waiting for the first step")
        self._prefill = self._latency(
            "request_prefill_time", "From the first step to the first token"
        )
        self._decode = self._latency("request_decode_time", "From the first token to the last")
        self._inference = self._latency(
            "request_inference_time", "From the first step to the last token"
        )
        self._prompt_tokens = self._tokens("prompt_tokens", "Prompt tokens of a request")
        self._generation_tokens = self._tokens(
            "generation_tokens", "Output tokens of a request, of all its samples"
        )
        self._longest_output = self._tokens(
            "max_num_generation_tokens", "Output tokens of the longest sample of a request"
        )
        self._computed_tokens = self._tokens(
            "prefill_kv_computed_tokens",
            "Prompt tokens of a request that were not in the prefix cache",
        )
        self._max_tokens = self._tokens("params_max_tokens", "max_tokens of a request")
        self._n = self._histogram("request_params_n", "Samples that were asked for", _SAMPLES)
        self._preemptions = self._histogram(
            "request_num_preemptions", "How often a request lost its blocks", _PREEMPTIONS
        )
        self._finished: dict[str, Counter] = {}  # by reason, once there is a model to name

    def http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """A request was answered: `status` is its class there, and `code` its number."""
        self._http.labels(handler, method, f"{status // 100}xx", str(status)).inc()
        self._http_s.labels(handler, method).observe(seconds)

    def finished(self, reason: str, count: int = 1) -> None:
        self._by_reason()[reason].inc(count)

    def submitted(self, n: int, max_tokens: int | None) -> None:
        """A request was accepted that asks for that."""
        self._n.observe(n)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def later_tokens(self, seconds: float, deltas: Sequence[Delta]) -> None:
        """`deltas` arrived that long after the ones before them: one observation for them all."""
        steps = len(deltas[0].token_ids)
        if len(deltas) > 1:
            first = deltas[0].index
            steps = sum(len(delta.token_ids) for delta in deltas if delta.index == first)
        self._inter_token.observe(seconds / max(steps, 1))

    def prompt(self, times: PromptTimes) -> None:
        """A prompt has been answered, or given up. Stages that it did not reach do not count."""
        self._e2e.observe(times.e2e_s)
        self._prompt_tokens.observe(times.prompt_tokens)
        self._generation_tokens.observe(times.generation_tokens)
        self._longest_output.observe(times.longest_output)
        self._preemptions.observe(times.preemptions)
        if times.queue_s is None:
            return
        self._queue.observe(times.queue_s)
        self._computed_tokens.observe(times.prompt_tokens - times.cached_tokens)
        first_s, last_s = times.first_token_s, times.last_token_s
        if first_s is None or last_s is None:
            return
        self._prefill.observe(max(first_s - times.queue_s, 0.0))
        self._decode.observe(last_s - first_s)
        self._inference.observe(max(last_s - times.queue_s, 0.0))
        self._per_token.observe((last_s - first_s) / max(times.longest_output - 1, 1))

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        if self._engine() is not None:
            self._by_reason()  # so that the first of a reason is an increase
        return generate_latest(self.registry)

    def _by_reason(self) -> dict[str, Counter]:
        if not self._finished:
            name = self._model_name()
            self._finished = {r: self._success.labels(name, ENGINE, r) for r in FINISH_REASONS}
        return self._finished

    def _latency(self, name: str, doc: str) -> ModelHistogram:
        return self._histogram(f"{name}_seconds", doc, _REQUEST_LATENCY_S)

    def _tokens(self, name: str, doc: str) -> ModelHistogram:
        return self._histogram(f"request_{name}", doc, _TOKENS, self._context)

    def _histogram(
        self,
        name: str,
        doc: str,
        buckets: Sequence[float],
        last_bound: Callable[[], float] = lambda: math.inf,
    ) -> ModelHistogram:
        histogram = ModelHistogram(f"vllm:{name}", doc, buckets, self._labels, last_bound)
        self.registry.register(histogram)
        return histogram

    def _labels(self) -> dict[str, str]:
        name = self._model_name()
        return {"model_name": name, "engine": ENGINE} if name else {}

    def _context(self) -> float:
        engine = self._engine()
        return math.inf if engine is None else engine.max_model_len


class _EngineCollector(Collector):
    """The engine's own counters, read when they are asked for."""

    def __init__(
        self,
        model_name: Callable[[], str],
        engine: Callable[[], AsyncEngine | None],
        state: Callable[[], str],
    ):
        self._model_name = model_name
        self._engine = engine
        self._state = state

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield _server_state(self._state())
        engine = self._engine()
        if engine is None:
            return
        stats, name = engine.stats(), self._model_name()
        yield from _of_vllm(engine, stats, {"model_name": name, "engine": ENGINE})
        yield from _own(stats, {"model_name": name})


def _server_state(now: str) -> Metric:
    family = GaugeMetricFamily(
        "forge:server_state", "1 for the state that the server is in", labels=["state"]
    )
    for state in STATES:
        family.add_metric([state], float(state == now))
    return family


def _of_vllm(engine: AsyncEngine, stats: EngineStats, labels: dict[str, str]) -> Iterator[Metric]:
    gauges = {
        "num_requests_running": ("Samples in the running batch", stats.num_running),
        "num_requests_waiting": ("Samples that wait", stats.num_waiting),
        "kv_cache_usage_perc": (
            "Part of the KV blocks held by live sequences; 1 is all of them",
            stats.num_used_blocks / max(stats.num_blocks, 1),
        ),
    }
    counters = {
        "prompt_tokens": ("Prompt tokens of accepted requests", stats.prompt_tokens),
        "prompt_tokens_cached": (
            "Those of admitted requests that were in the prefix cache",
            stats.cached_prompt_tokens,
        ),
        "generation_tokens": ("Output tokens", stats.generation_tokens),
        "num_preemptions": ("Samples preempted for lack of blocks", stats.preemptions),
        "prefix_cache_queries": (
            "Tokens looked up in the prefix cache",
            stats.prefix_cache_queries,
        ),
        "prefix_cache_hits": ("Tokens found in the prefix cache", stats.prefix_cache_hits),
    }
    speculation = stats.speculation
    if speculation is not None:
        counters |= {
            "spec_decode_num_drafts": ("Drafts that were verified", speculation.num_drafts),
            "spec_decode_num_draft_tokens": (
                "Tokens of drafts that were verified",
                speculation.num_draft_tokens,
            ),
            "spec_decode_num_accepted_tokens": (
                "Tokens of drafts that were right",
                sum(speculation.accepted_per_position),
            ),
        }
    for name, (doc, value) in gauges.items():
        yield _gauge(f"vllm:{name}", doc, labels, {(): value})
    for name, (doc, value) in counters.items():
        yield _counter(f"vllm:{name}", doc, labels, {(): value})
    yield _gauge(
        "vllm:num_requests_waiting_by_reason",
        "Samples that wait for room (capacity), or for another sample's prompt (deferred)",
        labels,
        {
            ("capacity",): stats.num_waiting - stats.num_deferred,
            ("deferred",): stats.num_deferred,
        },
        "reason",
    )
    yield _counter(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens of admitted requests, by where their keys and values came from",
        labels,
        {
            ("local_compute",): stats.computed_prompt_tokens,
            ("local_cache_hit",): stats.cached_prompt_tokens,
        },
        "source",
    )
    yield _counter(
        "vllm:prompt_tokens_cached_by_source",
        "Prompt tokens of admitted requests that were in the prefix cache, by where that is",
        labels,
        {("device",): stats.cached_prompt_tokens},
        "source",
    )
    yield _counter(
        "vllm:admission_rejections",
        "Requests that were refused because too much waited, by the limit",
        {"model_name": labels["model_name"]},
        {(REFUSALS[limit],): count for limit, count in engine.streams.refusals.items()},
        "reason",
    )
    if speculation is not None:
        yield _counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Tokens of drafts that were right, by place in the draft",
            labels,
            {(str(i),): n for i, n in enumerate(speculation.accepted_per_position)},
            "position",
        )
    yield _cache_config(engine, stats)
    if engine.adapters.places:
        yield _loras(engine)
    totals = stats.step_tokens
    yield _histogram_of(
        "vllm:iteration_tokens_total",
        "Tokens that a step computes",
        labels,
        STEP_TOKENS,
        [((), totals.buckets, totals.total)],
    )


def _cache_config(engine: AsyncEngine, stats: EngineStats) -> Metric:
    kv_tokens = engine.limits.kv_tokens
    info = {
        "block_size": str(kv_tokens // stats.num_blocks),
        "num_gpu_blocks": str(stats.num_blocks),
        "kv_cache_size_tokens": str(kv_tokens),
        "kv_cache_max_concurrency": f"{kv_tokens / engine.max_model_len:.2f}",
        "engine": ENGINE,
    }
    return _gauge("vllm:cache_config_info", "The KV cache, in the labels; always 1", info, {(): 1})


def _loras(engine: AsyncEngine) -> Metric:
    waiting, running = engine.streams.loras_in_use()
    info = {
        "max_lora": str(engine.adapters.places),
        "waiting_lora_adapters": ",".join(sorted(waiting)),
        "running_lora_adapters": ",".join(sorted(running)),
    }
    doc = "The LoRA adapters of requests, in the labels; its value is the time"
    return _gauge("vllm:lora_requests_info", doc, info, {(): time.time()})


def _own(stats: EngineStats, labels: dict[str, str]) -> Iterator[Metric]:
    counters = {
        "recoveries": ("Steps that failed, and were computed anew", stats.recoveries),
        "engine_restarts": ("Engine processes started after one died", stats.restarts),
        "engine_steps": ("Steps dispatched", stats.steps),
        "kv_block_evictions": ("Blocks that the prefix cache had to give up", stats.evictions),
        "compilations_after_ready": (
            "Compilations after start-up; more than 0 is a defect",
            stats.compilations_after_ready,
        ),
    }
    for name, (doc, value) in counters.items():
        yield _counter(f"forge:{name}", doc, labels, {(): value})
    yield _gauge(
        "forge:stalled_seconds",
        "For how long there has been work, and no step has come back",
        labels,
        {(): stats.stalled_s},
    )
    yield _gauge(
        "forge:step_token_budget",
        "Tokens of the latest step that could take prompts, at most",
        labels,
        {(): stats.step_token_budget},
    )
    if stats.expected_step_s is not None:
        yield _gauge(
            "forge:expected_step_seconds",
            "How long such a step takes, by the times of those before",
            labels,
            {(): stats.expected_step_s},
        )
    yield _gauge(
        "forge:kv_blocks",
        "Blocks of the KV cache: held by live sequences, kept by the prefix cache, or free",
        labels,
        {
            ("used",): stats.num_used_blocks,
            ("cached",): stats.num_cached_blocks,
            ("free",): stats.num_free_blocks - stats.num_cached_blocks,
        },
        "state",
    )
    yield _gauge(
        "forge:startup_seconds",
        "Time that a phase of the start took; serving and ready: since its beginning",
        labels,
        {(phase,): seconds for phase, seconds in stats.startup_seconds.items()},
        "phase",
    )
    phases = stats.step_phases.items()
    yield _histogram_of(
        "forge:step_phase_seconds",
        "Host time of a step by phase; read is the wait for the device",
        labels,
        BOUNDS_S,
        [((phase,), totals.buckets, totals.total_s) for phase, totals in phases],
        "phase",
    )


Values = dict[tuple[str, ...], float]  # by the values of the labels that differ


def _gauge(name: str, doc: str, labels: dict[str, str], values: Values, *more: str) -> Metric:
    family = GaugeMetricFamily(name, doc, labels=[*labels, *more])
    for key, value in values.items():
        family.add_metric([*labels.values(), *key], value)
    return family


def _counter(name: str, doc: str, labels: dict[str, str], values: Values, *more: str) -> Metric:
    family = CounterMetricFamily(name, doc, labels=[*labels, *more])
    for key, value in values.items():
        family.add_metric([*labels.values(), *key], value)
    return family


def _histogram_of(
    name: str,
    doc: str,
    labels: dict[str, str],
    bounds: Sequence[float],
    values: Sequence[tuple[tuple[str, ...], Sequence[int], float]],
    *more: str,
) -> Metric:
    """Of (labels that differ, counts by bucket, sum)."""
    family = HistogramMetricFamily(name, doc, labels=[*labels, *more])
    names = [floatToGoString(float(bound)) for bound in (*bounds, math.inf)]
    for key, counts, total in values:
        buckets = list(zip(names, itertools.accumulate(counts), strict=True))
        family.add_metric([*labels.values(), *key], buckets, total)
    return family
