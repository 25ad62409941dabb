"""What one request may ask for at most: every limit in one table, which is the class `Limits`.

A field is a row: its default, the smallest and the largest value that an operator may set, the flag
that sets it, and what it counts. A row without a flag is fixed: the engine's arrays have that size,
or no client has a use for more. `openai.validation` holds requests to the rows; it has no numbers
of its own.

What is not here: ranges of single numbers (`temperature`, `top_p` and so on) are the engine's own,
in `SamplingParams`; how many tokens a request may have is what the model's context has room for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from forge_jax.config import option
from forge_jax.errors import ConfigError
from forge_jax.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

KIB = 1024
MIB = 1024 * KIB


def _row(default: int, doc: str, *, low: int, high: int | None = None, flag: str | None = None):
    return option(default, doc, low=low, high=default if high is None else high, flag=flag)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The table. Raises `ConfigError`, naming the flag, for a value outside its row's range."""

    target_bytes: int = _row(8190, "bytes of the path and query of a request", low=1024)
    header_bytes: int = _row(
        8190, "bytes of a header's value", low=1024, high=64 * KIB, flag="--max-header-bytes"
    )
    headers: int = _row(128, "header fields of a request", low=32)
    body_bytes: int = _row(
        8 * MIB,
        "bytes of a request's body, after decompression",
        low=KIB,
        high=1024 * MIB,
        flag="--max-body-bytes",
    )
    json_depth: int = _row(64, "levels of arrays and objects in a body", low=8)
    json_containers: int = _row(64 * KIB, "arrays and objects in a body", low=KIB)
    json_keys: int = _row(128 * KIB, "keys of all objects in a body", low=KIB)
    json_strings: int = _row(256 * KIB, "strings in a body, keys among them", low=KIB)
    json_values: int = _row(MIB, "values in a body: one, and one for each comma", low=KIB)
    number_digits: int = _row(400, "digits in a row of a number in a body", low=20)
    text_bytes: int = _row(
        2 * MIB,
        "bytes of text that a request may have tokenized; of truncated prompts, what is kept",
        low=KIB,
        high=1024 * MIB,
        flag="--max-text-bytes",
    )
    prompts: int = _row(1024, "prompts of a request", low=1, high=64 * KIB, flag="--max-prompts")
    messages: int = _row(4096, "messages of a chat", low=1, high=32 * KIB, flag="--max-messages")
    n: int = _row(32, "samples of each prompt", low=1, high=MAX_N, flag="--max-n")
    choices: int = _row(
        4096, "choices of a request: prompts times samples", low=1, high=64 * KIB,
        flag="--max-choices",
    )  # fmt: skip
    logprobs: int = _row(MAX_LOGPROBS, "alternatives of each token in the logprobs", low=0)
    logprob_values: int = _row(
        MIB,
        "logprobs of an answer: choices times tokens times alternatives and one",
        low=KIB,
        high=256 * MIB,
        flag="--max-logprob-values",
    )
    stop_strings: int = _row(MAX_STOP_STRINGS, "stop strings", low=1)
    stop_string_bytes: int = _row(MAX_STOP_STRING_CHARS, "bytes of a stop string", low=1)
    stop_token_ids: int = _row(MAX_STOP_TOKEN_IDS, "stop token ids", low=1)
    logit_bias: int = _row(MAX_LOGIT_BIAS, "tokens with a bias", low=1)
    allowed_token_ids: int = _row(MAX_ALLOWED_TOKEN_IDS, "allowed token ids", low=1)
    bad_words: int = _row(MAX_BAD_WORDS, "bad words", low=1)
    bad_word_bytes: int = _row(MAX_BAD_WORD_CHARS, "bytes of a bad word", low=1)
    cache_salt_chars: int = _row(128, "characters of a cache salt", low=1)
    template_kwargs_bytes: int = _row(64 * KIB, "bytes of chat_template_kwargs, as JSON", low=KIB)
    tools: int = _row(
        128, "tools of a chat, and tool calls of a message", low=1, high=1024, flag="--max-tools"
    )
    schema_bytes: int = _row(
        64 * KIB,
        "bytes of a JSON schema, as JSON, or of a grammar",
        low=KIB,
        high=MIB,
        flag="--max-schema-bytes",
    )
    literal_bytes: int = _row(
        4 * KIB,
        "bytes of a choice; in a JSON schema, of a key or a text of enum and const",
        low=16,
    )
    schema_depth: int = _row(32, "levels of arrays and objects in a JSON schema", low=4)
    regex_bytes: int = _row(
        2 * KIB, "bytes of a regular expression", low=16, high=64 * KIB, flag="--max-regex-bytes"
    )

    def __post_init__(self) -> None:
        for row in rows():
            value = getattr(self, row.name)
            name = row.flag or row.name
            if type(value) is not int:
                raise ConfigError(f"{name} must be a whole number, not {value!r}")
            if not row.low <= value <= row.high:
                raise ConfigError(f"{name} must be between {row.low} and {row.high}, not {value}")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    default: int
    low: int  # what an operator may set
    high: int
    flag: str | None
    doc: str


def rows() -> Iterator[Row]:
    """The table's lines in their order."""
    for field in dataclasses.fields(Limits):
        about = field.metadata
        assert isinstance(field.default, int)
        yield Row(
            field.name, field.default, about["low"], about["high"], about["flag"], about["doc"]
        )
