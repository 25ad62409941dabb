"""Measurements of requests, and figures computed from them.

Times are in seconds in `Measured` and in milliseconds in figures, which benchmarks/README.md
defines.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (50, 95, 99)


@dataclass(kw_only=True)
class Measured:
    """Measurement of one streamed request. Times are in seconds since it was sent."""

    group: str = "all"
    sent_s: float = 0.0  # since the start of the run
    late_s: float = 0.0  # delay of the client
    ttft_s: float | None = None  # first event with content
    last_s: float | None = None  # last event with content
    end_s: float = 0.0  # end of the stream
    gaps_s: list[float] = field(default_factory=list)
    events: int = 0  # events with content
    prompt_tokens: int | None = None  # this and the next two are the server's counts
    completion_tokens: int = 0
    cached_tokens: int = 0
    tokens_known: bool = False  # False: `completion_tokens` is the number of events
    asked_tokens: int = 0
    finish_reason: str | None = None
    text: str = ""
    json_wanted: bool = False
    error: str | None = None
    refused: bool = False  # the server does not support the request

    def heard(self, now_s: float) -> None:
        """Count an event with content."""
        self.events += 1
        if self.last_s is None:
            self.ttft_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        if self.ttft_s is None or self.last_s is None or self.completion_tokens < 2:
            return None
        return (self.last_s - self.ttft_s) / (self.completion_tokens - 1)


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Latency limits for goodput. None is no limit."""

    ttft_ms: float | None = None
    itl_ms: float | None = None  # maximum inter-token latency of the request
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def asked(self) -> dict[str, float]:
        return {name: limit for name, limit in vars(self).items() if limit is not None}

    def met_by(self, m: Measured) -> bool:
        """Return True if a request has output, did not fail and met all limits."""
        if m.error is not None or m.ttft_s is None:
            return False
        taken_s = {
            "ttft_ms": m.ttft_s,
            "itl_ms": max(m.gaps_s, default=0.0),
            "tpot_ms": m.tpot_s or 0.0,
            "e2e_ms": m.end_s,
        }
        return all(1e3 * taken_s[name] <= limit for name, limit in self.asked.items())


def percentile(values: Sequence[float], p: float) -> float:
    """Return the p-th percentile (0 to 100) by linear interpolation, or NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    at = (len(ordered) - 1) * p / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def spread_ms(seconds: Iterable[float]) -> dict[str, float] | None:
    """Return the mean and percentiles in milliseconds, or None without values."""
    values = [1e3 * s for s in seconds]
    if not values:
        return None
    return {"mean": math.fsum(values) / len(values)} | {
        f"p{p}": percentile(values, p) for p in PERCENTILES
    }


def latencies(measured: Sequence[Measured]) -> dict[str, Any]:
    """Return TTFT, ITL, TPOT and end-to-end latency of the successful requests."""
    good = [m for m in measured if m.error is None]
    return {
        "ttft_ms": spread_ms(m.ttft_s for m in good if m.ttft_s is not None),
        "itl_ms": spread_ms(gap for m in good for gap in m.gaps_s),
        "tpot_ms": spread_ms(m.tpot_s for m in good if m.tpot_s is not None),
        "e2e_ms": spread_ms(m.end_s for m in good),
    }


def summarize(
    measured: Sequence[Measured], wall_s: float, slo: Slo | None = None
) -> dict[str, Any]:
    """Return all figures of one run, as JSON values."""
    good = [m for m in measured if m.error is None]
    prompt = sum(m.prompt_tokens or 0 for m in good)
    output = sum(m.completion_tokens for m in good)
    events = sum(m.events for m in good)
    summary: dict[str, Any] = {
        "requests": len(measured),
        "completed": len(good),
        "errors": dict(Counter(m.error for m in measured if m.error is not None)),
        "wall_s": wall_s,
        "prompt_tokens": prompt,
        "cached_prompt_tokens": sum(m.cached_tokens for m in good),
        "output_tokens": output,
        "output_tokens_asked": sum(m.asked_tokens for m in good),
        "events": events,
        "requests_without_usage": sum(not m.tokens_known for m in good),
        "requests_per_s": len(good) / wall_s,
        "output_tokens_per_s": output / wall_s,
        "total_tokens_per_s": (prompt + output) / wall_s,
        **latencies(measured),
        "client_late_ms": spread_ms(m.late_s for m in measured),
    }
    if slo is not None and slo.asked:
        kept = sum(map(slo.met_by, measured))
        summary["goodput"] = {
            "slo": slo.asked,
            "requests_per_s": kept / wall_s,
            "share": kept / len(measured) if measured else 0.0,
        }
    groups = sorted({m.group for m in measured})
    if len(groups) > 1:
        summary["groups"] = {
            name: {"requests": len(members), **latencies(members)}
            for name in groups
            for members in [[m for m in measured if m.group == name]]
        }
    wanted = [m for m in good if m.json_wanted]
    if wanted:
        summary["json_valid"] = sum(is_json_object(m.text) for m in wanted)
    return summary


def refusal(measured: Sequence[Measured]) -> str | None:
    """Return the server's error if it rejected every request as unsupported."""
    if measured and all(m.refused for m in measured):
        return measured[0].error
    return None


def is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
