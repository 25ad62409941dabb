"""Suites of workloads that are measured together, and the room that servers need for them.

Each suite has its own servers, because room for a few long sequences and room for many short
ones need different flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import measure
from benchmarks.peers.engines import Room
from benchmarks.peers.measure import (
    DECODE,
    END_TO_END,
    NEW_TOKENS,
    PREFILL,
    PREFILL_RATE,
    TraceReplay,
    Workload,
)
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.traces import read_trace

NAMES = ("batches", "long", "trace")
SHORT = 768  # maximum tokens of a sequence in the short workloads
MODEL_CONTEXT = 65_536  # maximum context in the random models' configs


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A column of the table: a figure of one workload."""

    title: str
    workload: str
    figure: str
    is_latency: bool = False  # lower is better


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A set of workloads with common servers.

    Attributes:
      warm_ups: Sent to each server once, before any round.
    """

    name: str
    room: Room
    workloads: tuple[Workload | TraceReplay, ...]
    warm_ups: tuple[Workload, ...]
    metrics: tuple[Metric, ...]


def batches(batch_sizes: Sequence[int]) -> Suite:
    """Return batches of 128 tokens in and 64 out, by batch size, and one of 512 tokens in."""
    sizes = sorted(set(batch_sizes))
    loads = [measure.batch_workload(size) for size in sizes]
    metrics = [_metric(f"decode {load.batch}", load, DECODE) for load in loads]
    metrics.append(_metric("prefill", PREFILL, PREFILL_RATE))
    metrics += [
        _metric(f"end to end {load.batch}", load, END_TO_END) for load in loads if load.batch > 1
    ]
    return Suite(
        name="batches",
        room=Room(max_num_seqs=max(32, *sizes), max_model_len=SHORT),
        workloads=(*loads, PREFILL),
        warm_ups=(*(load.shortened() for load in loads), PREFILL),
        metrics=tuple(metrics),
    )


def long(contexts: Sequence[int], batch_sizes: Sequence[int]) -> Suite:
    """Return requests of `contexts` tokens in and 64 out.

    Raises:
      BenchmarkError: A context exceeds that of the models.
    """
    longest = MODEL_CONTEXT - NEW_TOKENS
    if not all(0 < context <= longest for context in contexts):
        raise BenchmarkError(f"--contexts must be from 1 to {longest}")
    loads = [
        measure.long_workload(context, batch)
        for context in sorted(set(contexts))
        for batch in sorted(set(batch_sizes))
    ]
    metrics = []
    for load in loads:
        at = f"{load.prompt_tokens}" + (f" x {load.batch}" if load.batch > 1 else "")
        metrics += [_metric(f"prefill {at}", load, PREFILL_RATE)]
        metrics += [_metric(f"decode {at}", load, DECODE)]
    return Suite(
        name="long",
        room=_room(max(batch_sizes), max(contexts) + NEW_TOKENS),
        workloads=tuple(loads),
        warm_ups=(*(load.shortened() for load in loads), PREFILL),
        metrics=tuple(metrics),
    )


def trace(
    file: Path, rates: Sequence[float], max_requests: int, context: int, max_num_seqs: int
) -> Suite:
    """Return the first requests of a trace at mean rates, in requests/s.

    Raises:
      BenchmarkError: The file cannot be read, or a size or rate is invalid.
    """
    if not all(0 < rate < float("inf") for rate in rates):
        raise BenchmarkError("--rates must be greater than 0 and finite")
    if not 64 <= context <= MODEL_CONTEXT:
        raise BenchmarkError(f"--trace-context must be from 64 to {MODEL_CONTEXT}")
    if max_requests < 2:
        raise BenchmarkError("--max-requests must be at least 2")
    entries = tuple(read_trace(file, max_requests))
    replays = [
        TraceReplay(name=f"{file.stem} at {rate:g}/s", entries=entries, rate=rate, context=context)
        for rate in rates
    ]
    metrics = []
    for replay, rate in zip(replays, rates, strict=True):
        metrics += [
            Metric(
                title=f"{title}, ms, {rate:g}/s",
                workload=replay.name,
                figure=figure,
                is_latency=True,
            )
            for title, figure in (
                ("TTFT p50", "ttft_p50_ms"),
                ("TTFT p99", "ttft_p99_ms"),
                ("ITL p50", "itl_p50_ms"),
                ("ITL p99", "itl_p99_ms"),
            )
        ]
        metrics.append(
            Metric(title=f"tokens/s, {rate:g}/s", workload=replay.name, figure=END_TO_END)
        )
        metrics.append(Metric(title=f"failed, {rate:g}/s", workload=replay.name, figure="failed"))
    return Suite(
        name=f"trace {file.stem}",
        room=_room(max_num_seqs, context),
        workloads=tuple(replays),
        warm_ups=(measure.batch_workload(max_num_seqs).shortened(), PREFILL),
        metrics=tuple(metrics),
    )


def _room(max_num_seqs: int, max_model_len: int) -> Room:
    """Return room for sequences that also fit a warm-up."""
    return Room(max_num_seqs=max_num_seqs, max_model_len=max(max_model_len, SHORT))


def _metric(title: str, workload: Workload, figure: str) -> Metric:
    return Metric(title=title, workload=workload.name, figure=figure)
