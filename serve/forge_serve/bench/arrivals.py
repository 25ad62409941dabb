"""Arrival times of requests: Poisson or bursty arrivals, and limits of concurrency."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.workload import ALL, Request, Workload, rng_of


def poisson(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return arrival times in s from 0, with gamma-distributed intervals of mean `1 / rate`.

    `burstiness` is the shape, as in `vllm bench serve`: 1 is a Poisson process, less comes in
    bursts, more is steadier. If the rate is infinite, all requests come at once.
    """
    if not rate > 0:
        raise BenchmarkError(f"the request rate must be greater than 0, not {rate}")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise BenchmarkError(f"the burstiness must be greater than 0, not {burstiness}")
    if math.isinf(rate):
        return [0.0] * count
    rng = rng_of(seed, "arrivals")
    gaps = (rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))[:count]


def with_load(
    workload: Workload,
    *,
    rate: float | None = None,
    burstiness: float = 1.0,
    concurrency: int | None = None,
    seed: int = 0,
) -> Workload:
    """Return the same requests under another load: a rate, a concurrency limit, or both."""
    if rate is not None:
        times = poisson(len(workload.requests), rate, burstiness, seed)
        requests = tuple(arriving(workload.requests, times))
        workload = dataclasses.replace(workload, requests=requests, concurrency={})
    if concurrency is not None:
        if concurrency < 1:
            raise BenchmarkError(f"the concurrency must be at least 1, not {concurrency}")
        requests = workload.requests
        if rate is None:
            requests = tuple(arriving(requests, [0.0] * len(requests)))
        workload = dataclasses.replace(workload, requests=requests, concurrency={ALL: concurrency})
    return workload


def arriving(requests: Sequence[Request], times: Sequence[float]) -> list[Request]:
    return [dataclasses.replace(r, arrival_s=t) for r, t in zip(requests, times, strict=True)]
