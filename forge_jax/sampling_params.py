"""A request's sampling parameters: frozen, and validated on construction."""

# Values are checked at run time because callers may not use a type checker.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from forge_jax.errors import RequestError
from forge_jax.grammar.spec import GrammarSpec

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

ReturnedTokens = Literal["output", "all"]

LOGPROBS_MODES: tuple[str, ...] = get_args(LogprobsMode)
RETURNED_TOKENS: tuple[str, ...] = get_args(ReturnedTokens)
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 128 * 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_N = 128
MAX_STEERING_VECTORS = 4
MAX_ACTIVATION_NAMES = 64
MAX_ACTIVATION_NAME_CHARS = 128


@dataclass(frozen=True, slots=True)
class Range:
    """The allowed values of a numeric field."""

    low: float
    high: float
    whole: bool = False
    open_low: bool = False  # exclude `low` itself

    def check(self, name: str, value: Any) -> None:
        """Raise `RequestError`, with `param` set to `name`, if the value is not allowed."""
        if self.whole:
            _int(name, value, self.low, self.high)
        else:
            _number(name, value, self.low, self.high, open_low=self.open_low)


TOKEN_ID = Range(0, 2**31 - 1, whole=True)
BIAS = Range(-100.0, 100.0)
STEERING_SCALE = Range(-1e6, 1e6)
LAYER = Range(0, 2**16 - 1, whole=True)
RANGES = {  # allowed values of the numeric fields
    "n": Range(1, MAX_N, whole=True),
    "max_tokens": Range(0, 2**31 - 1, whole=True),
    "min_tokens": Range(0, 2**31 - 1, whole=True),
    "temperature": Range(0.0, 100.0),
    "top_k": Range(-1, 2**31 - 1, whole=True),
    "top_p": Range(0.0, 1.0, open_low=True),
    "min_p": Range(0.0, 1.0),
    "seed": Range(-(2**63), 2**64 - 1, whole=True),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "repetition_penalty": Range(0.01, 100.0),
    "logprobs": Range(0, MAX_LOGPROBS, whole=True),
    "prompt_logprobs": Range(0, MAX_LOGPROBS, whole=True),
}
_MAY_BE_NONE = frozenset({"max_tokens", "seed", "logprobs", "prompt_logprobs"})


@dataclass(frozen=True, kw_only=True)
class SteeringVector:
    """A loaded steering vector that a request adds to the residual stream of its tokens.

    Args:
      name: as in the option `steering_vectors`.
      scale: the factor of the vector, rounded to float32. 0 adds nothing.
      layers: the layers whose output it is added to. None: all layers of a vector per layer.

    Raises:
      RequestError: a value is out of range.
    """

    name: str
    scale: float = 1.0
    layers: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise RequestError("steering_vectors: name must be a string", param="steering_vectors")
        STEERING_SCALE.check("steering_vectors", self.scale)
        if self.layers is None:
            return
        if isinstance(self.layers, str) or not isinstance(self.layers, Sequence):
            raise RequestError(
                "steering_vectors: layers must be a list of integers", param="steering_vectors"
            )
        if not self.layers:
            raise RequestError(
                "steering_vectors: layers must not be empty: omit it for all layers",
                param="steering_vectors",
            )
        for layer in self.layers:
            LAYER.check("steering_vectors", layer)
        object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))


