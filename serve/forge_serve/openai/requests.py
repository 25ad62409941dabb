"""Request bodies, and their translation into sampling parameters.

Fields follow OpenAI's protocol and the extensions that inference engines share. Unknown fields are
ignored, and `null` means the default. Numbers may be sent as strings, and integers as floats
without a fraction. An unimplemented field that would change the output is rejected by name.
`validation.py` decodes bodies and checks their numeric limits.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from forge_jax.errors import RequestError
from forge_jax.sampling_params import (
    BIAS,
    LAYER,
    MAX_ACTIVATION_NAME_CHARS,
    MAX_ACTIVATION_NAMES,
    RANGES,
    STEERING_SCALE,
    TOKEN_ID,
    LogprobsMode,
    ReturnActivations,
    ReturnedTokens,
    SamplingParams,
    SteeringVector,
)
from forge_serve.openai.content import CONTENT, ContentPart, attachments, check_parts
from forge_serve.openai.structured import FIELD_SCHEMAS, asks_for_something, demand
from forge_serve.openai.tools import CHOICE_SCHEMA, TOOL_SCHEMA, ToolChoice, tool_choice
from forge_serve.openapi.schema import (
    MAX_COUNT,
    About,
    Schema,
    nullable,
    number,
    one_prompt,
    prompts,
    ranged,
    refused,
    refused_fields,
    rule,
    up_to,
)

MAX_TOKEN_ID = 2**31 - 1
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)
DEFAULT_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

_SAMPLING_FIELDS = (
    "n",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs_mode",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)

_LIMITS_OF_OUTPUT = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens")

# OpenAI's roles. `Role` also admits any other that the model's chat template supports.
ROLES = ("system", "user", "assistant", "tool", "developer")
Role = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$(?!\n)")]

TEMPLATE_VARIABLES = frozenset({"messages", "tools", "documents"})


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SteeringRequest(msgspec.Struct):
    """A steering vector of `--steering-vectors` that a request uses."""

    name: str
    scale: Annotated[float | None, rule(**number(STEERING_SCALE))] = None  # default: 1
    # Indices of layers. Default: all, if the vector has values for each layer.
    layers: Annotated[list[Annotated[int, rule(**number(LAYER))]] | None, rule(minItems=1)] = None

    def vector(self) -> SteeringVector:
        """Return the engine's steering vector. Raise `RequestError` if a value is out of range."""
        scale = 1.0 if self.scale is None else self.scale
        return SteeringVector(name=self.name, scale=scale, layers=self.layers)


class ActivationsRequest(msgspec.Struct):
    """The activations that a request returns."""

    # Names of `--activations`, or patterns.
    names: Annotated[
        list[Annotated[str, rule(maxLength=MAX_ACTIVATION_NAME_CHARS)]],
        rule(minItems=1, maxItems=MAX_ACTIVATION_NAMES),
    ]
    tokens: ReturnedTokens | None = None  # default: output

    def activations(self) -> ReturnActivations:
        """Return the engine's parameter. Raise `RequestError` if a value is out of range."""
        return ReturnActivations(names=self.names, tokens=self.tokens or "output")


def _up_to(most: int) -> str:
    """Return a regular expression for the integers from 0 to `most`, which has several digits."""
    digits = str(most)
    found = ["0", f"[1-9][0-9]{{0,{len(digits) - 2}}}", digits]
    for i, digit in enumerate(digits):
        low = 1 if i == 0 else 0
        if int(digit) > low:
            rest = len(digits) - i - 1
            found.append(f"{digits[:i]}[{low}-{int(digit) - 1}][0-9]{{{rest}}}")
    return "|".join(found)


def _logit_bias(about: About) -> Schema:
    ids = {"pattern": f"^({_up_to(int(TOKEN_ID.high))})$"}
    bias = {"type": "number", **number(BIAS)}
    most = about.limits.logit_bias
    entries = {"propertyNames": ids, "additionalProperties": bias, "maxProperties": most}
    return nullable({"type": "object", **entries})


def stop_strings(about: About) -> Schema:
    limits = about.limits
    text = {"type": "string", "minLength": 1, "maxLength": limits.stop_string_bytes}
    return {"type": "array", "items": text, "maxItems": limits.stop_strings}


def _stop(about: About) -> Schema:
    several = stop_strings(about)
    return nullable({"anyOf": [several["items"], several]})


