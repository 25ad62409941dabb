"""What clients may send: the request bodies, and what the engine is asked for in their name.

Fields follow OpenAI's protocol and the extensions that the field's engines share. Unknown fields
are ignored and `null` means "the default"; numbers may come as strings or as floats without a
fraction. A field that would change the output and is not implemented is refused by name. Bodies are
read, and held to numeric limits, in `validate`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from forge_jax.errors import RequestError
from forge_jax.sampling_params import RANGES, SamplingParams
from forge_serve.openai.structured import asks_for_something, demand
from forge_serve.openai.tools import ToolChoice, tool_choice

MAX_TOKEN_ID = 2**31 - 1
MAX_COUNT = 2**31 - 1  # of anything that the model's context or an answer limits anyway
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, by OpenAI's reference

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
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)

# The values of fields that are refused, at which they change nothing; so do null, false and empty.
NEUTRAL: dict[str, float] = {
    "length_penalty": 1.0,
    "typical_p": 1.0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0.0,
    "dynatemp_range": 0.0,
    "mirostat": 0.0,
}

_LIMITS_OF_OUTPUT = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens")

# OpenAI's, and any other that the model's chat template takes.
ROLES = ("system", "user", "assistant", "tool", "developer")
Role = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$(?!\n)")]

TEMPLATE_VARIABLES = frozenset({"messages", "tools", "documents"})


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields that all generating endpoints share."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None  # only these may be sampled
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None  # how many to keep; -1: what there is room for
    truncation_side: Literal["left", "right"] | None = None  # which end is cut off
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in the logprobs
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None  # lower is served first
    timeout: float | None = None  # seconds for the whole answer
    cache_salt: str | None = None
    request_id: str | None = None  # if the header has none
    user: str | None = None

    # One of these may demand a form of the output; see `structured`.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None

    # Refused unless null, false or empty, or as `NEUTRAL` says; another 0 asks for something.
    stop_regex: Any = None
    no_stop_trim: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    logprob_token_ids: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    watermarking: Any = None
    guided_whitespace_pattern: Any = None
    typical_p: Any = None
    xtc_probability: Any = None
    dry_multiplier: Any = None
    dynatemp_range: Any = None
    mirostat: Any = None
    logits_processors: Any = None
    custom_logit_processor: Any = None
    lora_path: Any = None
    kv_transfer_params: Any = None
    return_hidden_states: Any = None

    ROLES: ClassVar[tuple[str, ...]] = ROLES  # of messages
    _REFUSED: ClassVar[Mapping[str, str]] = {
        "stop_regex": "not supported: use stop",
        "no_stop_trim": "not supported: use include_stop_str_in_output",
        "use_beam_search": "beam search is not supported",
        "length_penalty": "beam search is not supported",
        "logprob_token_ids": "not supported: ask for the likeliest with logprobs",
        "thinking_token_budget": "not supported: use max_tokens",
        "repetition_detection": "not supported: use frequency_penalty",
        "watermarking": "not supported",
        "guided_whitespace_pattern": "not supported: use structured_outputs.whitespace_pattern",
        "typical_p": "not supported: use top_p or min_p",
        "xtc_probability": "not supported: use temperature or top_p",
        "dry_multiplier": "not supported: use frequency_penalty",
        "dynatemp_range": "not supported: use temperature",
        "mirostat": "not supported: use temperature and top_p",
        "logits_processors": "not accepted from clients",
        "custom_logit_processor": "not accepted from clients",
        "lora_path": "not accepted: name a loaded adapter as the model",
        "kv_transfer_params": "this server takes no KV caches of others",
        "return_hidden_states": "not supported",
    }

    @property
    def num_samples(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def limits_output(self) -> bool:
        """Whether the request says how many tokens an output may have."""
        return any(getattr(self, name, None) is not None for name in _LIMITS_OF_OUTPUT)

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def stream_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def stream_usage_always(self) -> bool:
        """Whether every chunk carries the usage so far."""
        options = self.stream_options
        return self.stream_usage and bool(options and options.continuous_usage_stats)

    def check(self) -> None:
        """Refuses what is not implemented and what contradicts itself.

        Raises:
          RequestError: with `param` named.
        """
        for name, reason in self._REFUSED.items():
            value = getattr(self, name)
            neutral = not isinstance(value, bool) and value == NEUTRAL.get(name)
            if asks_for_something(value) and not neutral:
                raise RequestError(f"{name}: {reason}", param=name)
        demand(self)
        if self.stream_options is not None and not self.streams:
            raise RequestError(
                "stream_options is only allowed with stream: true", param="stream_options"
            )
        if self.best_of is not None and self.best_of != self.num_samples:
            raise RequestError(
                "best_of is not supported unless it equals n; ask for n samples", param="best_of"
            )
        for name in _LIMITS_OF_OUTPUT:  # the one that does not win is none of the engine's
            limit = getattr(self, name, None)
            if limit is not None:
                RANGES["max_tokens"].check(name, limit)
        if self.request_id is not None and not REQUEST_ID.fullmatch(self.request_id):
            raise RequestError(
                "request_id must have 1 to 128 characters, of those that X-Request-Id may have",
                param="request_id",
            )
        keep = self.truncate_prompt_tokens
        if keep is not None and keep != -1 and not 1 <= keep <= MAX_COUNT:
            raise RequestError(
                f"truncate_prompt_tokens must be between 1 and {MAX_COUNT}, or -1 for what there "
                "is room for",
                param="truncate_prompt_tokens",
            )
        if self.prompt_logprobs is not None:
            self._check_prompt_logprobs()
        if self.timeout is not None and not 0.0 < self.timeout < math.inf:
            raise RequestError("timeout must be a positive number of seconds", param="timeout")
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise RequestError("priority must fit 32 bits", param="priority")

    def _check_prompt_logprobs(self) -> None:
        if self.streams:
            raise RequestError("prompt_logprobs are not streamed", param="prompt_logprobs")

    def names_sent(self) -> dict[str, str]:
        """The client's names of what the engine calls otherwise."""
        demanded = demand(self)
        return {} if demanded is None else {"structured_outputs": demanded[0]}

    def translate_params(self, error: RequestError) -> RequestError:
        """The same error about the fields as the client named them."""
        message, param = str(error), error.param
        for name, sent in self.names_sent().items():
            if name == param:
                param = sent
            if "_" in name:  # else it could be a word of the sentence
                message = re.sub(rf"\b{name}\b", sent, message)
        return type(error)(message, param=param)

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for.

        Raises:
          RequestError: for a value out of range; `param` may be the engine's name of the field.
        """
        return self._sampling_params(max_tokens=self.max_tokens)

    def check_sampling(self) -> None:
        """Refuses, where nothing is generated, what a generation would be refused for.

        Raises:
          RequestError: with `param` named.
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
        demanded = demand(self)
        if demanded is not None:
            options["structured_outputs"] = demanded[1]
        return SamplingParams(**options, **more)


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Any = None
    prompt_embeds: Any = None

    _REFUSED: ClassVar[Mapping[str, str]] = {
        **GenerationRequest._REFUSED,
        "suffix": "insertion is not supported",
        "prompt_embeds": "embeddings as a prompt are not supported",
    }

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or a list of token ids.

        Raises:
          RequestError: for an empty list, or a mixed one.
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
    """POST /generate and /v1/generate: one prompt, one sample."""

    prompt: str | list[int]
    max_new_tokens: int | None = None

    def check(self) -> None:
        GenerationRequest.check(self)
        if self.num_samples != 1:
            raise RequestError("n must be 1 here: ask for a completion", param="n")

    def _check_prompt_logprobs(self) -> None:
        raise RequestError(
            "prompt_logprobs are not supported here: ask for a completion", param="prompt_logprobs"
        )

    def names_sent(self) -> dict[str, str]:
        alias = self.max_tokens is None and self.max_new_tokens is not None
        names = GenerationRequest.names_sent(self)
        return names | {"max_tokens": "max_new_tokens"} if alias else names

    def sampling_params(self) -> SamplingParams:
        given = (self.max_tokens, self.max_new_tokens)
        max_tokens = next((m for m in given if m is not None), DEFAULT_MAX_TOKENS)
        return self._sampling_params(max_tokens=max_tokens)


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, omit_defaults=True):
    name: str
    arguments: str | dict[str, Any] | None = None  # JSON, or what it says


