"""Sampling flags, which become fields of OpenAI's request bodies."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

from forge_jax.config import option
from forge_jax.config.suggest import did_you_mean
from forge_jax.errors import ConfigError
from forge_serve.cli.flags import Flag, flags, texts_of


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Flags of the sampler. A flag that is not set is not in the body, so the default applies."""

    max_tokens: int | None = option(
        None, "maximum number of output tokens; auto: as many as fit the context"
    )
    temperature: float | None = option(
        None,
        "sampling temperature from 0 (greedy) to 100; auto: 1, the model's own distribution",
    )
    top_p: float | None = option(
        None,
        "nucleus sampling: sample from the smallest set of tokens whose cumulative probability "
        "reaches X, above 0 and up to 1; auto: 1, all tokens",
    )
    top_k: int | None = option(None, "sample from the N most likely tokens; auto: all tokens")
    min_p: float | None = option(
        None,
        "drop tokens less likely than X times the most likely one, from 0 to 1; auto: 0, off",
    )
    presence_penalty: float | None = option(
        None, "penalty for each token that is already in the output, from -2 to 2; auto: 0"
    )
    frequency_penalty: float | None = option(
        None, "penalty for each occurrence of a token in the output, from -2 to 2; auto: 0"
    )
    repetition_penalty: float | None = option(
        None,
        "penalty factor for tokens that are in the prompt or output, from 0.01 to 100. Values "
        "above 1 make them less likely; auto: 1",
    )
    seed: int | None = option(None, "random seed: the same seed gives the same text; auto: random")
    stop: tuple[str, ...] = option(
        (), "stop string: ends the output and is not part of it; may be repeated"
    )

    def body(self) -> dict[str, Any]:
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) not in (None, ())
        }


@dataclass(frozen=True, kw_only=True)
class CompletionFlags(SamplingFlags):
    """Flags for texts that may never end by themselves."""

    max_tokens: int | None = option(256, "maximum number of tokens to generate")
    n: int = option(1, "number of samples, from 1 to 32")


def with_word(settings: SamplingFlags, name: str, word: str) -> SamplingFlags:
    """Return the settings with one of them changed, to a value in the flags' spelling.

    `auto` restores the default.

    Raises:
      ConfigError: there is no such setting, or the value is invalid.
    """
    flag = _setting(name)
    if flag.repeated:
        return dataclasses.replace(settings, **{flag.name: () if word == "auto" else (word,)})
    try:
        return dataclasses.replace(settings, **{flag.name: flag.value(word)})
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{flag.name} {error}") from error


def with_value(settings: SamplingFlags, name: str, value: Any) -> SamplingFlags:
    """Return the settings with one of them changed, to a value of a request's field.

    Raises:
      ConfigError: there is no such setting, or the value has the wrong type.
    """
    flag = _setting(name)
    try:
        value = tuple(texts_of(value)) if flag.repeated else flag.value.of(value)
    except ConfigError as error:
        raise ConfigError(f"{flag.name} {error}") from error
    return dataclasses.replace(settings, **{flag.name: value})


def _setting(name: str) -> Flag:
    known = {flag.name: flag for flag in flags(SamplingFlags)}
    flag = known.get(name.replace("-", "_"))
    if flag is None:
        raise ConfigError(
            f"unknown setting {name!r}{did_you_mean(name, known)} (choose from: {', '.join(known)})"
        )
    return flag
