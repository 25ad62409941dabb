"""Flags of the sampler, as the fields of OpenAI's bodies that they become."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from forge_jax.config import option


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """What is not given is left out of the body: then the server's defaults hold."""

    max_tokens: int | None = option(
        None, "most tokens of an answer; auto: what the context has room for"
    )
    temperature: float | None = option(
        None, "0: always the likeliest token; auto: 1, the model's own distribution"
    )
    top_p: float | None = option(None, "only the likeliest tokens that have this share together")
    top_k: int | None = option(None, "only so many of the likeliest tokens")
    min_p: float | None = option(None, "only tokens this likely beside the likeliest")
    presence_penalty: float | None = option(None, "against tokens that the output has")
    frequency_penalty: float | None = option(None, "the same, for each time that it has them")
    repetition_penalty: float | None = option(
        None, "against tokens of prompt and output; above 1: they become less likely"
    )
    seed: int | None = option(None, "the same seed gives the same text; auto: another each time")
    stop: tuple[str, ...] = option((), "a text that ends the output; may be repeated")

    def body(self) -> dict[str, Any]:
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) not in (None, ())
        }


@dataclass(frozen=True, kw_only=True)
class CompletionFlags(SamplingFlags):
    """Of a text that may never come to an end by itself."""

    max_tokens: int | None = option(256, "most tokens to add")
    n: int = option(1, "how many samples")