class ToolCall(msgspec.Struct, omit_defaults=True, kw_only=True):
    id: str | None = None
    type: str | None = None
    function: FunctionCall


class Message(msgspec.Struct, omit_defaults=True):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name for it
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None


REFUSED_OF_MESSAGES = {
    "function_call": "not supported: use tool_calls",
    "audio": "audio is not supported",
}


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    chat_template: Any = None
    functions: Any = None
    function_call: Any = None
    documents: Any = None
    audio: Any = None
    echo: Any = None
    web_search_options: Any = None
    moderation: Any = None

    _REFUSED: ClassVar[Mapping[str, str]] = {
        **GenerationRequest._REFUSED,
        "chat_template": "not accepted from clients; the server's --chat-template sets it",
        "functions": "not supported: use tools",
        "function_call": "not supported: use tool_choice",
        "documents": "documents are not supported yet",
        "audio": "audio is not supported",
        "echo": "not supported: ask for a completion",
        "web_search_options": "this server searches nothing",
        "moderation": "not supported: leave it out",
    }

    def check(self) -> None:
        GenerationRequest.check(self)
        self.chosen_tools()
        if self.modalities not in (None, [], ["text"]):
            raise RequestError("modalities: only text is supported", param="modalities")
        for name in TEMPLATE_VARIABLES & (self.chat_template_kwargs or {}).keys():
            raise RequestError(
                f"chat_template_kwargs must not set {name}", param=f"chat_template_kwargs.{name}"
            )
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        self._check_messages()

    def _check_messages(self) -> None:
        if not self.messages:
            raise RequestError("messages must not be empty", param="messages")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise RequestError(
                    "add_generation_prompt and continue_final_message exclude each other",
                    param="continue_final_message",
                )
            if self.messages[-1].role != "assistant":
                raise RequestError(
                    "continue_final_message needs an assistant's message at the end",
                    param="continue_final_message",
                )

    def names_sent(self) -> dict[str, str]:
        alias = self.max_completion_tokens is not None
        limit = {"max_tokens": "max_completion_tokens"} if alias else {}
        return {"prompt": "messages", **limit, **GenerationRequest.names_sent(self)}

    def chosen_tools(self) -> ToolChoice:
        """Which tools the model may, or must, call.

        Raises:
          RequestError: of a tool, or of the choice.
        """
        return tool_choice(self.tools, self.tool_choice)

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as a chat template takes them: plain dictionaries.

        Contents are texts, or lists of text parts, of which the template decides what becomes.

        Raises:
          RequestError: for a content part that is not text, or a call that is not of a function.
        """
        return [_template_message(i, message) for i, message in enumerate(self.messages)]

    def template_options(self) -> dict[str, Any]:
        """The other arguments of the chat template."""
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
    """Of a chat template: families know it by one of two names, and ignore the other."""
    return {"enable_thinking": thinks, "thinking": thinks}


class TokenizeRequest(ChatRequest, kw_only=True):
    """POST /tokenize: a text, several, or a chat as it would reach the model."""

    messages: list[Message] = msgspec.field(default_factory=list)
    prompt: str | list[str] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise RequestError("send prompt or messages, and not both", param="prompt")
        ChatRequest.check(self)

    def _check_messages(self) -> None:
        if self.prompt is None:
            ChatRequest._check_messages(self)

    def asked(self) -> CompletionRequest | ChatRequest:
        """The generation whose prompt is meant."""
        if self.prompt is None:
            return self
        prompt = self.prompt if isinstance(self.prompt, str) else list[Any](self.prompt)
        return CompletionRequest(prompt=prompt, add_special_tokens=self.add_special_tokens)


class DetokenizeRequest(GenerationRequest, kw_only=True):
    """POST /detokenize: the tokens of a text, or of several."""

    tokens: list[int | list[int]]

    def check(self) -> None:
        GenerationRequest.check(self)
        if len({type(item) for item in self.tokens}) > 1:
            raise RequestError(
                "tokens must be a list of token ids or a list of those", param="tokens"
            )
        for ids in self.texts():
            if ids and not 0 <= min(ids) <= max(ids) <= MAX_TOKEN_ID:
                raise RequestError(f"tokens must be ids from 0 to {MAX_TOKEN_ID}", param="tokens")

    def texts(self) -> list[list[int]]:
        """The token ids of each text; `tokens` itself where it is a list of those."""
        several = bool(self.tokens) and isinstance(self.tokens[0], list)
        return self.tokens if several else [self.tokens]  # type: ignore[return-value]


def prompts_of(
    prompt: str | list[str | int | list[int]], param: str = "prompt"
) -> list[str | list[int]]:
    """The prompts in a field that may have one or several, as texts or as token ids.

    Raises:
      RequestError: it has none, or of several kinds.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError(f"{param} must not be empty", param=param)
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise RequestError(
            f"{param} must be a text, a list of texts, a list of token ids or a list of those",
            param=param,
        )
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    return prompt  # type: ignore[return-value]