def _bad_words(about: About) -> Schema:
    limits = about.limits
    word = {"type": "string", "minLength": 1, "maxLength": limits.bad_word_bytes}
    return nullable({"type": "array", "items": word, "maxItems": limits.bad_words})


def _model(about: About) -> Schema:
    if about.loras or about.any_model:
        return nullable({"type": "string"})
    return {"enum": [about.model, None]}


def _output_room(about: About) -> Schema:
    return {"maximum": min(about.max_model_len, about.max_new_tokens)}


def _samples(about: About) -> Schema:
    return {"minimum": 1, "maximum": min(about.limits.n, about.limits.choices)}


def _form(field: str) -> msgspec.Meta:
    text = (
        "At most one field may constrain the output format, and the constraint must compile to a "
        "grammar."
    )
    if field != "response_format":
        text = "An alternative to `response_format`. At most one such field is allowed."
    return rule(text, **FIELD_SCHEMAS[field])


_NOT_ZERO: Schema = {"not": {"const": 0}}
TokenId = Annotated[int, rule(**number(TOKEN_ID))]
MaxTokens = Annotated[
    int | None, ranged("max_tokens", "Prompt and output must fit the context and the KV cache.")
]
OneSample = Annotated[int | None, rule(minimum=1, maximum=1)]
NoPromptLogprobs = Annotated[
    int | None, rule("Rejected: not supported on this endpoint.", schema={"type": "null"})
]
NoActivations = Annotated[
    ActivationsRequest | None,
    rule("Rejected: not supported on this endpoint.", schema={"type": "null"}),
]
TruncationOfText = Annotated[int | None, rule(minimum=-1, maximum=MAX_COUNT, **_NOT_ZERO)]
LOGPROBS_RULE = "The product of choices, tokens and alternatives per token is limited."
TemplateKwargs = Annotated[
    dict[str, Any] | None,
    rule(
        "The size is limited, and the chat template may reject the values.",
        propertyNames={"not": {"enum": sorted(TEMPLATE_VARIABLES)}},
    ),
]
TOOLS_RULE = (
    "The model's chat template must support tools. The size and depth of the schemas are limited."
)
CHOICE_RULE = (
    "A named function must be one of the tools. Required tool calls cannot be combined with an "
    "output format."
)
MESSAGES_RULE = (
    "The rendered prompt must fit the context. The model's chat template may reject the messages."
)


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields that all generation endpoints share."""

    model: Annotated[str | None, rule(schema=_model)] = None
    max_tokens: MaxTokens = None
    n: Annotated[
        int | None, rule("The product of prompts and `n` is limited.", limits=_samples)
    ] = None
    best_of: Annotated[int | None, rule("Must equal `n`.", limits=_samples)] = None
    min_tokens: Annotated[int | None, ranged("min_tokens", "Must not exceed `max_tokens`.")] = None
    temperature: Annotated[float | None, ranged("temperature")] = None
    top_k: Annotated[int | None, ranged("top_k")] = None
    top_p: Annotated[float | None, ranged("top_p")] = None
    min_p: Annotated[float | None, ranged("min_p")] = None
    seed: Annotated[int | None, ranged("seed")] = None
    presence_penalty: Annotated[float | None, ranged("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, ranged("frequency_penalty")] = None
    repetition_penalty: Annotated[float | None, ranged("repetition_penalty")] = None
    logit_bias: Annotated[
        dict[int, float] | None,
        rule(
            "Keys are token IDs for which the model has logits.",
            schema=_logit_bias,
            most=("logit_bias", "entries"),
        ),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        rule(
            "A string has at most 256 bytes in UTF-8. Cannot be combined with `stop_sequences`.",
            schema=_stop,
        ),
    ] = None
    stop_token_ids: Annotated[list[TokenId] | None, rule(most=("stop_token_ids", "ids"))] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    # Restricts sampling to these tokens.
    allowed_token_ids: Annotated[
        list[TokenId] | None,
        rule(
            "Token IDs for which the model has logits. Other fields must not exclude all of them.",
            most=("allowed_token_ids", "ids"),
            minItems=1,
        ),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        rule(
            "A string has at most 256 bytes in UTF-8. At least one token must remain allowed.",
            schema=_bad_words,
            most=("bad_words", "strings"),
        ),
    ] = None
    steering_vectors: Annotated[
        list[SteeringRequest] | None,
        rule(
            "Names are those of `--steering-vectors`, and layers those of the model.",
            most=("steering_vectors", "entries"),
        ),
    ] = None
    return_activations: Annotated[
        ActivationsRequest | None,
        rule("Names match those of `--activations`. The size of all activations is limited."),
    ] = None
    # Number of tokens to keep; -1 keeps as many as the context has room for.
    truncate_prompt_tokens: Annotated[
        int | None,
        rule(
            limits=lambda about: {"maximum": about.max_model_len},
            minimum=-1,
            **_NOT_ZERO,
        ),
    ] = None
    truncation_side: Literal["left", "right"] | None = None  # the end that is removed
    prompt_logprobs: Annotated[
        int | None,
        rule("Cannot be combined with `stream: true`.", limits=up_to("logprobs")),
    ] = None
    logprobs_mode: LogprobsMode | None = None  # applies to the output; prompt logprobs are raw
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # applies to the logprobs
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, rule("Requires `stream: true`.")] = None
    # Lower values run first.
    priority: Annotated[int | None, rule(minimum=-(2**31), maximum=2**31 - 1)] = None
    timeout: Annotated[float | None, rule(exclusiveMinimum=0)] = None  # seconds
    cache_salt: Annotated[
        str | None,
        rule(limits=lambda about: {"maxLength": about.limits.cache_salt_chars}, minLength=1),
    ] = None
    # Used if the request has no X-Request-Id header.
    request_id: Annotated[str | None, rule(pattern=f"^{REQUEST_ID.pattern}$")] = None
    user: str | None = None

    # At most one of these may constrain the output format; see `structured`.
    response_format: Annotated[Any, _form("response_format")] = None
    structured_outputs: Annotated[Any, _form("structured_outputs")] = None
    guided_json: Annotated[Any, _form("guided_json")] = None
    guided_regex: Annotated[Any, _form("guided_regex")] = None
    guided_choice: Annotated[Any, _form("guided_choice")] = None
    guided_grammar: Annotated[Any, _form("guided_grammar")] = None
    json_schema: Annotated[Any, _form("json_schema")] = None
    regex: Annotated[Any, _form("regex")] = None
    ebnf: Annotated[Any, _form("ebnf")] = None
    grammar: Annotated[Any, _form("grammar")] = None

    stop_regex: Annotated[Any, refused("not supported; use stop")] = None
    no_stop_trim: Annotated[Any, refused("not supported; use include_stop_str_in_output")] = None
    use_beam_search: Annotated[Any, refused("beam search is not supported")] = None
    length_penalty: Annotated[Any, refused("beam search is not supported", neutral=1.0)] = None
    logprob_token_ids: Annotated[
        Any, refused("not supported; use logprobs for the most likely tokens")
    ] = None
    thinking_token_budget: Annotated[Any, refused("not supported; use max_tokens")] = None
    repetition_detection: Annotated[Any, refused("not supported; use frequency_penalty")] = None
    watermarking: Annotated[Any, refused("not supported")] = None
    guided_whitespace_pattern: Annotated[
        Any, refused("not supported; use structured_outputs.whitespace_pattern")
    ] = None
    typical_p: Annotated[Any, refused("not supported; use top_p or min_p", neutral=1.0)] = None
    xtc_probability: Annotated[
        Any, refused("not supported; use temperature or top_p", neutral=0.0)
    ] = None
    dry_multiplier: Annotated[Any, refused("not supported; use frequency_penalty", neutral=0.0)] = (
        None
    )
    dynatemp_range: Annotated[Any, refused("not supported; use temperature", neutral=0.0)] = None
    mirostat: Annotated[Any, refused("not supported; use temperature and top_p", neutral=0.0)] = (
        None
    )
    logits_processors: Annotated[Any, refused("not accepted from clients")] = None
    custom_logit_processor: Annotated[Any, refused("not accepted from clients")] = None
    lora_path: Annotated[
        Any, refused("not accepted from clients; set model to a loaded adapter")
    ] = None
    kv_transfer_params: Annotated[
        Any, refused("not supported; the server does not transfer KV caches")
    ] = None
    return_hidden_states: Annotated[Any, refused("not supported")] = None

    ROLES: ClassVar[tuple[str, ...]] = ROLES  # message roles

    @property
    def num_samples(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def limits_output(self) -> bool:
        """True if the request limits the number of output tokens."""
        return any(getattr(self, name, None) is not None for name in _LIMITS_OF_OUTPUT)

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def stream_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def stream_usage_always(self) -> bool:
        """True if every chunk includes the usage so far."""
        options = self.stream_options
        return self.stream_usage and bool(options and options.continuous_usage_stats)

    def check(self) -> None:
        """Reject fields that are not implemented or contradict each other.

        Raises:
          RequestError: a field is invalid. `param` is its name.
        """
        self._check_refused()
        demand(self)
        if self.stream_options is not None and not self.streams:
            raise RequestError("stream_options requires stream: true", param="stream_options")
        if self.best_of is not None and self.best_of != self.num_samples:
            raise RequestError(
                "best_of must equal n; to get several samples, set n", param="best_of"
            )
        # The engine checks only the limit that takes precedence.
        for name in _LIMITS_OF_OUTPUT:
            limit = getattr(self, name, None)
            if limit is not None:
                RANGES["max_tokens"].check(name, limit)
        if self.request_id is not None and not REQUEST_ID.fullmatch(self.request_id):
            raise RequestError(
                "request_id must be 1 to 128 letters, digits, slashes or . _ : + = @ -",
                param="request_id",
            )
        keep = self.truncate_prompt_tokens
        if keep is not None and keep != -1 and not 1 <= keep <= MAX_COUNT:
            raise RequestError(
                f"truncate_prompt_tokens must be between 1 and {MAX_COUNT}, or -1 to keep as many "
                "tokens as the context has room for",
                param="truncate_prompt_tokens",
            )
        if self.prompt_logprobs is not None:
            self._check_prompt_logprobs()
        if self.return_activations is not None:
            self._check_activations()
        if self.timeout is not None and not 0.0 < self.timeout < math.inf:
            raise RequestError("timeout must be a positive number of seconds", param="timeout")
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise RequestError("priority must be a 32-bit signed integer", param="priority")

    @classmethod
    def refusals(cls) -> Mapping[str, tuple[str, float | None]]:
        """Return the fields that are not implemented: a reason, and a number that is accepted."""
        return refused_fields(cls)

    def _check_refused(self) -> None:
        for name, (reason, neutral) in self.refusals().items():
            value = getattr(self, name)
            same = neutral is not None and not isinstance(value, bool) and value == neutral
            if asks_for_something(value) and not same:
                raise RequestError(f"{name}: {reason}", param=name)

    def _check_prompt_logprobs(self) -> None:
        if self.streams:
            raise RequestError(
                "prompt_logprobs cannot be combined with stream: true", param="prompt_logprobs"
            )

    def _check_activations(self) -> None:
        """Reject activations if the endpoint's response has none."""

    def names_sent(self) -> dict[str, str]:
        """Return the client's field names by the engine's, where they differ."""
        demanded = demand(self)
        return {} if demanded is None else {"structured_outputs": demanded[0]}

    def translate_params(self, error: RequestError) -> RequestError:
        """Return the error with the engine's field names replaced by the client's."""
        message, param = str(error), error.param
        for name, sent in self.names_sent().items():
            if name == param:
                param = sent
            if "_" in name:  # any other name could be an ordinary word of the message
                message = re.sub(rf"\b{name}\b", sent, message)
        return type(error)(message, param=param)

    def sampling_params(self) -> SamplingParams:
        """Return the engine's sampling parameters.

        Raises:
          RequestError: a value is out of range. `param` may be the engine's name of the field.
        """
        return self._sampling_params(max_tokens=self.max_tokens)

    def check_sampling(self) -> None:
        """Check the sampling parameters of a request that generates nothing.

        Raises:
          RequestError: a field is invalid. `param` is its name.
        """
        try:
            self.sampling_params()
        except RequestError as error:
            raise self.translate_params(error) from error

    def _sampling_params(self, **more: Any) -> SamplingParams:
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        options = {name: value for name, value in given.items() if value is not None}
        if self.stop is not None:
            options["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.steering_vectors:
            options["steering_vectors"] = tuple(each.vector() for each in self.steering_vectors)
        if self.return_activations is not None:
            options["return_activations"] = self.return_activations.activations()
        demanded = demand(self)
        if demanded is not None:
            options["structured_outputs"] = demanded[1]
        return SamplingParams(**options, **more)


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        rule("Each prompt must have at least one token and fit the context.", schema=prompts),
    ]
    max_tokens: Annotated[
        MaxTokens,
        rule(limits=_output_room),
    ] = None
    logprobs: Annotated[int | None, rule(LOGPROBS_RULE, limits=up_to("logprobs"))] = None
    echo: bool | None = None
    suffix: Annotated[Any, refused("insertion is not supported")] = None
    prompt_embeds: Annotated[
        Any, refused("embeddings are not supported as prompts; use prompt")
    ] = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each as a text or a list of token IDs.

        Raises:
          RequestError: the list is empty or mixed.
        """
        return prompts_of(self.prompt)

    def sampling_params(self) -> SamplingParams:
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        of_prompt = (self.prompt_logprobs, self.logprobs if self.echo else None)
        wanted = [count for count in of_prompt if count is not None]
        return self._sampling_params(
            max_tokens=max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=max(wanted, default=None),
        )


class GenerateRequest(GenerationRequest, kw_only=True):
    """Body of POST /generate and /v1/generate: one prompt, one sample."""

    prompt: Annotated[
        str | list[int],
        rule(
            "The prompt must have at least one token and fit the context.",
            schema=one_prompt,
        ),
    ]
    max_new_tokens: Annotated[int | None, ranged("max_tokens")] = None
    n: OneSample = None
    best_of: OneSample = None
    prompt_logprobs: NoPromptLogprobs = None
    return_activations: NoActivations = None

    def check(self) -> None:
        GenerationRequest.check(self)
        if self.num_samples != 1:
            raise RequestError(
                "n must be 1 on this endpoint; for several samples, use /v1/completions", param="n"
            )

    def _check_prompt_logprobs(self) -> None:
        raise RequestError(
            "prompt_logprobs is not supported on this endpoint; use /v1/completions",
            param="prompt_logprobs",
        )

    def _check_activations(self) -> None:
        raise RequestError(
            "return_activations is not supported on this endpoint; use /v1/completions",
            param="return_activations",
        )

    def names_sent(self) -> dict[str, str]:
        alias = self.max_tokens is None and self.max_new_tokens is not None
        names = GenerationRequest.names_sent(self)
        return names | {"max_tokens": "max_new_tokens"} if alias else names

    def sampling_params(self) -> SamplingParams:
        given = (self.max_tokens, self.max_new_tokens)
        max_tokens = next((m for m in given if m is not None), DEFAULT_MAX_TOKENS)
        return self._sampling_params(max_tokens=max_tokens)


class FunctionCall(msgspec.Struct, omit_defaults=True):
    name: str
    arguments: str | dict[str, Any] | None = None  # JSON, or the object that it encodes


class ToolCall(msgspec.Struct, omit_defaults=True, kw_only=True):
    id: str | None = None
    type: Annotated[str | None, rule(schema={"enum": ["function", None]})] = None
    function: FunctionCall


class Message(msgspec.Struct, omit_defaults=True):
    role: Role
    content: Annotated[str | list[ContentPart] | None, rule(schema=CONTENT)] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, rule(most=("tools", "calls"))] = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # an alias of reasoning_content
    refusal: str | None = None
    function_call: Annotated[Any, refused("not supported; use tool_calls")] = None
    audio: Annotated[Any, refused("audio is not supported")] = None

    @classmethod
    def narrow_schema(cls, schema: Schema, about: About) -> None:
        said = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
        schema["anyOf"] = [{"properties": {"role": {"const": "assistant"}}}, said]


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[
        list[Message], rule(MESSAGES_RULE, most=("messages", "messages"), minItems=1)
    ]
    max_completion_tokens: Annotated[int | None, ranged("max_tokens")] = None
    logprobs: Annotated[bool | None, rule(LOGPROBS_RULE)] = None
    top_logprobs: Annotated[
        int | None, rule("Requires `logprobs: true`.", limits=up_to("logprobs"))
    ] = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[
        bool | None,
        rule(
            "The last message must have the role `assistant`. Cannot be combined with "
            "`add_generation_prompt: true`.",
        ),
    ] = None
    chat_template_kwargs: TemplateKwargs = None
    tools: Annotated[
        list[Annotated[dict[str, Any], rule(**TOOL_SCHEMA)]] | None,
        rule(TOOLS_RULE, most=("tools", "entries")),
    ] = None
    tool_choice: Annotated[str | dict[str, Any] | None, rule(CHOICE_RULE, schema=CHOICE_SCHEMA)] = (
        None
    )
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: Annotated[list[str] | None, rule(schema={"enum": [None, [], ["text"]]})] = None
    chat_template: Annotated[
        Any, refused("not accepted from clients; start the server with --chat-template FILE")
    ] = None
    functions: Annotated[
        Any, refused("not supported; use tools"), rule(most=("tools", "entries"))
    ] = None
    function_call: Annotated[Any, refused("not supported; use tool_choice")] = None
    documents: Annotated[Any, refused("documents are not supported")] = None
    audio: Annotated[Any, refused("audio is not supported")] = None
    echo: Annotated[Any, refused("not supported in chats; use /v1/completions")] = None
    web_search_options: Annotated[Any, refused("web search is not supported")] = None
    moderation: Annotated[Any, refused("not supported; omit it")] = None

    def check(self) -> None:
        GenerationRequest.check(self)
        self.check_chat()

    def check_chat(self) -> None:
        """Check the fields that only a chat has."""
        self.chosen_tools()
        if self.modalities not in (None, [], ["text"]):
            raise RequestError('modalities must be ["text"]', param="modalities")
        for name in TEMPLATE_VARIABLES & (self.chat_template_kwargs or {}).keys():
            raise RequestError(
                f"chat_template_kwargs must not set {name}", param=f"chat_template_kwargs.{name}"
            )
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs requires logprobs: true", param="top_logprobs")
        self._check_messages()

    def _check_messages(self) -> None:
        if not self.messages:
            raise RequestError("messages must not be empty", param="messages")
        attachments(self.messages)
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise RequestError(
                    "continue_final_message cannot be combined with add_generation_prompt: true",
                    param="continue_final_message",
                )
            if self.messages[-1].role != "assistant":
                raise RequestError(
                    "continue_final_message requires that the last message has the role assistant",
                    param="continue_final_message",
                )

    def names_sent(self) -> dict[str, str]:
        alias = self.max_completion_tokens is not None
        limit = {"max_tokens": "max_completion_tokens"} if alias else {}
        return {"prompt": "messages", **limit, **GenerationRequest.names_sent(self)}

    def chosen_tools(self) -> ToolChoice:
        """Return the tools that the model may or must call.

        Raises:
          RequestError: a tool or the choice is invalid.
        """
        return tool_choice(self.tools, self.tool_choice)

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the messages as plain dictionaries for the chat template.

        A message's content is a text or a list of text parts. `content.inline` has replaced files.

        Raises:
          RequestError: a content part is not text, or a call is not of a function.
        """
        return [_template_message(i, message) for i, message in enumerate(self.messages)]

    def template_options(self) -> dict[str, Any]:
        """Return the chat template's arguments other than the messages."""
        continues = bool(self.continue_final_message)
        generation = self.add_generation_prompt
        named = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        tools = self.tools if self.chosen_tools().mode != "none" else None
        return {
            **(self.chat_template_kwargs or {}),
            **({"tools": tools} if tools else {}),
            **{name: value for name, value in named.items() if value is not None},
            "add_generation_prompt": not continues if generation is None else generation,
            "continue_final_message": continues,
        }

    def sampling_params(self) -> SamplingParams:
        given = (self.max_completion_tokens, self.max_tokens)
        return self._sampling_params(
            max_tokens=next((m for m in given if m is not None), None),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )


