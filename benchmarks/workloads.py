"""Workloads: requests with exact lengths in tokens and arrival times, fixed by a seed.

A workload is made for a context length, from a vocabulary. Lengths and arrivals depend on `seed`;
token ids depend on `seed` and `round_`. Rounds are therefore equal work, and no round hits the
prefix cache of another. This module does not depend on HTTP or an engine.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.workload import (
    ALL,
    Request,
    Sizes,
    Vocabulary,
    Workload,
    baseline,
    content_of,
    rng_of,
)

TRACE_BLOCK = 512  # tokens of one hash id in Mooncake's traces
TEMPLATE_TOKENS = 32  # room left for a BOS token, or for the additions of a chat template


# --- the workloads -----------------------------------------------------------------------------


def continuous_batching(sizes: Sizes, vocabulary: Vocabulary, seed: int, round_: int) -> Workload:
    """Return outputs of very different lengths that arrive over time.

    A static batch waits for its longest output, and every later request waits for the batch.
    """
    rng, content = _lengths(seed), content_of("continuous_batching", seed, round_)
    most = sizes.context // 4
    requests = [
        Request(
            prompt=vocabulary.sample(content, rng.randint(8, most // 2)),
            max_tokens=min(rng.choices((16, 64, 256), weights=(5, 3, 2))[0], most),
        )
        for _ in range(sizes.num_requests)
    ]
    requests = _arriving(requests, poisson(len(requests), 16.0, 1.0, seed))
    return Workload(name="continuous_batching", requests=tuple(requests))


def paged_attention(sizes: Sizes, vocabulary: Vocabulary, seed: int, round_: int) -> Workload:
    """Return many concurrent sequences of 16 tokens up to the whole context.

    A contiguous cache would reserve the whole context for each.
    """
    rng, content = _lengths(seed), content_of("paged_attention", seed, round_)
    requests = [
        Request(
            prompt=vocabulary.sample(content, _log_uniform(rng, 8, sizes.context // 2)),
            max_tokens=_log_uniform(rng, 8, sizes.context // 4),
        )
        for _ in range(sizes.num_requests)
    ]
    facts = {
        "kv_tokens_used": sum(len(r.prompt) + r.max_tokens for r in requests),
        "kv_tokens_contiguous": len(requests) * sizes.context,
    }
    return Workload(name="paged_attention", requests=tuple(requests), facts=facts)


def chunked_prefill(sizes: Sizes, vocabulary: Vocabulary, seed: int, round_: int) -> Workload:
    """Return prompts as long as the context that arrive one by one while short ones decode.

    The figure is the inter-token latency of the group "decoder".
    """
    content = content_of("chunked_prefill", seed, round_)
    num_long = max(sizes.num_requests // 2, 1)
    decoder_len, long_output = sizes.context // 4, 8
    decoders = [
        Request(
            prompt=vocabulary.sample(content, 16),
            max_tokens=decoder_len,
            group="decoder",
        )
        for _ in range(max(sizes.num_requests - num_long, 1))
    ]
    long = [
        Request(
            prompt=vocabulary.sample(content, sizes.context - long_output),
            max_tokens=long_output,
            group="long",
        )
        for _ in range(num_long)
    ]
    return Workload(
        name="chunked_prefill",
        requests=tuple(_interleave(decoders, long)),
        concurrency={"decoder": 8, "long": 1},
    )


def prefix_caching(sizes: Sizes, vocabulary: Vocabulary, seed: int, round_: int) -> Workload:
    """Return conversations of four turns under two shared system prompts.

    A turn comes after the answer to the one before. The repeated history has made-up answers, so
    that all servers get equal prompts. Groups are the turns.
    """
    turns, systems = 4, 2
    content = content_of("prefix_caching", seed, round_)
    shared = [vocabulary.sample(content, sizes.context // 4) for _ in range(systems)]
    piece = max(sizes.context // 32, 2)
    requests: list[Request] = []
    for conversation in range(max(sizes.num_requests // turns, 1)):
        history = shared[conversation % systems]
        for turn in range(turns):
            history += vocabulary.sample(content, piece)
            requests.append(
                Request(
                    prompt=history,
                    max_tokens=piece,
                    group=f"turn {turn + 1}",
                    after=len(requests) - 1 if turn else None,
                )
            )
            history += vocabulary.sample(content, piece)  # the made-up answer
    facts = {"prompt_tokens_shared": _shared_tokens(requests)}
    return Workload(
        name="prefix_caching", requests=tuple(requests), concurrency={ALL: 8}, facts=facts
    )


def mixed(sizes: Sizes, vocabulary: Vocabulary, seed: int, round_: int) -> Workload:
    """Return requests for offline runs: outputs of 16 to 256 tokens, half with a shared prefix."""
    rng, content = _lengths(seed), content_of("mixed", seed, round_)
    quarter = sizes.context // 4
    shared = vocabulary.sample(content, quarter)
    requests = []
    for i in range(sizes.num_requests):
        own = vocabulary.sample(content, rng.randint(8, quarter // 2))
        output_len = min(rng.choices((16, 64, 256), weights=(5, 3, 2))[0], quarter)
        requests.append(Request(prompt=shared + own if i % 2 else own, max_tokens=output_len))
    return Workload(name="mixed", requests=tuple(requests))


PERSON: Mapping[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_NAMES = ("John", "Mary", "Tom", "Anna", "Sam", "Lily", "Ben", "Sue")


def structured(sizes: Sizes, vocabulary: Vocabulary, seed: int, round_: int) -> Workload:
    """Return requests whose answers must follow a JSON schema.

    The report counts the answers that do.
    """
    content = content_of("structured", seed, round_)
    requests = [
        Request(
            text=f"Extract the name and age: {content.choice(_NAMES)} is "
            f"{content.randint(2, 99)} years old.",
            max_tokens=min(64, sizes.context // 4),
            json_schema=PERSON,
        )
        for _ in range(sizes.num_requests)
    ]
    return Workload(
        name="structured", requests=tuple(requests), concurrency={ALL: 8}, endpoint="chat"
    )


Maker = Callable[[Sizes, Vocabulary, int, int], Workload]
WORKLOADS: Mapping[str, Maker] = {
    maker.__name__: maker
    for maker in (
        baseline,
        continuous_batching,
        paged_attention,
        chunked_prefill,
        prefix_caching,
        structured,
    )
}


def make(
    name: str, sizes: Sizes, vocabulary: Vocabulary, *, seed: int = 0, round_: int = 0
) -> Workload:
    """Return the workload of that name.

    Raises:
      BenchmarkError: The name is unknown.
    """
    if name not in WORKLOADS:
        raise BenchmarkError(f"no workload {name}: there are {', '.join(WORKLOADS)}")
    return WORKLOADS[name](sizes, vocabulary, seed, round_)


# --- traces ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TraceEntry:
    arrival_s: float  # since the first one
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()  # blocks of `TRACE_BLOCK` tokens; equal ids mean equal tokens


def read_trace(path: Path, max_requests: int | None = None) -> list[TraceEntry]:
    """Return the first entries of a trace, in the order of their arrival.

    Formats: the CSV of the Azure LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens)
    and Mooncake's JSON lines (timestamp in ms, input_length, output_length, hash_ids).

    Raises:
      BenchmarkError: The trace is malformed; names the file and the line.
    """
    try:
        with path.open(newline="") as file:
            first = file.read(1)
            file.seek(0)
            rows = _mooncake_rows(path, file) if first == "{" else _azure_rows(path, file)
            entries = list(itertools.islice(rows, max_requests))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise BenchmarkError(f"--trace {path}: {reason}") from error
    if not entries:
        raise BenchmarkError(f"--trace {path}: no requests in it")
    entries.sort(key=lambda e: e.arrival_s)
    start = entries[0].arrival_s
    return [dataclasses.replace(e, arrival_s=e.arrival_s - start) for e in entries]


def fitted(entry: TraceEntry, context: int) -> tuple[int, int]:
    """Return the prompt and output lengths that fit a context; the output gets at most half."""
    output_len = max(min(entry.output_len, context // 2), 1)
    return max(min(entry.input_len, context - output_len), 1), output_len


def trace(
    entries: Sequence[TraceEntry],
    sizes: Sizes,
    vocabulary: Vocabulary,
    *,
    name: str = "trace",
    time_scale: float = 1.0,
    seed: int = 0,
    round_: int = 0,
) -> Workload:
    """Return the replay of a trace: arrivals times `time_scale`, lengths cut to the context.

    An output keeps at most half of the context. A prompt keeps as much of its beginning as still
    fits.
    """
    if not (time_scale >= 0 and math.isfinite(time_scale)):
        raise BenchmarkError(f"--trace-scale must not be negative, not {time_scale}")
    requests = []
    clipped = 0
    for index, entry in enumerate(entries):
        input_len, output_len = fitted(entry, sizes.context)
        clipped += (input_len, output_len) < (entry.input_len, entry.output_len)
        blocks = [
            vocabulary.sample(rng_of(seed, round_, "block", hash_id), TRACE_BLOCK)
            for hash_id in entry.hash_ids[: -(-input_len // TRACE_BLOCK)]
        ]
        prompt = tuple(itertools.chain.from_iterable(blocks))[:input_len]
        prompt += vocabulary.sample(rng_of(seed, round_, "own", index), input_len - len(prompt))
        requests.append(
            Request(prompt=prompt, max_tokens=output_len, arrival_s=entry.arrival_s * time_scale)
        )
    facts = {"time_scale": time_scale, "requests_clipped": clipped}
    if any(entry.hash_ids for entry in entries):
        facts["prompt_tokens_shared"] = _shared_tokens(requests)
    return Workload(name=name, requests=tuple(requests), facts=facts)


def _azure_rows(path: Path, file: Any) -> Iterator[TraceEntry]:
    reader = csv.DictReader(file)
    columns = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    if not columns <= set(reader.fieldnames or ()):
        raise BenchmarkError(
            f"--trace {path}: neither JSON lines nor a CSV with {', '.join(sorted(columns))}"
        )
    for row in reader:
        try:
            yield TraceEntry(
                arrival_s=_epoch_s(row["TIMESTAMP"]),
                input_len=int(row["ContextTokens"]),
                output_len=int(row["GeneratedTokens"]),
            )
        except (TypeError, ValueError) as error:
            raise BenchmarkError(f"--trace {path}, line {reader.line_num}: {error}") from error


def _epoch_s(timestamp: str) -> float:
    when = datetime.datetime.fromisoformat(timestamp)
    return (when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp()


def _mooncake_rows(path: Path, file: Any) -> Iterator[TraceEntry]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield TraceEntry(
                arrival_s=row["timestamp"] / 1e3,
                input_len=int(row["input_length"]),
                output_len=int(row["output_length"]),
                hash_ids=tuple(row.get("hash_ids", ())),
            )
        except KeyError as error:
            raise BenchmarkError(f"--trace {path}, line {number}: no {error} in it") from error
        except (TypeError, ValueError) as error:
            raise BenchmarkError(f"--trace {path}, line {number}: {error}") from error


# --- arrivals ----------------------------------------------------------------------------------


def poisson(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return arrival times in s from 0, with gamma-distributed intervals of mean `1 / rate`.

    `burstiness` is the shape, as in `vllm bench serve`: 1 is a Poisson process, less comes in
    bursts, more is steadier. If the rate is infinite, all requests come at once.
    """
    if not rate > 0:
        raise BenchmarkError(f"--rate must be greater than 0, not {rate}")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise BenchmarkError(f"--burstiness must be greater than 0, not {burstiness}")
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
        requests = tuple(_arriving(workload.requests, times))
        workload = dataclasses.replace(workload, requests=requests, concurrency={})
    if concurrency is not None:
        if concurrency < 1:
            raise BenchmarkError(f"--concurrency must be at least 1, not {concurrency}")
        requests = workload.requests
        if rate is None:
            requests = tuple(_arriving(requests, [0.0] * len(requests)))
        workload = dataclasses.replace(workload, requests=requests, concurrency={ALL: concurrency})
    return workload


def _arriving(requests: Sequence[Request], times: Sequence[float]) -> list[Request]:
    return [dataclasses.replace(r, arrival_s=t) for r, t in zip(requests, times, strict=True)]


# --- random sources ----------------------------------------------------------------------------


def _lengths(seed: int) -> random.Random:
    return rng_of(seed, "lengths")


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(max(high, low)))))


def _interleave(many: Sequence[Request], few: Sequence[Request]) -> list[Request]:
    """Spread `few` evenly among `many`."""
    places = [(i / len(many), r) for i, r in enumerate(many)]
    places += [((i + 0.5) / len(few), r) for i, r in enumerate(few)]
    return [r for _, r in sorted(places, key=lambda place: place[0])]


def _shared_tokens(requests: Sequence[Request]) -> int:
    """Count prompt tokens in a common prefix with an earlier prompt, which a cache could save."""
    shared = 0
    root: dict[int, Any] = {}
    for request in requests:
        node, new = root, False
        for token in request.prompt:
            new = new or token not in node
            shared += not new
            node = node.setdefault(token, {})
    return shared