def text_of(message: Mapping[str, Any]) -> str:
    """All of the text of a message as a template takes it."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _template_message(i: int, message: Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        for j, part in enumerate(content):
            if part.type != "text" or part.text is None:
                path = f"messages[{i}].content[{j}]"
                raise RequestError(f"{path}: only text parts are supported", param=path)
        content = [{"type": "text", "text": part.text} for part in content]
    if content is None and message.role != "assistant":
        raise RequestError(
            f"messages[{i}].content is required for this role", param=f"messages[{i}].content"
        )
    for name, reason in REFUSED_OF_MESSAGES.items():
        if asks_for_something(getattr(message, name)):
            path = f"messages[{i}].{name}"
            raise RequestError(f"{path}: {reason}", param=path)
    plain = msgspec.to_builtins(message)
    for name in REFUSED_OF_MESSAGES:
        plain.pop(name, None)
    refusal = plain.pop("refusal", None)  # instead of content, in OpenAI's answers
    plain["content"] = content or refusal or ""
    if "tool_calls" in plain:
        plain["tool_calls"] = [
            _template_call(f"messages[{i}].tool_calls[{j}]", call)
            for j, call in enumerate(message.tool_calls or ())
        ]
        if not plain["tool_calls"]:  # templates ask only whether there are any
            del plain["tool_calls"]
    if message.role == "developer":  # OpenAI's newer word for it; templates know the older one
        plain["role"] = "system"
    return plain


def _template_call(path: str, call: ToolCall) -> dict[str, Any]:
    """A call as templates take it: its arguments as an object, if that is what they are."""
    if call.type not in (None, "function"):
        raise RequestError(f"{path}.type: only functions are supported", param=f"{path}.type")
    plain = msgspec.to_builtins(call)
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError):  # the model's own, which may be no JSON
            decoded = msgspec.json.decode(arguments)
            arguments = decoded if isinstance(decoded, dict) else arguments
    plain["function"]["arguments"] = arguments
    return plain