def thinking_variables(thinks: bool) -> dict[str, Any]:
    """Return the chat template's thinking switch under both names that model families use.

    Templates ignore the name that they do not use.
    """
    return {"enable_thinking": thinks, "thinking": thinks}


class TokenizeRequest(ChatRequest, kw_only=True):
    """Body of POST /tokenize: one or several texts, or a chat to render as a prompt."""

    messages: Annotated[list[Message], rule(MESSAGES_RULE, most=("messages", "messages"))] = (
        msgspec.field(default_factory=list)
    )
    prompt: Annotated[
        str | Annotated[list[str], rule(minItems=1)] | None,
        rule(
            "Each text must have at least one token and fit the context.",
            most=("prompts", "texts"),
        ),
    ] = None
    return_token_strs: bool | None = None
    truncate_prompt_tokens: TruncationOfText = None

    @classmethod
    def narrow_schema(cls, schema: Schema, about: About) -> None:
        given, some, none = {"not": {"type": "null"}}, {"minItems": 1}, {"maxItems": 0}
        schema["oneOf"] = [
            {"required": ["prompt"], "properties": {"prompt": given, "messages": none}},
            {
                "required": ["messages"],
                "properties": {"prompt": {"type": "null"}, "messages": some},
            },
        ]

    def check(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise RequestError("send either prompt or messages", param="prompt")
        ChatRequest.check(self)

    def _check_messages(self) -> None:
        if self.prompt is None:
            ChatRequest._check_messages(self)

    def asked(self) -> CompletionRequest | ChatRequest:
        """Return the generation request with this prompt."""
        if self.prompt is None:
            return self
        prompt = self.prompt if isinstance(self.prompt, str) else list[Any](self.prompt)
        return CompletionRequest(prompt=prompt, add_special_tokens=self.add_special_tokens)


def _token_lists(about: About) -> Schema:
    token = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
    ids = {"type": "array", "items": token}
    return {"anyOf": [ids, {"type": "array", "items": ids, "maxItems": about.limits.prompts}]}


class DetokenizeRequest(GenerationRequest, kw_only=True):
    """Body of POST /detokenize: the token IDs of one or several texts."""

    tokens: Annotated[list[int | list[int]], rule(schema=_token_lists)]
    truncate_prompt_tokens: TruncationOfText = None

    def check(self) -> None:
        GenerationRequest.check(self)
        if len({type(item) for item in self.tokens}) > 1:
            raise RequestError(
                "tokens must be a list of token IDs or a list of lists of token IDs",
                param="tokens",
            )
        for ids in self.texts():
            if ids and not 0 <= min(ids) <= max(ids) <= MAX_TOKEN_ID:
                raise RequestError(
                    f"tokens must be token IDs between 0 and {MAX_TOKEN_ID}", param="tokens"
                )

    def texts(self) -> list[list[int]]:
        """Return the token IDs of each text: `tokens` itself if it is a list of lists."""
        several = bool(self.tokens) and isinstance(self.tokens[0], list)
        return self.tokens if several else [self.tokens]  # type: ignore[return-value]


def prompts_of(
    prompt: str | list[str | int | list[int]], param: str = "prompt"
) -> list[str | list[int]]:
    """Return the prompts of a field that holds one or several, as texts or token IDs.

    Raises:
      RequestError: the field is empty or mixes kinds.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError(f"{param} must not be empty", param=param)
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise RequestError(
            f"{param} must be a text, a list of texts, a list of token IDs, or a list of lists of "
            "token IDs",
            param=param,
        )
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    return prompt  # type: ignore[return-value]


def _template_message(i: int, message: Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        check_parts(f"messages[{i}].content", content)
        content = [{"type": "text", "text": part.text} for part in content]
    if content is None and message.role != "assistant":
        raise RequestError(
            f"messages[{i}].content is required for this role", param=f"messages[{i}].content"
        )
    for name, (reason, _) in refused_fields(Message).items():
        if asks_for_something(getattr(message, name)):
            path = f"messages[{i}].{name}"
            raise RequestError(f"{path}: {reason}", param=path)
    plain = msgspec.to_builtins(message)
    for name in refused_fields(Message):
        plain.pop(name, None)
    refusal = plain.pop("refusal", None)  # OpenAI's responses send it instead of content
    plain["content"] = content or refusal or ""
    if "tool_calls" in plain:
        plain["tool_calls"] = [
            _template_call(f"messages[{i}].tool_calls[{j}]", call)
            for j, call in enumerate(message.tool_calls or ())
        ]
        if not plain["tool_calls"]:  # templates test only whether the key is defined
            del plain["tool_calls"]
    if message.role == "developer":  # OpenAI's new name for system, which templates lack
        plain["role"] = "system"
    return plain


def _template_call(path: str, call: ToolCall) -> dict[str, Any]:
    """Return a tool call for the chat template. Arguments that encode an object are decoded."""
    if call.type not in (None, "function"):
        raise RequestError(f"{path}.type: only functions are supported", param=f"{path}.type")
    plain = msgspec.to_builtins(call)
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError):  # a model may write invalid JSON
            decoded = msgspec.json.decode(arguments)
            arguments = decoded if isinstance(decoded, dict) else arguments
    plain["function"]["arguments"] = arguments
    return plain
