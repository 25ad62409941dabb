"""A streaming client of any OpenAI-compatible server, with a clock on every event."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Measured:
    """One streamed request. Times in seconds from the moment it was sent."""

    ttft_s: float | None = None  # first event with content
    end_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between events with content
    completion_tokens: int = 0
    text: str = ""
    error: str | None = None


async def stream_chat(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Measured:
    """POSTs `body` to /v1/chat/completions with streaming and usage, and reads it to its end."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    result = Measured()
    start = time.perf_counter()
    last = None
    done = False
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            result.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            return result
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                done = True
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                result.error = str(event["error"])
                return result
            if event.get("usage"):
                result.completion_tokens = event["usage"]["completion_tokens"]
            for choice in event.get("choices", ()):
                if not choice["delta"].get("content"):
                    continue
                result.text += choice["delta"]["content"]
                if last is None:
                    result.ttft_s = now - start
                else:
                    result.gaps_s.append(now - last)
                last = now
    result.end_s = time.perf_counter() - start
    if not done:
        result.error = "the stream ended without [DONE]"
    return result


async def run_all(url: str, bodies: Sequence[dict[str, Any]]) -> tuple[list[Measured], float]:
    """All requests at once. Returns their measurements and the wall time of the whole, in s."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        start = time.perf_counter()
        results = await asyncio.gather(*(stream_chat(session, url, body) for body in bodies))
        return list(results), time.perf_counter() - start


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile (0 to 100) by linear interpolation; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    at = (len(ordered) - 1) * p / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
