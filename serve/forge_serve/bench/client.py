"""Streaming client of OpenAI-compatible servers that measures the time of every event.

`stream` posts one body, `Server` makes the bodies of a workload's requests, and `run` sends them at
the workload's load. `run` accepts any function that answers a request, so the same load also drives
an engine in this process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import msgspec

from forge_jax.host.progress import progress_bar
from forge_serve.bench.metrics import Measured
from forge_serve.bench.workload import Request, Vocabulary, Workload
from forge_serve.http.client import (
    MAX_ERROR_CHARS,
    EventsError,
    base_url,
    error_message,
    model_card,
    new_session,
    read_events,
)

REFUSED = frozenset({400, 404, 405, 422, 501})  # the server does not support the request
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

Endpoint = Literal["completions", "chat"]
Prompts = Literal["ids", "text"]
Submit = Callable[[Request], Awaitable[Measured]]

_decode = msgspec.json.decode


async def stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Measured:
    """Post `body` with streaming and usage, and read the response to its end.

    Errors of the server or the network do not raise. They are the `error` of the result.
    """
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    result = Measured()
    start = time.perf_counter()
    try:
        async with session.post(url, data=msgspec.json.encode(body)) as response:
            if response.status != 200:
                result.error = f"HTTP {response.status}: {error_message(await response.text())}"
                result.refused = response.status in REFUSED
                return result
            async for event in read_events(response.content):
                _take(event, result, time.perf_counter() - start)
                if result.error is not None:
                    break
            if not result.tokens_known:
                result.completion_tokens = result.events
    except (aiohttp.ClientError, TimeoutError) as error:
        result.error = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
    except EventsError as error:
        result.error = str(error)
    result.end_s = time.perf_counter() - start
    return result


def _take(event: Any, result: Measured, now: float) -> None:
    """Add an event that arrived `now` seconds after the request was sent."""
    if event.get("error"):
        result.error = error_message(event["error"])
        return
    usage = event.get("usage")
    if usage:
        result.tokens_known = True
        result.prompt_tokens = usage.get("prompt_tokens")
        result.completion_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        result.cached_tokens = details.get("cached_tokens") or 0
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        result.finish_reason = choice.get("finish_reason") or result.finish_reason
        # Reasoning is also output. A model without a tokenizer returns only token ids.
        others = (delta.get("reasoning_content"), delta.get("reasoning"), choice.get("token_ids"))
        if not (text or any(others)):
            continue
        result.text += text
        result.heard(now)


async def stream_chat(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Measured:
    return await stream(session, url + PATHS["chat"], body)


async def run_all(url: str, bodies: Sequence[dict[str, Any]]) -> tuple[list[Measured], float]:
    """Send chats simultaneously. Return their measurements and the total wall time in seconds."""
    async with new_session() as session:
        start = time.perf_counter()
        results = await asyncio.gather(*(stream_chat(session, url, body) for body in bodies))
        return list(results), time.perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class Server:
    """Server under measurement. `connect` checks that it responds."""

    session: aiohttp.ClientSession
    url: str
    model: str
    context: int | None  # context length in tokens, if the server reports it
    vocabulary: Vocabulary
    endpoint: Endpoint = "completions"
    prompts: Prompts = "ids"  # form of completions' prompts; chats are text
    ignore_eos: bool = True  # outputs have exactly the requested length if the server supports it
    temperature: float = 0.0

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        vocabulary: Vocabulary | None = None,
        **options: Any,
    ) -> AsyncIterator[Server]:
        """Connect to a server and use the named model, or its first one.

        The default vocabulary is the model's if its files are on this machine, otherwise a plain
        one.

        Raises:
          ServerError: the server does not respond, or does not serve the model.
        """
        url = base_url(url)
        async with new_session(api_key) as session:
            card = await model_card(session, url, model)
            meta = card.get("meta") or {}
            yield cls(
                session=session,
                url=url,
                model=card["id"],
                context=card.get("max_model_len") or meta.get("n_ctx") or meta.get("n_ctx_train"),
                vocabulary=vocabulary or Vocabulary.of_model(card.get("root"), card["id"]),
                **options,
            )

    async def submit(self, request: Request) -> Measured:
        endpoint = "chat" if request.text is not None else self.endpoint
        measured = await stream(self.session, self.url + PATHS[endpoint], self.body(request))
        if measured.completion_tokens == 0 and measured.error is None:
            measured.error = "response without output"
        return measured

    def body(self, request: Request) -> dict[str, Any]:
        """Return the JSON body of a request for this server."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": self.temperature,
        }
        if request.json_schema is not None:
            schema = {"name": "answer", "strict": True, "schema": request.json_schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self.ignore_eos:
            body["ignore_eos"] = True
        if request.text is not None:
            body["messages"] = [{"role": "user", "content": request.text}]
        elif self.endpoint == "chat":
            content = self.vocabulary.text(request.prompt)
            body["messages"] = [{"role": "user", "content": content}]
        elif self.prompts == "text":
            body["prompt"] = self.vocabulary.text(request.prompt)
        else:
            body["prompt"] = request.prompt
        return body

    async def counters(self) -> dict[str, float]:
        """Return the server's counters since its start, by our names; empty if it has none."""
        stats = await _get_or_none(self.session, f"{self.url}/stats")
        if stats is not None:
            with suppress(msgspec.DecodeError):
                decoded = _decode(stats)
                if isinstance(decoded, dict):
                    return _from_stats(decoded)
        text = await _get_or_none(self.session, f"{self.url}/metrics")
        return {} if text is None else parse_counters(text.decode(errors="replace"))


# Our name -> names of other servers in /metrics, without their prefix and _total.
COUNTERS = {
    "steps": ("engine_steps",),
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens", "tokens_predicted"),
    "preemptions": ("num_preemptions",),
    "prefix_cache_queries": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "prefix_cache_hits": ("prefix_cache_hits", "gpu_prefix_cache_hits", "cached_tokens"),
    "compilations_after_ready": ("compilations_after_ready",),
    "drafts": ("spec_decode_num_drafts",),
    "draft_tokens": ("spec_decode_num_draft_tokens",),
    "accepted_draft_tokens": ("spec_decode_num_accepted_tokens",),
}


def _from_stats(stats: dict[str, Any]) -> dict[str, float]:
    """Return the counters of this project's /stats."""
    found = {name: stats[name] for name in COUNTERS if name in stats}
    speculation = stats.get("speculation")
    if speculation:
        found["drafts"] = speculation["num_drafts"]
        found["draft_tokens"] = speculation["num_draft_tokens"]
        found["accepted_draft_tokens"] = sum(speculation["accepted_per_position"])
    return found


def parse_counters(text: str) -> dict[str, float]:
    """Return the known counters in Prometheus' text format, summed over labels."""
    ours = {theirs: name for name, all_theirs in COUNTERS.items() for theirs in all_theirs}
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or " " not in line:
            continue
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0].strip().rpartition(":")[2].removesuffix("_total")
        if name in ours:
            with suppress(ValueError):
                found[ours[name]] = found.get(ours[name], 0.0) + float(value)
    return found


