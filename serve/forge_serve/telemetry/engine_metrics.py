"""Prometheus series of the engine, under vLLM's names or, if vLLM has none, as `forge:`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forge_jax.telemetry.phases import BOUNDS_S, STEP_TOKENS
from forge_serve.telemetry.metric_families import counter, gauge, histogram

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine, EngineStats
    from forge_jax.engine.streams import QueueLimit
    from forge_jax.schedule.host_tier import HostKVStats

STATES = ("starting", "serving", "ready", "recovering", "stalled", "stopping", "stopped", "failed")
REJECTIONS: dict[QueueLimit, str] = {  # vLLM's names of the limits
    "samples": "max_num_queued_reqs",
    "prompt_tokens": "max_num_queued_tokens",
}


class EngineCollector(Collector):
    """Collector that reads the engine's series from its statistics at each scrape."""

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
        name, families = self._model_name(), dict[str, Metric]()
        for rank, each in enumerate(engine.engines):
            stats, labels = each.stats(), engine_labels(name, rank)
            for found in (*_vllm_series(each, stats, labels), *_forge_series(stats, labels)):
                family = families.setdefault(found.name, found)
                if family is not found:
                    family.samples += found.samples
        yield from families.values()
        yield from _shared_series(engine, name)


def engine_labels(model_name: str, rank: int) -> dict[str, str]:
    """Return vLLM's labels of a server's engine, by its index."""
    return {"model_name": model_name, "engine": str(rank)}


def _server_state(now: str) -> Metric:
    family = GaugeMetricFamily(
        "forge:server_state", "1 for the current state of the server", labels=["state"]
    )
    for state in STATES:
        family.add_metric([state], float(state == now))
    return family


def _vllm_series(
    engine: AsyncEngine, stats: EngineStats, labels: dict[str, str]
) -> Iterator[Metric]:
    for name, (doc, value) in _vllm_gauges(stats).items():
        yield gauge(f"vllm:{name}", doc, labels, {(): value})
    for name, (doc, value) in _vllm_counters(stats).items():
        yield counter(f"vllm:{name}", doc, labels, {(): value})
    yield from _labeled_series(stats, labels)
    yield _cache_config(engine, stats, labels["engine"])
    totals = stats.step_tokens
    yield histogram(
        "vllm:iteration_tokens_total",
        "Tokens computed per step",
        labels,
        STEP_TOKENS,
        [((), totals.buckets, totals.total)],
    )


def _vllm_gauges(stats: EngineStats) -> dict[str, tuple[str, float]]:
    """Return the gauges without further labels: help text and value by name."""
    return {
        "num_requests_running": ("Samples in the running batch", stats.num_running),
        "num_requests_waiting": ("Waiting samples", stats.num_waiting),
        "kv_cache_usage_perc": (
            "Fraction of the KV cache blocks in use by sequences, from 0 to 1",
            stats.num_used_blocks / max(stats.num_blocks, 1),
        ),
    }


def _vllm_counters(stats: EngineStats) -> dict[str, tuple[str, int]]:
    """Return the counters without further labels: help text and value by name."""
    counters = {
        "prompt_tokens": ("Prompt tokens of accepted requests", stats.prompt_tokens),
        "prompt_tokens_cached": (
            "Prompt tokens of admitted requests that were in the prefix cache",
            stats.cached_prompt_tokens,
        ),
        "generation_tokens": ("Output tokens", stats.generation_tokens),
        "num_preemptions": ("Samples preempted for lack of KV cache blocks", stats.preemptions),
        "prefix_cache_queries": (
            "Tokens looked up in the prefix cache",
            stats.prefix_cache_queries,
        ),
        "prefix_cache_hits": ("Tokens found in the prefix cache", stats.prefix_cache_hits),
    }
    host = stats.host_kv
    if host is not None:
        counters |= {
            "external_prefix_cache_queries": (
                "Tokens looked up in host memory, because the device did not have them",
                host.queried_tokens,
            ),
            "external_prefix_cache_hits": ("Tokens loaded from host memory", host.hit_tokens),
        }
    speculation = stats.speculation
    if speculation is not None:
        counters |= {
            "spec_decode_num_drafts": ("Verified drafts", speculation.num_drafts),
            "spec_decode_num_draft_tokens": (
                "Verified draft tokens",
                speculation.num_draft_tokens,
            ),
            "spec_decode_num_accepted_tokens": (
                "Accepted draft tokens",
                sum(speculation.accepted_per_position),
            ),
        }
    return counters


def _labeled_series(stats: EngineStats, labels: dict[str, str]) -> Iterator[Metric]:
    """Yield the series with further labels."""
    yield gauge(
        "vllm:num_requests_waiting_by_reason",
        "Waiting samples: for capacity, or for another sample or host memory (deferred)",
        labels,
        {
            ("capacity",): stats.num_waiting - stats.num_deferred,
            ("deferred",): stats.num_deferred,
        },
        "reason",
    )
    yield counter(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens of admitted requests, by source of their KV cache entries",
        labels,
        {
            ("local_compute",): stats.computed_prompt_tokens,
            ("local_cache_hit",): stats.cached_prompt_tokens,
        },
        "source",
    )
    yield counter(
        "vllm:prompt_tokens_cached_by_source",
        "Prompt tokens of admitted requests that were in the prefix cache, by location",
        labels,
        {("device",): stats.cached_prompt_tokens},
        "source",
    )
    speculation = stats.speculation
    if speculation is not None:
        yield counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by position in the draft",
            labels,
            {(str(i),): n for i, n in enumerate(speculation.accepted_per_position)},
            "position",
        )