@dataclass(frozen=True, kw_only=True)
class ReturnActivations:
    """The activations that a request returns, by token position.

    Args:
      names: names of the option `activations`, or patterns as Python's `fnmatch` matches them.
      tokens: "output" returns the positions from which output tokens were sampled, one per output
        token: the first is that of the last prompt token. "all" also returns all earlier positions
        of the prompt, with the first sample.

    Raises:
      RequestError: a value is invalid.
    """

    names: Sequence[str]
    tokens: ReturnedTokens = "output"

    def __post_init__(self) -> None:
        names = self.names
        if isinstance(names, str) or not isinstance(names, Sequence):
            reason = "names must be a list of strings"
        elif not names:
            reason = "names must not be empty"
        elif len(names) > MAX_ACTIVATION_NAMES:
            reason = f"names has {len(names)} entries; at most {MAX_ACTIVATION_NAMES} are allowed"
        elif not all(isinstance(name, str) for name in names):
            reason = "names must be a list of strings"
        elif max(map(len, names)) > MAX_ACTIVATION_NAME_CHARS:
            reason = f"a name is longer than {MAX_ACTIVATION_NAME_CHARS} characters"
        elif self.tokens not in RETURNED_TOKENS:
            reason = f"tokens must be {' or '.join(RETURNED_TOKENS)}"
        else:
            object.__setattr__(self, "names", tuple(names))
            return
        raise RequestError(f"return_activations: {reason}", param="return_activations")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request.

    Presence and frequency penalties follow OpenAI and count output tokens only.
    `repetition_penalty` follows CTRL (arXiv:1909.05858) and counts prompt and output tokens.

    The filters apply to the temperature-scaled distribution in this order: top_k, top_p
    (arXiv:1904.09751), min_p (arXiv:2407.01082). `logprobs` describe the model's own distribution,
    before penalties, bias, temperature and filters, unless `logprobs_mode` is "processed_logprobs".
    They then describe the distribution that the token was drawn from, and tokens of probability 0
    are left out. At temperature 0, neither scaling nor filters apply.

    Raises:
      RequestError: if a value is out of range. `param` names the field.
    """

    n: int = field(default=1, metadata={"doc": "number of samples of each prompt"})
    max_tokens: int | None = None  # None: up to the context length
    # Output tokens that must come before an EOS token, stop token or stop string ends the output.
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: drawn when the request is submitted
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float], hash=False)
    # Most likely tokens to report per output token, 0 to 20. None: no logprobs at all.
    logprobs: int | None = None
    # The same for each prompt token. The completions API sets it from `echo` and `logprobs`.
    prompt_logprobs: int | None = None
    # Of the output's logprobs. Prompt logprobs are always raw. The names are vLLM's.
    logprobs_mode: LogprobsMode = "raw_logprobs"
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    # The grammar of the output. The output ends where the grammar ends, so stop and stop_token_ids
    # are ignored. While the grammar allows more, min_tokens and ignore_eos delay the end.
    structured_outputs: GrammarSpec | None = None
    # The only tokens that may be sampled. Include EOS tokens. None: all tokens.
    allowed_token_ids: Sequence[int] | None = None
    # Texts whose tokens never appear in the output, tokenized with and without a leading space.
    # Other tokenizations of the same text are not detected.
    bad_words: Sequence[str] = ()
    # Vectors to add to the residual stream, in this order.
    steering_vectors: Sequence[SteeringVector] = ()
    # Activations to return with the output. None: none.
    return_activations: ReturnActivations | None = None

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                allowed.check(name, value)
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise RequestError(
                f"logprobs_mode must be {' or '.join(LOGPROBS_MODES)}", param="logprobs_mode"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries; "
                f"at most {MAX_LOGIT_BIAS} are allowed",
                param="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            TOKEN_ID.check("logit_bias", token)
            BIAS.check("logit_bias", bias)
        _texts("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} entries; "
                f"at most {MAX_STOP_TOKEN_IDS} are allowed",
                param="stop_token_ids",
            )
        for token in self.stop_token_ids:
            TOKEN_ID.check("stop_token_ids", token)
        if not isinstance(self.structured_outputs, GrammarSpec | None):
            raise RequestError(
                "structured_outputs must be a GrammarSpec", param="structured_outputs"
            )
        if self.allowed_token_ids is not None:
            _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        _texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        _steering(self.steering_vectors)
        object.__setattr__(self, "steering_vectors", tuple(self.steering_vectors))
        if not isinstance(self.return_activations, ReturnActivations | None):
            raise RequestError(
                "return_activations must be a ReturnActivations", param="return_activations"
            )
        if self.stop and not self.detokenize:
            raise RequestError("stop strings require detokenize=True", param="stop")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "bad_words", tuple(self.bad_words))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def constrained(self) -> bool:
        """True if a grammar restricts the output."""
        return self.structured_outputs is not None

    @property
    def masked(self) -> bool:
        """True if a mask forbids some tokens."""
        return self.constrained or self.allowed_token_ids is not None or bool(self.bad_words)

    @property
    def needs_host_token(self) -> bool:
        """True if the mask depends on earlier output tokens, which the host must read first."""
        return self.constrained or bool(self.bad_words)

    @property
    def processed(self) -> bool:
        """True if logprobs of the processed distribution are requested."""
        return self.logprobs is not None and self.logprobs_mode == "processed_logprobs"

    @property
    def held_tokens(self) -> int:
        """Number of output tokens for which the sampler masks stop tokens; 0 if a grammar does."""
        return 0 if self.constrained else self.min_tokens

    @property
    def steered_by(self) -> tuple[SteeringVector, ...]:
        """The steering vectors that change something: their scale is not 0."""
        return tuple(vector for vector in self.steering_vectors if vector.scale)

    @property
    def penalized(self) -> bool:
        """True if the sampler needs the counts of the sequence's earlier tokens."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def _int(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {type(value).__name__}", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}", param=name)


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, not {type(value).__name__}", param=name)
    if not low <= value <= high or (open_low and value == low):  # also catches NaN and infinity
        bound = "greater than" if open_low else "at least"
        raise RequestError(f"{name} must be {bound} {low} and at most {high}", param=name)


def _texts(name: str, texts: Sequence[str], most: int, most_chars: int) -> None:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise RequestError(f"{name} must be a list of strings", param=name)
    if len(texts) > most:
        raise RequestError(
            f"{name} has {len(texts)} strings; at most {most} are allowed", param=name
        )
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RequestError(f"{name} must contain non-empty strings", param=name)
        if len(text) > most_chars:
            raise RequestError(
                f"{name}: a string is longer than {most_chars} characters", param=name
            )


def _steering(vectors: Sequence[SteeringVector]) -> None:
    if not isinstance(vectors, Sequence) or not all(
        isinstance(each, SteeringVector) for each in vectors
    ):
        raise RequestError(
            "steering_vectors must be a list of SteeringVector", param="steering_vectors"
        )
    if len(vectors) > MAX_STEERING_VECTORS:
        raise RequestError(
            f"steering_vectors has {len(vectors)} entries; at most {MAX_STEERING_VECTORS} are "
            "allowed",
            param="steering_vectors",
        )


def _token_ids(name: str, ids: Sequence[int], most: int) -> None:
    """Check token ids without a Python loop: the list can be as long as the vocabulary."""
    if not isinstance(ids, Sequence) or set(map(type, ids)) - {int}:
        raise RequestError(f"{name} must be a list of integers", param=name)
    if not ids:
        raise RequestError(f"{name} must not be empty: omit it to allow all tokens", param=name)
    if len(ids) > most:
        raise RequestError(f"{name} has {len(ids)} entries; at most {most} are allowed", param=name)
    if min(ids) < 0 or max(ids) > 2**31 - 1:
        raise RequestError(f"{name} must be between 0 and {2**31 - 1}", param=name)
