"""The limits of one request, in one table: the class `Limits`.

Each field is a row with its default, range, flag and meaning. Rows without a flag are fixed,
because they are sizes of the engine's arrays or no client needs more. `openai.validation` checks
requests against the rows and has no other numeric limits.

Two kinds of limits are elsewhere: ranges of numbers such as `temperature` are in `SamplingParams`,
and the model's context bounds the tokens of a request.
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
    MAX_STEERING_VECTORS,
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
    """The table of limits.

    Raises:
      ConfigError: a value is outside its row's range. The message names the flag.
    """

    target_bytes: int = _row(8190, "bytes in the path and query of a request", low=1024)
    header_bytes: int = _row(
        8190, "bytes in the value of a header", low=1024, high=64 * KIB, flag="--max-header-bytes"
    )
    headers: int = _row(128, "headers in a request", low=32)
    body_bytes: int = _row(
        8 * MIB,
        "bytes in a request body, after decompression",
        low=KIB,
        high=1024 * MIB,
        flag="--max-body-bytes",
    )
    json_depth: int = _row(64, "nesting levels of arrays and objects in a body", low=8)
    json_containers: int = _row(64 * KIB, "arrays and objects in a body", low=KIB)
    json_keys: int = _row(128 * KIB, "keys of all objects in a body", low=KIB)
    json_strings: int = _row(256 * KIB, "strings in a body, including keys", low=KIB)
    json_values: int = _row(MIB, "values in a body, counted as commas plus one", low=KIB)
    number_digits: int = _row(400, "consecutive digits of a number in a body", low=20)
    text_bytes: int = _row(
        2 * MIB,
        "bytes of text to tokenize per request, after truncation",
        low=KIB,
        high=1024 * MIB,
        flag="--max-text-bytes",
    )
    prompts: int = _row(1024, "prompts per request", low=1, high=64 * KIB, flag="--max-prompts")
    messages: int = _row(4096, "messages per chat", low=1, high=32 * KIB, flag="--max-messages")
    files: int = _row(32, "files per chat", low=1)
    n: int = _row(32, "samples per prompt", low=1, high=MAX_N, flag="--max-n")
    choices: int = _row(
        4096, "choices per request: prompts times samples", low=1, high=64 * KIB,
        flag="--max-choices",
    )  # fmt: skip
    logprobs: int = _row(MAX_LOGPROBS, "alternatives per token in the logprobs", low=0)
    logprob_values: int = _row(
        MIB,
        "logprobs in a response: choices times tokens times (alternatives + 1)",
        low=KIB,
        high=256 * MIB,
        flag="--max-logprob-values",
    )
    stop_strings: int = _row(MAX_STOP_STRINGS, "stop strings", low=1)
    stop_string_bytes: int = _row(MAX_STOP_STRING_CHARS, "bytes in a stop string", low=1)
    stop_token_ids: int = _row(MAX_STOP_TOKEN_IDS, "stop token IDs", low=1)
    logit_bias: int = _row(MAX_LOGIT_BIAS, "tokens with a logit bias", low=1)
    allowed_token_ids: int = _row(MAX_ALLOWED_TOKEN_IDS, "allowed token IDs", low=1)
    bad_words: int = _row(MAX_BAD_WORDS, "bad words", low=1)
    bad_word_bytes: int = _row(MAX_BAD_WORD_CHARS, "bytes in a bad word", low=1)
    steering_vectors: int = _row(MAX_STEERING_VECTORS, "steering vectors per request", low=1)
    cache_salt_chars: int = _row(128, "characters in a cache salt", low=1)
    template_kwargs_bytes: int = _row(64 * KIB, "bytes in chat_template_kwargs as JSON", low=KIB)
    tools: int = _row(
        128, "tools per chat, and tool calls per message", low=1, high=1024, flag="--max-tools"
    )
    schema_bytes: int = _row(
        64 * KIB,
        "bytes in a JSON schema or a grammar",
        low=KIB,
        high=MIB,
        flag="--max-schema-bytes",
    )
    literal_bytes: int = _row(
        4 * KIB,
        "bytes in an allowed choice, object key, enum string or const string",
        low=16,
    )
    schema_depth: int = _row(32, "nesting levels of arrays and objects in a JSON schema", low=4)
    regex_bytes: int = _row(
        2 * KIB, "bytes in a regular expression", low=16, high=64 * KIB, flag="--max-regex-bytes"
    )

    def __post_init__(self) -> None:
        for row in rows():
            value = getattr(self, row.name)
            name = row.flag or row.name
            if type(value) is not int:
                raise ConfigError(f"{name} must be an integer, got {value!r}")
            if not row.low <= value <= row.high:
                raise ConfigError(f"{name} must be between {row.low} and {row.high}, got {value}")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    name: str
    default: int
    low: int  # the range that an operator may set
    high: int
    flag: str | None
    doc: str


def rows() -> Iterator[Row]:
    for field in dataclasses.fields(Limits):
        about = field.metadata
        assert isinstance(field.default, int)
        yield Row(
            field.name, field.default, about["low"], about["high"], about["flag"], about["doc"]
        )
