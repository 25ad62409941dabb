"""Workloads: requests with exact lengths in tokens and arrival times, fixed by a seed.

A workload is made for a context length, from a vocabulary. Lengths and arrivals depend on `seed`;
token ids depend on `seed` and `round_`. Rounds are therefore equal work, and no round hits the
prefix cache of another. This module does not depend on HTTP or an engine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forge_serve.bench.arrivals import arriving, poisson
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.traces import shared_tokens
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
    requests = arriving(requests, poisson(len(requests), 16.0, 1.0, seed))
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
    facts = {"prompt_tokens_shared": shared_tokens(requests)}
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
