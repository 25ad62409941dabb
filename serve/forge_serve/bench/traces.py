"""Traces: recorded lengths and arrival times of requests, and their replay as a workload."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.workload import Request, Sizes, Vocabulary, Workload, rng_of

TRACE_BLOCK = 512  # tokens of one hash id in Mooncake's traces


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
        raise BenchmarkError(f"{path}: {reason}") from error
    if not entries:
        raise BenchmarkError(f"{path}: no requests in it")
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
        raise BenchmarkError(f"the scale of a trace must not be negative, not {time_scale}")
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
        facts["prompt_tokens_shared"] = shared_tokens(requests)
    return Workload(name=name, requests=tuple(requests), facts=facts)


def _azure_rows(path: Path, file: Any) -> Iterator[TraceEntry]:
    reader = csv.DictReader(file)
    columns = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    if not columns <= set(reader.fieldnames or ()):
        raise BenchmarkError(
            f"{path}: neither JSON lines nor a CSV with {', '.join(sorted(columns))}"
        )
    for row in reader:
        try:
            yield TraceEntry(
                arrival_s=_epoch_s(row["TIMESTAMP"]),
                input_len=int(row["ContextTokens"]),
                output_len=int(row["GeneratedTokens"]),
            )
        except (TypeError, ValueError) as error:
            raise BenchmarkError(f"{path}, line {reader.line_num}: {error}") from error


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
            raise BenchmarkError(f"{path}, line {number}: no {error} in it") from error
        except (TypeError, ValueError) as error:
            raise BenchmarkError(f"{path}, line {number}: {error}") from error


def shared_tokens(requests: Sequence[Request]) -> int:
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
