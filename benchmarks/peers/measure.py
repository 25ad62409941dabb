"""The client: sends a workload to a server, records the time of each token, returns the figures.

A `Workload` is a batch of equal requests. A `TraceReplay` has requests with the lengths and
arrivals of a trace, sent and measured by the client of `benchmarks.serving`.
"""

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

from benchmarks import workloads
from benchmarks.peers.engines import Engine
from benchmarks.random_model import NUM_RESERVED, prompt_text
from forge_serve.bench.client import run as run_workload
from forge_serve.bench.client import run_async
from forge_serve.bench.client import stream as stream_answer
from forge_serve.bench.metrics import Measured, latencies
from forge_serve.bench.traces import TraceEntry, fitted, trace
from forge_serve.bench.workload import Request, Sizes, Vocabulary
from forge_serve.http.client import new_session

PROMPT_TOKENS, NEW_TOKENS = 128, 64
PREFILL_TOKENS = 512


class MeasureError(Exception):
    """The answer differs from the request, so its times mean nothing."""


# Names of figures.
DECODE, END_TO_END = "decode_tokens_per_s", "output_tokens_per_s"
PREFILL_RATE = "prefill_tokens_per_s"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A batch of `batch` concurrent requests, each `prompt_tokens` in and `max_tokens` out.

    Attributes:
      figures: Names of the figures that `measure` returns, in the order of the table.
    """

    name: str
    batch: int
    prompt_tokens: int
    max_tokens: int
    figures: tuple[str, ...] = (DECODE, END_TO_END, "ttft_s", "wall_s")

    def shortened(self) -> Workload:
        """Return the same batch with few tokens, for warming up."""
        return dataclasses.replace(
            self, prompt_tokens=min(self.prompt_tokens, 16), max_tokens=min(self.max_tokens, 4)
        )

    def prompts(self, vocab_size: int, seed: Sequence[int]) -> list[list[int]]:
        random = np.random.default_rng(seed)
        return random.integers(NUM_RESERVED, vocab_size, (self.batch, self.prompt_tokens)).tolist()

    def measure(
        self, url: str, engine: Engine, vocab_size: int, number: int, attempt: int
    ) -> tuple[dict[str, float], list[str]]:
        """Send the workload once; each round and attempt has other prompts.

        Returns:
          The figures, and the first token of each answer.

        Raises:
          MeasureError: An answer failed or has another number of tokens.
        """
        seed = [number, attempt, self.batch, self.prompt_tokens]
        streams = run(url, engine, self, vocab_size, seed)
        return figures(self, streams), first_tokens(streams)


PREFILL = Workload(
    name="prefill", batch=1, prompt_tokens=PREFILL_TOKENS, max_tokens=2, figures=(PREFILL_RATE,)
)
WAKE_UP = Workload(name="wake-up", batch=1, prompt_tokens=8, max_tokens=2)


def batch_workload(batch: int) -> Workload:
    return Workload(
        name=f"batch {batch}", batch=batch, prompt_tokens=PROMPT_TOKENS, max_tokens=NEW_TOKENS
    )


def long_workload(context: int, batch: int) -> Workload:
    return Workload(
        name=f"{context} tokens x {batch}",
        batch=batch,
        prompt_tokens=context,
        max_tokens=NEW_TOKENS,
        figures=(PREFILL_RATE, DECODE),
    )


@dataclass(frozen=True, kw_only=True)
class TraceReplay:
    """The first requests of a trace, its arrivals stretched to a mean rate."""

    name: str
    entries: tuple[TraceEntry, ...]
    rate: float  # requests/s
    context: int  # length in tokens to which requests are truncated

    @property
    def time_scale(self) -> float:
        """The factor of the trace's times that gives the rate."""
        span_s = self.entries[-1].arrival_s
        return (len(self.entries) - 1) / self.rate / span_s if span_s else 1.0

    @property
    def prompt_lens(self) -> list[int]:
        return [fitted(entry, self.context)[0] for entry in self.entries]

    def measure(
        self, url: str, engine: Engine, vocab_size: int, number: int, attempt: int
    ) -> tuple[dict[str, float], list[str]]:
        """Measure like `Workload.measure`, but with prefix caches: prompts may share prefixes."""
        workload = trace(
            self.entries,
            Sizes(context=self.context),
            Vocabulary(range(NUM_RESERVED, vocab_size)),
            name=self.name,
            time_scale=self.time_scale,
            round_=number * 100 + attempt,
        )
        measured = run_async(_replayed(url, engine, workload, vocab_size))
        failed = [m.error for m in measured if m.error is not None]
        if len(failed) == len(measured):
            raise MeasureError(f"{engine.name}, {self.name}: every request failed: {failed[0]}")
        firsts = [first_token(m.text) if m.error is None else "" for m in measured]
        return trace_figures(measured), firsts