@dataclass(frozen=True, kw_only=True)
class Run:
    measured: list[Measured]
    wall_s: float


async def run(submit: Submit, workload: Workload, *, progress: bool = False) -> Run:
    """Send a workload's requests at its load, and return when all have completed.

    A request is sent when it is due, its predecessor has completed, and its group is below its
    concurrency. Waiting requests are sent in order.
    """
    limits = {name: asyncio.Semaphore(n) for name, n in workload.concurrency.items()}
    answered = [asyncio.Event() for _ in workload.requests]
    start = time.perf_counter()

    async def one(index: int, request: Request, bar: Any) -> Measured:
        due_s = request.arrival_s
        if request.after is not None:
            await answered[request.after].wait()
            due_s = max(due_s, time.perf_counter() - start)
        await asyncio.sleep(max(start + due_s - time.perf_counter(), 0.0))
        limit = workload.limit_of(request.group)
        async with limits[limit] if limit is not None else nullcontext():
            sent_s = time.perf_counter() - start
            measured = await submit(request)
        answered[index].set()
        measured.group = request.group
        measured.sent_s = sent_s
        measured.late_s = sent_s - due_s if limit is None else 0.0
        measured.asked_tokens = request.max_tokens
        measured.json_wanted = request.json_schema is not None
        bar.update()
        return measured

    with progress_bar(
        total=len(workload.requests),
        desc=workload.name,
        unit="requests",
        show=progress,
    ) as bar:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one(i, request, bar))
                for i, request in enumerate(workload.requests)
            ]
    return Run(measured=[t.result() for t in tasks], wall_s=time.perf_counter() - start)


def run_async[T](main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop if installed, so that the client is not the bottleneck."""
    factory = None
    with suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


async def _get_or_none(session: aiohttp.ClientSession, url: str) -> bytes | None:
    try:
        async with session.get(url) as response:
            return await response.read() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None
