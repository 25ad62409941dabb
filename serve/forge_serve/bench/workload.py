"""Workloads: requests with exact lengths in tokens, reproducible by seed.

Lengths depend on `seed`, token IDs on `seed` and `round_`. Rounds are therefore equal work, and no
round finds another's prompts in a prefix cache. This module depends on neither HTTP nor an engine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from forge_jax.checkpoint.hub import BUNDLED, resolve
from forge_jax.errors import CheckpointError
from forge_jax.text.tokenizer_file import load_backend
from forge_serve.bench.errors import BenchmarkError

ALL = "all"  # the default group of requests
WARM_UP = -1  # the round of the warm-up, which is not measured


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request with a prompt of token IDs or the text of a user's message."""

    max_tokens: int
    prompt: tuple[int, ...] = ()
    text: str | None = None
    arrival_s: float = 0.0  # earliest send time since the start of the run
    after: int | None = None  # index of a request that must complete first
    group: str = ALL  # reports have figures per group
    json_schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    requests: tuple[Request, ...]
    concurrency: Mapping[str, int] = field(default_factory=dict)  # by group, see `limit_of`
    facts: Mapping[str, Any] = field(default_factory=dict)  # description for the report
    endpoint: str | None = None  # the only endpoint that supports it; None: any

    def limit_of(self, group: str) -> str | None:
        """Return the key in `concurrency` that limits a group: its own, else "all", else None."""
        return next((name for name in (group, ALL) if name in self.concurrency), None)

    @property
    def load(self) -> str:
        """Description of the arrival of the requests."""
        limits = ", ".join(
            f"{n} at once" + ("" if group == ALL else f" ({group})")
            for group, n in self.concurrency.items()
        )
        span = max((r.arrival_s for r in self.requests), default=0.0)
        arrival = f"arriving over {span:.1f} s" if span else "" if limits else "all at once"
        return ", ".join(filter(None, (arrival, limits)))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a workload."""

    context: int  # maximum tokens of a sequence, prompt and output
    num_requests: int = 64
    input_len: int | None = None  # tokens of a prompt in `baseline`
    output_len: int | None = None  # tokens of an output in `baseline`

    def __post_init__(self) -> None:
        if self.context < 64:
            raise BenchmarkError(f"the context must have at least 64 tokens, not {self.context}")
        if self.num_requests < 1:
            raise BenchmarkError(
                f"the number of requests must be at least 1, not {self.num_requests}"
            )
        for flag, value in (("--input-len", self.input_len), ("--output-len", self.output_len)):
            if value is not None and value < 1:
                raise BenchmarkError(f"{flag} must be at least 1, not {value}")
        if (self.input_len or 1) + (self.output_len or 1) > self.context:
            raise BenchmarkError(
                f"--input-len plus --output-len exceeds the context of {self.context} tokens"
            )


class Vocabulary:
    """Token IDs for prompts: ordinary words, no special tokens.

    If there is a tokenizer, `text` returns a text that encodes to exactly the given ids.
    """

    MAX_WORDS = 2048
    MIN_WORDS = 8

    def __init__(self, ids: Sequence[int], backend: Backend | None = None):
        self.ids = tuple(ids)
        self._backend = backend

    @classmethod
    def plain(cls) -> Vocabulary:
        """Return ids that every vocabulary has, without a tokenizer."""
        return cls(range(10, 250))

    @classmethod
    def of(cls, backend: Backend) -> Vocabulary:
        """Return whole words with a leading space, or letters if the tokenizer has no such words.

        Raises:
          BenchmarkError: neither survives a round trip through text.
        """
        special = {i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        pieces = sorted((i, piece) for piece, i in backend.get_vocab().items() if i not in special)
        words = (i for i, p in pieces if p[:1] in "Ġ▁" and p[1:].isascii() and p[1:].isalpha())
        letters = (i for i, p in pieces if len(p) == 1 and p.isascii() and p.isalpha())
        for candidates in (words, letters):
            stable = (i for i in candidates if _ids_again(backend, [i, i, i]) == [i, i, i])
            ids = list(itertools.islice(stable, cls.MAX_WORDS))
            if len(ids) >= cls.MIN_WORDS and _ids_again(backend, ids) == ids:
                return cls(ids, backend)
        raise BenchmarkError(
            "this tokenizer cannot make texts of an exact number of tokens: send token IDs"
        )

    @classmethod
    def from_file(cls, path: Path) -> Vocabulary:
        """Return the vocabulary of a tokenizer.json or of the folder that contains it."""
        file = path / "tokenizer.json" if path.is_dir() else path.resolve()
        try:
            backend = load_backend(file)
        except (CheckpointError, FileNotFoundError) as error:
            raise BenchmarkError(
                f"--tokenizer {path}: no usable tokenizer.json: {error}"
            ) from error
        backend.no_truncation()
        backend.no_padding()
        return cls.of(backend)

    @classmethod
    def of_model(cls, *names: str | None) -> Vocabulary:
        """Return the vocabulary of the first name that has a local tokenizer, or a plain one."""
        for name in names:
            if name and (name == BUNDLED or Path(name).is_dir()):
                folder = resolve(name)
                if (folder / "tokenizer.json").is_file():
                    return cls.from_file(folder)
        return cls.plain()

    @property
    def has_text(self) -> bool:
        return self._backend is not None

    def sample(self, rng: random.Random, count: int) -> tuple[int, ...]:
        return tuple(rng.choices(self.ids, k=count))

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of a text, with a BOS token if the tokenizer adds one.

        Raises:
          BenchmarkError: there is no tokenizer.
        """
        if self._backend is None:
            raise BenchmarkError(
                "a data set of texts requires the model's tokenizer: set --tokenizer FOLDER"
            )
        return self._backend.encode(text).ids

    def text(self, ids: Sequence[int]) -> str:
        """Return a text of exactly these tokens. A server may add a BOS token or a template.

        Raises:
          BenchmarkError: there is no tokenizer, or it encodes the text differently.
        """
        if self._backend is None:
            raise BenchmarkError(
                "text prompts require the model's tokenizer: set --tokenizer FOLDER"
            )
        if _ids_again(self._backend, ids) != list(ids):
            raise BenchmarkError(
                "this tokenizer cannot make texts of an exact number of tokens: send token IDs"
            )
        return self._backend.decode(list(ids), skip_special_tokens=False)


def _ids_again(backend: Backend, ids: Sequence[int]) -> list[int]:
    text = backend.decode(list(ids), skip_special_tokens=False)
    return backend.encode(text, add_special_tokens=False).ids


def baseline(sizes: Sizes, vocabulary: Vocabulary, seed: int, round_: int) -> Workload:
    """Return the baseline workload: requests of equal size."""
    input_len = sizes.input_len or min(128, sizes.context // 4)
    output_len = sizes.output_len or min(64, sizes.context - input_len)
    content = content_of("baseline", seed, round_)
    requests = [
        Request(prompt=vocabulary.sample(content, input_len), max_tokens=output_len)
        for _ in range(sizes.num_requests)
    ]
    return Workload(name="baseline", requests=tuple(requests), concurrency={ALL: 16})


def rng_of(*key: Any) -> random.Random:
    return random.Random(":".join(map(str, key)))


def content_of(workload: str, seed: int, round_: int) -> random.Random:
    """Return a generator that differs by workload, so that no workload hits another's cache."""
    return rng_of(workload, seed, round_)