async def _replayed(
    url: str, engine: Engine, workload: workloads.Workload, vocab_size: int
) -> list[Measured]:
    async with new_session() as session:

        async def submit(request: Request) -> Measured:
            body = request_body(engine, request.prompt, request.max_tokens, vocab_size)
            body.pop("cache_prompt", None)
            answer = await stream_answer(session, f"{url}/v1/completions", body)
            # An event may contain several tokens, and some servers report no count.
            tokens = answer.text.count(" ")
            if answer.error is None and tokens != request.max_tokens:
                answer.error = f"{tokens} tokens instead of {request.max_tokens}"
            answer.completion_tokens = tokens
            return answer

        return (await run_workload(submit, workload)).measured


def trace_figures(measured: Sequence[Measured]) -> dict[str, float]:
    """Return latencies of the answered requests in milliseconds, and the count of failed ones."""
    spreads = latencies(measured)
    good = [m for m in measured if m.error is None]
    end_s = max(m.sent_s + m.end_s for m in good)
    found: dict[str, float] = {
        f"{name}_{p}_ms": spreads[f"{name}_ms"][p]
        for name in ("ttft", "itl")
        if spreads[f"{name}_ms"] is not None
        for p in ("p50", "p99")
    }
    output = sum(m.completion_tokens for m in good)
    return found | {END_TO_END: output / end_s, "failed": float(len(measured) - len(good))}


@dataclass(kw_only=True)
class Stream:
    """One answer; times are in seconds since its workload began."""

    token_times_s: list[float] = field(default_factory=list)
    text: str = ""


def run(
    url: str, engine: Engine, workload: Workload, vocab_size: int, seed: Sequence[int]
) -> list[Stream]:
    """Run a workload and return its answers.

    Raises:
      MeasureError: An answer failed or has another number of tokens.
    """
    bodies = [
        request_body(engine, token_ids, workload.max_tokens, vocab_size)
        for token_ids in workload.prompts(vocab_size, seed)
    ]
    streams = asyncio.run(_all(url, bodies))
    for stream in streams:
        if len(stream.token_times_s) != workload.max_tokens:
            raise MeasureError(
                f"{engine.name}, {workload.name}: {len(stream.token_times_s)} tokens instead of "
                f"{workload.max_tokens}: {stream.text[:200]!r}"
            )
    return streams


def request_body(
    engine: Engine, token_ids: Sequence[int], max_tokens: int, vocab_size: int
) -> dict[str, Any]:
    """Return a streamed, greedy completion of exactly `max_tokens` tokens for the engine."""
    ids = list(token_ids)
    body: dict[str, Any] = {
        "model": engine.model,
        "prompt": ids if engine.takes_token_ids else prompt_text(ids, vocab_size),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not engine.takes_token_ids:
        del body["ignore_eos"]  # transformers rejects it; these weights never choose EOS
    return {**body, **engine.body}


def figures(workload: Workload, streams: Sequence[Stream]) -> dict[str, float]:
    """Return tokens/s and seconds, the figures that a table shows of one run."""
    first_s = [stream.token_times_s[0] for stream in streams]
    end_s = max(stream.token_times_s[-1] for stream in streams)
    every = {
        PREFILL_RATE: workload.batch * workload.prompt_tokens / max(first_s),
        DECODE: decode_rate(streams),
        END_TO_END: workload.batch * workload.max_tokens / end_s,
        "ttft_s": statistics.median(first_s),
        "wall_s": end_s,
    }
    return {name: every[name] for name in workload.figures}


def decode_rate(streams: Sequence[Stream]) -> float:
    """Return tokens/s of all streams while all of them decode.

    The interval starts when the last stream gets its first token and ends when the first stream
    gets its last one. Each stream is counted between its own tokens in that interval, so that no
    burst of tokens is cut. If there is no such interval, the rate is NaN.
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
    return [first_token(stream.text) for stream in streams]


def first_token(text: str) -> str:
    return text.split(maxsplit=1)[0]


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
