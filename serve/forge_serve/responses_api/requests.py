"""The body of POST /v1/responses, and its conversion to a chat.

A request becomes a `ChatRequest`, which is then served like any other chat. `store.py` stores
responses for later requests, and `events.py` encodes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from forge_jax.config.suggest import did_you_mean
from forge_jax.errors import RequestError
from forge_serve.errors import StreamIdError
from forge_serve.openai.requests import (
    CHOICE_RULE,
    LOGPROBS_RULE,
    TOOLS_RULE,
    ChatRequest,
    GenerationRequest,
    Message,
    NoActivations,
    NoPromptLogprobs,
    OneSample,
    TemplateKwargs,
    thinking_variables,
)
from forge_serve.openai.structured import FORMAT_SCHEMA
from forge_serve.openai.tools import CHOICE_SCHEMA, TOOL_SCHEMA
from forge_serve.openai.tools import tool_choice as chosen
from forge_serve.openapi.schema import (
    MAX_COUNT,
    About,
    Schema,
    nullable,
    ranged,
    refused,
    rule,
    up_to,
)
from forge_serve.responses_api.items import Item, check_item, check_outputs, messages
from forge_serve.responses_api.store import Turn

PATH = "/v1/responses"

LOGPROBS = "message.output_text.logprobs"
# The other values are OpenAI's and have no effect here. Their tools do not exist, and reasoning is
# returned unencrypted.
INCLUDABLE = frozenset(
    (
        LOGPROBS,
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    )
)
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # OpenAI's limits
MESSAGE_TYPE = "response.create"  # type of a WebSocket message
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}", re.ASCII)
_NESTED = re.compile(r"(tools\[\d+\])\.function\b")


class Format(msgspec.Struct):
    """Format and verbosity of the output, in the field `text`."""

    format: Annotated[dict[str, Any] | None, rule(schema=FORMAT_SCHEMA)] = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: Annotated[str | None, rule(schema={"enum": ["auto", None]})] = None
    # An older alias of `summary`.
    generate_summary: Annotated[str | None, rule(schema={"enum": ["auto", None]})] = None


def _flat(schema: Schema) -> Schema:
    """Return a chat function's schema with the fields of `function` at the level of `type`."""
    function = schema["properties"]["function"]
    return {
        "type": "object",
        "required": ["type", *function["required"]],
        "properties": {"type": schema["properties"]["type"], **function["properties"]},
    }


_MODES, _CHAT_FUNCTION = CHOICE_SCHEMA["anyOf"]
_FUNCTION_NAME = _flat(_CHAT_FUNCTION)
_ALLOWED_TOOLS = {
    "type": "object",
    "required": ["type", "mode", "tools"],
    "properties": {
        "type": {"const": "allowed_tools"},
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "items": _FUNCTION_NAME},
    },
}
_METADATA = {
    "type": "object",
    "maxProperties": MAX_METADATA,
    "propertyNames": {"maxLength": MAX_METADATA_KEY},
    "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
}
_INCLUDE = {"type": "array", "items": {"enum": sorted(INCLUDABLE)}}


class ResponsesRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/responses and /v1/responses/input_tokens."""

    input: Annotated[
        str | list[Item] | None,
        rule(
            "The rendered prompt must fit the context and must not be empty. Each "
            "function_call_output needs its function_call in the input or in a previous response."
        ),
    ] = None
    n: OneSample = None
    best_of: OneSample = None
    prompt_logprobs: NoPromptLogprobs = None
    return_activations: NoActivations = None
    instructions: str | None = None
    previous_response_id: Annotated[
        str | None, rule("The id of a stored and finished response.")
    ] = None
    store: Annotated[bool | None, rule("`true` requires that the server stores responses.")] = None
    background: Annotated[
        bool | None,
        rule(
            "Cannot be combined with `store: false`. `true` requires that the server stores "
            "responses."
        ),
    ] = None
    max_output_tokens: Annotated[int | None, ranged("max_tokens")] = None
    max_tool_calls: Annotated[int | None, rule(minimum=0, maximum=MAX_COUNT)] = None
    tools: Annotated[
        list[Annotated[dict[str, Any], rule(**_flat(TOOL_SCHEMA))]] | None,
        rule(TOOLS_RULE, most=("tools", "entries")),
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        rule(CHOICE_RULE, schema={"anyOf": [_MODES, _FUNCTION_NAME, _ALLOWED_TOOLS]}),
    ] = None
    parallel_tool_calls: bool | None = None
    text: Annotated[
        Format | None, rule("`text.format` is an alternative to `response_format`.")
    ] = None
    reasoning: Reasoning | None = None
    include: Annotated[list[str] | None, rule(schema=nullable(_INCLUDE))] = None
    top_logprobs: Annotated[
        int | None,
        rule(LOGPROBS_RULE, limits=up_to("logprobs")),
    ] = None
    truncation: Annotated[str | None, rule(schema={"enum": ["disabled", None]})] = None
    metadata: Annotated[dict[str, str] | None, rule(schema=nullable(_METADATA))] = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: TemplateKwargs = None

    conversation: Annotated[Any, refused("not supported; use previous_response_id")] = None
    prompt: Annotated[
        Any, refused("prompt templates are not supported; use instructions and input")
    ] = None
    context_management: Annotated[Any, refused("not supported; send fewer items")] = None
    moderation: Annotated[Any, refused("not supported; omit it")] = None

    @classmethod
    def narrow_schema(cls, schema: Schema, about: About) -> None:
        something = {"not": {"enum": [None, []]}}
        previous = {"previous_response_id": {"type": "string"}}
        schema["anyOf"] = [
            {"required": ["input"], "properties": {"input": something}},
            {"required": ["previous_response_id"], "properties": previous},
        ]

    @property
    def format(self) -> dict[str, Any] | None:
        return None if self.text is None else self.text.format

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def given(self) -> str | list[Item]:
        """The input; empty if the request only continues a response."""
        return [] if self.input is None else self.input

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    @property
    def stored(self) -> bool:
        """True if the request does not disable storage of the response."""
        return self.store is not False

    def check(self) -> None:
        GenerationRequest.check(self)
        if self.num_samples != 1:
            raise RequestError(
                "n must be 1 on this endpoint; for several samples, use /v1/chat/completions",
                param="n",
            )
        if self.input is None and self.previous_response_id is None:
            raise RequestError("input is required", param="input")
        if self.input == [] and self.previous_response_id is None:
            raise RequestError("input must not be empty", param="input")
        if isinstance(self.input, list):
            for i, item in enumerate(self.input):
                check_item(f"input[{i}]", item)
        if self.max_tool_calls is not None and not 0 <= self.max_tool_calls <= MAX_COUNT:
            raise RequestError(
                f"max_tool_calls must be between 0 and {MAX_COUNT}", param="max_tool_calls"
            )
        if self.background and not self.stored:
            raise RequestError(
                "background cannot be combined with store: false, because clients retrieve a "
                "background response from the store",
                param="background",
            )
        if self.truncation not in (None, "disabled"):
            raise RequestError(
                "truncation must be disabled, because the server does not shorten the input",
                param="truncation",
            )
        if self.format is not None and self.response_format is not None:
            raise RequestError(
                "text.format and response_format cannot be combined: send only one",
                param="text.format",
            )
        for i, name in enumerate(self.include or ()):
            if name not in INCLUDABLE:
                raise RequestError(
                    f"include[{i}] is unknown; only {LOGPROBS} has an effect"
                    f"{did_you_mean(name, INCLUDABLE - {LOGPROBS})}",
                    param=f"include[{i}]",
                )
        self._check_summary()
        self._check_metadata()

    def _check_prompt_logprobs(self) -> None:
        raise RequestError(
            "prompt_logprobs is not supported on this endpoint; use /v1/chat/completions",
            param="prompt_logprobs",
        )

    def _check_activations(self) -> None:
        raise RequestError(
            "return_activations is not supported on this endpoint; use /v1/chat/completions",
            param="return_activations",
        )

    def _check_summary(self) -> None:
        for name in ("summary", "generate_summary"):
            if getattr(self.reasoning, name, None) not in (None, "auto"):
                raise RequestError(
                    f"reasoning.{name} must be auto or omitted, because reasoning is returned in "
                    "full",
                    param=f"reasoning.{name}",
                )

    def _check_metadata(self) -> None:
        metadata = self.metadata or {}
        too_long = any(
            len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE
            for key, value in metadata.items()
        )
        if len(metadata) > MAX_METADATA or too_long:
            raise RequestError(
                f"metadata must have at most {MAX_METADATA} entries, keys of at most "
                f"{MAX_METADATA_KEY} characters and values of at most {MAX_METADATA_VALUE}",
                param="metadata",
            )

    def chat(self, previous: Turn | None, *, kept: bool) -> ResponsesChat:
        """Convert the request to a chat.

        Args:
          previous: the turn of the response that the request continues.
          kept: True if the server will store the response.

        Raises:
          RequestError: a tool or the tool choice is not supported.
        """
        shared = {name: getattr(self, name) for name in GenerationRequest.__struct_fields__}
        if self.format is not None:
            shared["response_format"] = self.format
        tools, choice = _tools_and_choice(self.tools or [], self.tool_choice)
        thinks = None if self.effort is None else self.effort != "none"
        return ResponsesChat(
            **shared,
            asked=self,
            previous=previous,
            kept=kept,
            messages=self._messages([] if previous is None else previous.items()),
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            tools=tools or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.effort,
            include_reasoning=thinks is not False,
            chat_template_kwargs={
                **({} if thinks is None else thinking_variables(thinks)),
                **(self.chat_template_kwargs or {}),
            },
        )

    def _messages(self, before: Sequence[Item]) -> list[Message]:
        given = self.given
        asked = [Item(role="user", content=given)] if isinstance(given, str) else given
        check_outputs(before, asked)
        found = messages(before, asked)
        if not self.instructions:
            return found
        texts = [self.instructions]
        # Templates expect a single system message at the beginning.
        while found and found[0].role in ("system", "developer"):
            texts.append(str(found.pop(0).content))
        return [Message("system", "\n\n".join(texts)), *found]


class ResponseCreate(ResponsesRequest, kw_only=True):
    """WebSocket message: a body of POST /v1/responses with a `type`."""

    type: Annotated[str | None, rule(schema={"const": MESSAGE_TYPE})] = None
    stream: Annotated[bool | None, rule(schema={"enum": [True, None]})] = None
    background: Annotated[bool | None, rule(schema={"enum": [False, None]})] = None
    generate: bool | None = None  # false: only prepare the prompt
    # The events repeat this id.
    stream_id: Annotated[
        str | None,
        rule(schema=nullable({"type": "string", "pattern": f"^{_STREAM_ID.pattern}$"})),
    ] = None

    @classmethod
    def narrow_schema(cls, schema: Schema, about: About) -> None:
        ResponsesRequest.narrow_schema(schema, about)
        schema["required"] = [*schema.get("required", ()), "type"]

    def __post_init__(self) -> None:
        if self.stream is None:
            self.stream = True

    def check(self) -> None:
        if not self.stream:
            raise RequestError(
                "stream cannot be false over a WebSocket, which always streams: omit it",
                param="stream",
            )
        if self.background:
            raise RequestError(
                "background is not supported over a WebSocket: omit it, or send a POST",
                param="background",
            )
        if self.stream_id is not None and not _STREAM_ID.fullmatch(self.stream_id):
            raise StreamIdError(
                "stream_id must be 1 to 256 letters, digits or _ - .", param="stream_id"
            )
        ResponsesRequest.check(self)

    def chat(self, previous: Turn | None, *, kept: bool) -> ResponsesChat:
        made = ResponsesRequest.chat(self, previous, kept=kept)
        if self.generate is False:
            made.max_completion_tokens, made.min_tokens = 0, None
        return made


class MessageHead(msgspec.Struct):
    """The fields that identify a WebSocket message, even if it is not a `ResponseCreate`."""

    type: Any = None
    previous_response_id: Any = None
    stream_id: Any = None

    @property
    def valid_stream_id(self) -> str | None:
        """The id, if an error event may repeat it."""
        given = self.stream_id
        return given if isinstance(given, str) and _STREAM_ID.fullmatch(given) else None

    def check(self) -> None:
        if self.type != MESSAGE_TYPE:
            raise RequestError(
                f"type must be {MESSAGE_TYPE}, the only supported message", param="type"
            )


class ResponsesChat(ChatRequest, kw_only=True):
    """A chat converted from a Responses request."""

    asked: ResponsesRequest
    previous: Turn | None
    kept: bool

    def names_sent(self) -> dict[str, str]:
        names = {"prompt": "input", "messages": "input"}
        if self.asked.max_output_tokens is not None:
            names["max_tokens"] = "max_output_tokens"
        if self.asked.format is None:
            return names | GenerationRequest.names_sent(self)
        return names | {"structured_outputs": "text.format", "response_format": "text.format"}

    def translate_params(self, error: RequestError) -> RequestError:
        error = ChatRequest.translate_params(self, error)
        if error.param is None:
            return error
        field, dot, rest = _NESTED.sub(r"\1", error.param).partition(".")
        if field.startswith("messages["):  # message indices differ from item indices
            return type(error)(str(error), param="input")
        param = self.names_sent().get(field, field) + dot + rest
        return type(error)(_NESTED.sub(r"\1", str(error)), param=param)


def _tools_and_choice(
    tools: Sequence[dict[str, Any]], choice: Any
) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    """Return both in a chat's format, without the tools that the choice excludes."""
    functions = [_function(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    match choice:
        case None | str():
            return functions, choice
        case {"type": "function", "name": str(name)}:
            return functions, {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            _check_functions(functions)  # including excluded ones
            names = [_allowed_name(f"tool_choice.tools[{i}]", a) for i, a in enumerate(allowed)]
            return [tool for tool in functions if tool["function"].get("name") in names], mode
    raise RequestError(
        "tool_choice must be none, auto, required, a function with its name, or allowed_tools "
        "with mode and tools",
        param="tool_choice",
    )


def _check_functions(functions: Sequence[dict[str, Any]]) -> None:
    try:
        chosen(functions, None)
    except RequestError as error:
        param = _NESTED.sub(r"\1", error.param or "tools")
        raise type(error)(_NESTED.sub(r"\1", str(error)), param=param) from error


def _allowed_name(path: str, allowed: Any) -> str:
    match allowed:
        case {"type": "function", "name": str(name)}:
            return name
    raise RequestError(f"{path} must be a function with its name", param=path)


def _function(path: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(
            f"{path}.type must be function: server tools are not supported",
            param=f"{path}.type",
        )
    names = ("name", "description", "parameters", "strict")
    given = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": given}
