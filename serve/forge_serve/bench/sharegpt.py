"""Conversations in the form of ShareGPT's data set: the first prompt and the length of its answer.

The form is a JSON list of `{"conversations": [{"from": "human", "value": TEXT}, {"from": "gpt",
"value": TEXT}, ...]}`. As in `vllm bench serve`, only the first two turns are used, and very short
ones are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.workload import Request, rng_of

MIN_TOKENS = 4  # tokens of a prompt, and of an answer

type Encode = Callable[[str], Sequence[int]]
type Turns = tuple[str, str]  # a prompt and its answer


def read_sharegpt(path: Path) -> list[Turns]:
    """Return the first two turns of each conversation that has them.

    Raises:
      BenchmarkError: the file cannot be read, or has another form.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchmarkError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise BenchmarkError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, list):
        raise BenchmarkError(f"{path}: not a JSON list of conversations")
    found = []
    for number, entry in enumerate(content):
        try:
            turns = [turn["value"] for turn in entry["conversations"][:2]]
        except (KeyError, TypeError) as error:
            raise BenchmarkError(
                f"{path}: entry {number} has no `conversations` with `value`"
            ) from error
        if len(turns) == 2 and all(isinstance(turn, str) for turn in turns):
            found.append((turns[0], turns[1]))
    return found


def sharegpt(
    conversations: Sequence[Turns],
    encode: Encode,
    *,
    count: int,
    context: int,
    output_len: int | None = None,
    seed: int = 0,
) -> list[Request]:
    """Return requests for `count` different conversations in random order.

    Args:
      encode: returns the token IDs of a text.
      context: maximum tokens of a prompt plus its output. Longer conversations are left out.
      output_len: output tokens of all requests. Default: the length of each answer.

    Raises:
      BenchmarkError: there are too few conversations that fit.
    """
    order = list(conversations)
    rng_of(seed, "sharegpt").shuffle(order)
    requests = []
    for request in _fitting(order, encode, context, output_len):
        requests.append(request)
        if len(requests) == count:
            return requests
    raise BenchmarkError(
        f"the data set has {len(requests)} conversations of at least {MIN_TOKENS} tokens that fit "
        f"the context of {context} tokens, but {count} are needed: lower --num-prompts"
    )


def _fitting(
    conversations: Sequence[Turns], encode: Encode, context: int, output_len: int | None
) -> Iterator[Request]:
    for prompt, answer in conversations:
        ids = tuple(encode(prompt))
        answer_len = len(encode(answer))
        max_tokens = output_len or answer_len
        if min(len(ids), answer_len) >= MIN_TOKENS and len(ids) + max_tokens <= context:
            yield Request(prompt=ids, max_tokens=max_tokens)