def _shared_series(engine: AsyncEngine, name: str) -> Iterator[Metric]:
    """Yield the series that all engines of a server share."""
    yield counter(
        "vllm:admission_rejections",
        "Requests rejected because a queue limit was reached, by limit",
        {"model_name": name},
        {(REJECTIONS[limit],): count for limit, count in engine.streams.refusals.items()},
        "reason",
    )
    if engine.adapters.places:
        yield _loras(engine)


def _cache_config(engine: AsyncEngine, stats: EngineStats, rank: str) -> Metric:
    kv_tokens = engine.limits.kv_tokens
    info = {
        "block_size": str(kv_tokens // stats.num_blocks),
        "num_gpu_blocks": str(stats.num_blocks),
        "kv_cache_size_tokens": str(kv_tokens),
        "kv_cache_max_concurrency": f"{kv_tokens / engine.max_model_len:.2f}",
        "engine": rank,
    }
    return gauge(
        "vllm:cache_config_info",
        "KV cache size, as labels; the value is always 1",
        info,
        {(): 1},
    )


def _loras(engine: AsyncEngine) -> Metric:
    waiting, running = engine.streams.loras_in_use()
    info = {
        "max_lora": str(engine.adapters.places),
        "waiting_lora_adapters": ",".join(sorted(waiting)),
        "running_lora_adapters": ",".join(sorted(running)),
    }
    doc = "LoRA adapters in use, as labels; the value is the current Unix time"
    return gauge("vllm:lora_requests_info", doc, info, {(): time.time()})


def _forge_series(stats: EngineStats, labels: dict[str, str]) -> Iterator[Metric]:
    counters = {
        "recoveries": ("Failed steps that were retried", stats.recoveries),
        "engine_restarts": ("Restarts of the engine process", stats.restarts),
        "engine_steps": ("Dispatched steps", stats.steps),
        "kv_block_evictions": ("Blocks evicted from the prefix cache", stats.evictions),
        "compilations_after_ready": (
            "Compilations after warm-up; should be 0",
            stats.compilations_after_ready,
        ),
    }
    for name, (doc, value) in counters.items():
        yield counter(f"forge:{name}", doc, labels, {(): value})
    yield gauge(
        "forge:stalled_seconds",
        "Seconds without a completed step while work is pending",
        labels,
        {(): stats.stalled_s},
    )
    states = {
        "engine_serving": ("1 while the engine computes requests", int(_serves(stats))),
        "engine_paused": ("1 while the engine is paused, else 0", int(stats.paused)),
        "engine_sleeping": ("1 while weights or KV cache are off the device", int(stats.sleeping)),
        "weight_version": ("Version of the current weights", stats.weight_version),
    }
    for name, (doc, value) in states.items():
        yield gauge(f"forge:{name}", doc, labels, {(): value})
    yield gauge(
        "forge:step_token_budget",
        "Token budget of the latest step that could include prefill",
        labels,
        {(): stats.step_token_budget},
    )
    if stats.expected_step_s is not None:
        yield gauge(
            "forge:expected_step_seconds",
            "Expected duration of a step with the current token budget, from past steps",
            labels,
            {(): stats.expected_step_s},
        )
    if stats.dropped_kv_event_batches is not None:
        yield counter(
            "forge:kv_event_batches_dropped",
            "Batches of KV events dropped because the publisher's queue was full",
            labels,
            {(): stats.dropped_kv_event_batches},
        )
    if stats.host_kv is not None:
        yield from _host_series(stats.host_kv, labels)
    yield from _forge_totals(stats, labels)


def _host_series(host: HostKVStats, labels: dict[str, str]) -> Iterator[Metric]:
    yield gauge(
        "forge:host_kv_blocks",
        "KV cache blocks that host memory has room for, by state",
        labels,
        {("stored",): host.num_blocks, ("free",): host.capacity - host.num_blocks},
        "state",
    )
    yield counter(
        "forge:host_kv_bytes",
        "Bytes of KV cache blocks copied to host memory (out) and back (in)",
        labels,
        {("out",): host.saved_bytes, ("in",): host.loaded_bytes},
        "direction",
    )
    yield counter(
        "forge:host_kv_blocks_lost",
        "Evicted blocks that were not copied, because too many copies were in progress",
        labels,
        {(): host.lost_blocks},
    )
    yield counter(
        "forge:host_kv_wait_seconds",
        "Seconds that samples waited for blocks from host memory",
        labels,
        {(): host.waited_s},
    )


def _serves(stats: EngineStats) -> bool:
    return stats.healthy and stats.state in ("serving", "ready")


def _forge_totals(stats: EngineStats, labels: dict[str, str]) -> Iterator[Metric]:
    yield gauge(
        "forge:kv_blocks",
        "KV cache blocks: used by sequences, cached by the prefix cache, or free",
        labels,
        {
            ("used",): stats.num_used_blocks,
            ("cached",): stats.num_cached_blocks,
            ("free",): stats.num_free_blocks - stats.num_cached_blocks,
        },
        "state",
    )
    yield gauge(
        "forge:startup_seconds",
        "Duration of each startup phase; for serving and ready, time from start to that state",
        labels,
        {(phase,): seconds for phase, seconds in stats.startup_seconds.items()},
        "phase",
    )
    phases = stats.step_phases.items()
    yield histogram(
        "forge:step_phase_seconds",
        "Host time of a step, by phase; the read phase waits for the device",
        labels,
        BOUNDS_S,
        [((phase,), totals.buckets, totals.total_s) for phase, totals in phases],
        "phase",
    )
