"""The client: sends a workload to a server, notes when each token came, makes figures of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from benchmarks.peers.engines import Engine
from benchmarks.random_model import NUM_RESERVED, prompt_text

PROMPT_TOKENS, NEW_TOKENS = 128, 64
PREFILL_TOKENS = 512


class MeasureError(Exception):
    """An answer that is not what was asked for; its times mean nothing."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`batch` requests at the same time, each `prompt_tokens` in and `max_tokens` out."""

    name: str
    batch: int
    prompt_tokens: int
    max_tokens: int

    def shortened(self) -> Workload:
        """For warming up: the same batch, few tokens."""
        return dataclasses.replace(
            self, prompt_tokens=min(self.prompt_tokens, 16), max_tokens=min(self.max_tokens, 4)
        )

    def prompts(self, vocab_size: int, seed: Sequence[int]) -> list[list[int]]:
        random = np.random.default_rng(seed)
        return random.integers(NUM_RESERVED, vocab_size, (self.batch, self.prompt_tokens)).tolist()


PREFILL = Workload(name="prefill", batch=1, prompt_tokens=PREFILL_TOKENS, max_tokens=2)
WAKE_UP = Workload(name="wake-up", batch=1, prompt_tokens=8, max_tokens=2)


def batch_workload(batch: int) -> Workload:
    return Workload(
        name=f"batch {batch}", batch=batch, prompt_tokens=PROMPT_TOKENS, max_tokens=NEW_TOKENS
    )


@dataclass(kw_only=True)
class Stream:
    """One answer. Times in seconds from when its workload began."""

    token_times_s: list[float] = field(default_factory=list)
    text: str = ""


def run(
    url: str, engine: Engine, workload: Workload, vocab_size: int, seed: Sequence[int]
) -> list[Stream]:
    """Raises MeasureError if an answer fails or has another number of tokens."""
    bodies = []
    for token_ids in workload.prompts(vocab_size, seed):
        body = {
            "model": engine.model,
            "prompt": token_ids if engine.takes_token_ids else prompt_text(token_ids, vocab_size),
            "max_tokens": workload.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not engine.takes_token_ids:
            del body["ignore_eos"]  # transformers refuses it; these weights never choose the end
        bodies.append({**body, **engine.body})
    streams = asyncio.run(_all(url, bodies))
    for stream in streams:
        if len(stream.token_times_s) != workload.max_tokens:
            raise MeasureError(
                f"{engine.name}, {workload.name}: {len(stream.token_times_s)} tokens instead of "
                f"{workload.max_tokens}: {stream.text[:200]!r}"
            )
    return streams


def figures(workload: Workload, streams: Sequence[Stream]) -> dict[str, float]:
    """Tokens/s, or seconds: what a table shows of one run."""
    first_s = [stream.token_times_s[0] for stream in streams]
    if workload.name == PREFILL.name:
        return {"prefill_tokens_per_s": workload.prompt_tokens / first_s[0]}
    end_s = max(stream.token_times_s[-1] for stream in streams)
    return {
        "decode_tokens_per_s": decode_rate(streams),
        "output_tokens_per_s": workload.batch * workload.max_tokens / end_s,
        "ttft_s": statistics.median(first_s),
        "wall_s": end_s,
    }


def decode_rate(streams: Sequence[Stream]) -> float:
    """Tokens/s of all streams while all of them decode.

    That is from the moment the last stream has its first token to the moment the first stream has
    its last one. Each stream is counted between its own tokens of that time, so a batch whose
    tokens arrive in bursts is not cut in the middle of one. NaN if there is no such time.
    """
    begin_s = max(stream.token_times_s[0] for stream in streams)
    end_s = min(stream.token_times_s[-1] for stream in streams)
    rate = 0.0
    for stream in streams:
        inside = [t for t in stream.token_times_s if begin_s <= t <= end_s]
        if len(inside) < 2 or inside[-1] == inside[0]:
            return float("nan")
        rate += sum(t > inside[0] for t in inside) / (inside[-1] - inside[0])
    return rate


def first_tokens(streams: Sequence[Stream]) -> list[str]:
    return [stream.text.split(maxsplit=1)[0] for stream in streams]


async def _all(url: str, bodies: Sequence[Mapping[str, Any]]) -> list[Stream]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start = time.perf_counter()
        return await asyncio.gather(*(_stream(session, url, body, start) for body in bodies))


async def _stream(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], start: float
) -> Stream:
    stream = Stream()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise MeasureError(f"HTTP {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            now = time.perf_counter() - start
            event = json.loads(line[6:])
            if "error" in event:
                raise MeasureError(f"an error in the stream: {event['error']}")
            for choice in event.get("choices", ()):
                text = choice.get("text") or ""
                stream.text += text
                # Each token of the random models is a space and some letters.
                stream.token_times_s += [now] * text.count(" ")
    return stream
