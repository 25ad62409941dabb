"""Checks of a request before it is queued: limits, token IDs, salts, stop strings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from forge_jax.config import Pooling
from forge_jax.config.suggest import did_you_mean
from forge_jax.errors import RequestError
from forge_jax.grammar.spec import refused
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.activations import matching
from forge_jax.schedule.request import Request, TokenIds, output_room

if TYPE_CHECKING:
    from forge_jax.grammar.token_filter import TokenFilter
    from forge_jax.text import Tokenizer


class Steering(NamedTuple):
    """The steering vectors that requests can select."""

    layers: int  # layers of the model
    one_vector: dict[str, bool]  # by name: True if all layers share one vector
    digest: str  # hash of names and values


class ActivationLimits(NamedTuple):
    """The activations that requests can return."""

    row_bytes: dict[str, int]  # bytes of one token's activation, by name
    max_bytes: int  # limit per request

    def names(self, patterns: Iterable[str]) -> list[str]:
        """Return the names that a request selects, in the order of computation.

        Raises:
          RequestError: a pattern selects nothing.
        """
        found: set[str] = set()
        for index, pattern in enumerate(patterns):
            matched = matching(pattern, self.row_bytes)
            if not matched:
                raise RequestError(
                    f"return_activations: names[{index}] matches no activation of "
                    f"--activations{did_you_mean(pattern, self.row_bytes)}",
                    param="return_activations",
                )
            found.update(matched)
        return [name for name in self.row_bytes if name in found]


class ResearchLimits(NamedTuple):
    """The steering vectors, activations and pooling that requests can use."""

    steering: Steering | None = None  # None: no steering vectors are loaded
    activations: ActivationLimits | None = None  # None: the engine returns none
    pools: bool = True


class Limits(NamedTuple):
    """Limits of every request, in tokens and ids."""

    vocab_size: int  # the model's output width
    context: int  # prompt and output of a sequence
    kv_tokens: int  # capacity of the engine's KV cache
    steering: Steering | None = None  # None: no steering vectors are loaded
    activations: ActivationLimits | None = None  # None: the engine returns none
    pools: bool = True  # the device can pool hidden states


def check_request(request: Request, limits: Limits, tokenizer: Tokenizer | None) -> None:
    """Reject a request that an engine with these limits can never serve.

    Raises:
      RequestError: `param` names the field.
    """
    check_token_ids(request, limits.vocab_size)
    check_salt(request.cache_salt)
    _check_pooling(request, limits)
    _check_steering(request.params, limits.steering)
    if request.params.constrained and tokenizer is None:
        raise refused("the model has no tokenizer")
    if request.params.stop and tokenizer is None:
        raise RequestError(
            "stop strings need a tokenizer, which this model does not have: use stop_token_ids",
            param="stop",
        )
    token_filter(request.params, tokenizer, limits.vocab_size)
    room = output_room(request, limits.context, limits.kv_tokens)
    check_activations(request.params, [(len(request.prompt_token_ids), room)], limits.activations)


def token_filter(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int
) -> TokenFilter | None:
    """Return the filter of `allowed_token_ids` and `bad_words`; None if neither is set.

    Raises:
      RequestError: if they exclude every token, or a bad word has no tokens.
    """
    if params.allowed_token_ids is None and not params.bad_words:
        return None
    from forge_jax.grammar.token_filter import TokenFilter

    return TokenFilter.of(params, tokenizer, vocab_size)


def _check_pooling(request: Request, limits: Limits) -> None:
    params = request.params
    if request.pooling is None:
        return
    if not limits.pools:
        raise RequestError(
            "embeddings do not work with --pipeline-parallel: serve the model with "
            "--tensor-parallel instead",
            param="pooling",
        )
    if request.pooling not in get_args(Pooling):
        raise RequestError("pooling must be last or mean", param="pooling")
    if params.max_tokens != 0 or params.n != 1 or params.constrained:
        raise RequestError(
            "pooling returns no output: max_tokens must be 0 and n must be 1", param="max_tokens"
        )


def _check_steering(params: SamplingParams, steering: Steering | None) -> None:
    for vector in params.steering_vectors:
        if steering is None:
            reason = "no steering vectors are loaded: start the engine with --steering-vectors"
        elif vector.name not in steering.one_vector:
            names = steering.one_vector
            reason = f"no vector with this name is loaded{did_you_mean(vector.name, names)}"
        elif vector.layers is None and steering.one_vector[vector.name]:
            reason = f"{vector.name} has one vector for all layers: set layers"
        elif vector.layers is not None and max(vector.layers) >= steering.layers:
            reason = f"layers must be from 0 to {steering.layers - 1}"
        else:
            continue
        raise RequestError(f"steering_vectors: {reason}", param="steering_vectors")


def check_activations(
    params: SamplingParams, sizes: Iterable[tuple[int, int]], limits: ActivationLimits | None
) -> None:
    """Reject activations that the engine does not return, or that are too many.

    Args:
      sizes: the number of prompt tokens, and the maximum number of output tokens, per prompt.

    Raises:
      RequestError: `param` is "return_activations".
    """
    asked = params.return_activations
    if asked is None:
        return
    if limits is None:
        raise RequestError(
            "return_activations: this engine returns none: start it with --activations",
            param="return_activations",
        )
    token_bytes = sum(limits.row_bytes[name] for name in limits.names(asked.names))
    positions = 0
    for prompt_len, max_tokens in sizes:
        positions += params.n * max_tokens + (prompt_len if asked.tokens == "all" else 0)
    if positions * token_bytes > limits.max_bytes:
        raise RequestError(
            f"return_activations: {positions} positions of {token_bytes} bytes exceed the limit of "
            f"{limits.max_bytes} bytes: set max_tokens, name fewer activations, set tokens to "
            "output, or raise --max-activation-mib",
            param="return_activations",
        )


def check_salt(salt: str) -> None:
    """Reject a salt that cannot be hashed.

    Raises:
      RequestError: `param` names the field.
    """
    try:
        salt.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise RequestError("cache_salt must be valid text", param="cache_salt") from error


def without_unknown_stops(request: Request, vocab_size: int) -> Request:
    """Return the request without stop token IDs outside the vocabulary, which never match."""
    stops = request.params.stop_token_ids
    if not stops or max(stops) < vocab_size:
        return request
    kept = tuple(token for token in stops if token < vocab_size)
    return replace(request, params=replace(request.params, stop_token_ids=kept))


def check_token_ids(request: Request, vocab_size: int) -> None:
    """Reject token IDs outside the model's output width (`vocab_size`).

    Raises:
      RequestError: `param` names the field.
    """
    ids = TokenIds.of(request.prompt_token_ids)
    if not ids:
        raise RequestError("the prompt is empty", param="prompt")
    if ids.low < 0 or ids.high >= vocab_size:
        raise RequestError(
            f"the prompt has a token ID outside the model's vocabulary (0..{vocab_size - 1})",
            param="prompt",
        )
    for name, given in (
        ("logit_bias", request.params.logit_bias),
        ("allowed_token_ids", request.params.allowed_token_ids),
    ):
        if given and (token := max(given)) >= vocab_size:
            raise RequestError(
                f"{name}: token ID {token} is outside the model's vocabulary (0..{vocab_size - 1})",
                param=name,
            )


InFlightRequests = Literal["keep", "restart", "abort"]  # for new weights: see `LLM.update_weights`


def check_in_flight(in_flight: str) -> None:
    """Raise `RequestError` if this is not a mode for requests in flight."""
    allowed: tuple[str, ...] = get_args(InFlightRequests)
    if in_flight not in allowed:
        raise RequestError(f"in_flight must be {', '.join(allowed)}", param="in_flight")


def new_version(version: int | None, current: int) -> int:
    """Return the version of new weights: `version`, or the number after the current one.

    Raises:
      RequestError: it is not an integer, or not above the current one.
    """
    if version is None:
        return current + 1
    if isinstance(version, bool) or not isinstance(version, Integral):
        kind = type(version).__name__
        raise RequestError(f"version must be an integer, not {kind}", param="version")
    if version <= current:
        raise RequestError(
            f"version must be above {current}, the current one, not {version}", param="version"
        )
    return int(version)


def versioned(fingerprint: str | None, weight_version: int) -> str | None:
    """Return a system fingerprint that also identifies the version of the weights."""
    if fingerprint is None or not weight_version:
        return fingerprint
    return f"{fingerprint}-w{weight_version}"
