"""The body of POST /v1/messages, in Anthropic's protocol.

`translation` converts it to a `ChatRequest`, which is then served like any other chat.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec

from forge_jax.errors import RequestError
from forge_serve.errors import UnsupportedThreadError
from forge_serve.generation.files import MAX_NAME_CHARS
from forge_serve.openai.content import FILE_RULE, ContentPart
from forge_serve.openai.requests import (
    CHOICE_RULE,
    MESSAGES_RULE,
    TOOLS_RULE,
    GenerationRequest,
    NoActivations,
    NoPromptLogprobs,
    OneSample,
    TemplateKwargs,
    stop_strings,
)
from forge_serve.openai.structured import FORMAT_SCHEMA, asks_for_something
from forge_serve.openai.tools import NAME_SCHEMA
from forge_serve.openapi.schema import (
    NOTHING,
    TEXT_OR_PARTS,
    About,
    Schema,
    nullable,
    refused,
    rule,
    tagged,
)

PATH = "/v1/messages"

SOURCES = ("base64", "text")  # supported types of sources
_NO_THREADS = "the server stores no conversations; send all messages, system and tools"


class Source(msgspec.Struct):
    """The data of a document."""

    type: str
    data: str | None = None
    media_type: str | None = None


class ContentBlock(msgspec.Struct):
    """Content block that a tool result may contain: text or a document."""

    type: str
    text: str | None = None
    source: Source | None = None
    title: str | None = None
    context: Any = None  # rejected in documents
    citations: Any = None  # rejected in documents, if enabled


class Block(ContentBlock):
    """Content block of any type."""

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None


TurnRole = Literal["user", "assistant", "system"]


def _document() -> Schema:
    source = {
        "type": "object",
        "required": ["type", "data"],
        "properties": {
            "type": {"enum": list(SOURCES)},
            "data": {"type": "string", "description": FILE_RULE},
            "media_type": {"type": ["string", "null"]},
        },
    }
    title = nullable({"type": "string", "maxLength": MAX_NAME_CHARS})
    enabled = {"required": ["enabled"], "properties": {"enabled": {"not": NOTHING}}}
    citations = {"not": {"type": "object", **enabled}}
    fields = {"source": source, "title": title, "context": NOTHING, "citations": citations}
    block = tagged("document")
    return {
        "required": [*block["required"], "source"],
        "properties": block["properties"] | fields,
    }


def _tool_result() -> Schema:
    block = tagged("tool_result", "tool_use_id")
    items = {"type": "object", "anyOf": [tagged("text", "text"), _document()]}
    parts = {"type": "array", "items": items}
    block["properties"]["content"] = {"anyOf": [{"type": ["string", "null"]}, parts]}
    return block


# The block types that each role may have.
_BLOCKS = {
    "user": [tagged("text", "text"), _document(), _tool_result()],
    "assistant": [
        tagged("text", "text"),
        tagged("thinking"),
        tagged("redacted_thinking"),
        tagged("tool_use", "name"),
    ],
    "system": [tagged("text", "text")],
}


class Turn(msgspec.Struct):
    role: TurnRole
    content: str | list[Block]
    clear_at: Literal["never", "next_user_message"] | None = None  # applies to system messages
    output_config: Annotated[
        dict[str, Any] | None,
        rule(schema=nullable({"type": "object", "additionalProperties": NOTHING})),
    ] = None

    @classmethod
    def narrow_schema(cls, schema: Schema, about: About) -> None:
        def turn(role: str, blocks: list[Schema]) -> Schema:
            content = {"anyOf": [{"type": "string"}, {"items": {"anyOf": blocks}}]}
            return {"properties": {"role": {"const": role}, "content": content}}

        schema["anyOf"] = [turn(role, blocks) for role, blocks in _BLOCKS.items()]


class Tool(msgspec.Struct):
    name: Annotated[str, rule(**NAME_SCHEMA)]
    type: Annotated[str | None, rule(schema={"enum": ["custom", None]})] = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: Annotated[
        Annotated[list[str], rule(anyOf=[{"contains": {"const": "direct"}}, {"maxItems": 0}])]
        | None,
        rule(),
    ] = None
    strict: bool | None = None


class Choice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @classmethod
    def narrow_schema(cls, schema: Schema, about: About) -> None:
        schema["anyOf"] = [
            {"properties": {"type": {"enum": ["auto", "any", "none"]}}},
            {"required": ["name"], "properties": {"name": {"type": "string"}}},
        ]


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputConfig(msgspec.Struct):
    format: Annotated[dict[str, Any] | None, rule(schema=FORMAT_SCHEMA)] = None
    effort: str | None = None
    task_budget: Annotated[Any, rule(**NOTHING)] = None


def _stop_sequences(about: About) -> Schema:
    return nullable(stop_strings(about))


class MessagesRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/messages and /v1/messages/count_tokens."""

    messages: Annotated[
        list[Turn],
        rule(MESSAGES_RULE, most=("messages", "messages"), minItems=1),
    ]
    n: OneSample = None
    best_of: OneSample = None
    prompt_logprobs: NoPromptLogprobs = None
    return_activations: NoActivations = None
    system: Annotated[str | list[ContentPart] | None, rule(schema=TEXT_OR_PARTS)] = None
    stop_sequences: Annotated[list[str] | None, rule(schema=_stop_sequences)] = None
    tools: Annotated[
        list[Tool] | None,
        rule(TOOLS_RULE, most=("tools", "entries")),
    ] = None
    tool_choice: Annotated[Choice | None, rule(CHOICE_RULE)] = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # An older name of output_config.format.
    output_format: Annotated[dict[str, Any] | None, rule(schema=FORMAT_SCHEMA)] = None
    chat_template_kwargs: TemplateKwargs = None

    thread: Annotated[Any, refused(_NO_THREADS)] = None
    container: Annotated[Any, refused("code execution and skills are not supported")] = None
    mcp_servers: Annotated[Any, refused("not supported; run the tools in the client")] = None
    compaction: Annotated[Any, refused("not supported; request a summary in a user message")] = None

    ROLES: ClassVar[tuple[str, ...]] = get_args(TurnRole)

    def check(self) -> None:
        if asks_for_something(self.thread):  # first, because clients then retry without threads
            raise UnsupportedThreadError(f"thread: {_NO_THREADS}", param="thread")
        GenerationRequest.check(self)
        if self.num_samples != 1:
            raise RequestError(
                "n must be 1 on this endpoint; for several samples, use /v1/chat/completions",
                param="n",
            )
        if self.stop is not None and self.stop_sequences is not None:
            raise RequestError(
                "stop and stop_sequences cannot be combined: send only one", param="stop"
            )
        if not self.messages:
            raise RequestError("messages must not be empty", param="messages")
        self._check_output()

    def _check_output(self) -> None:
        if self.output_config is not None:
            if asks_for_something(self.output_config.task_budget):
                raise RequestError(
                    "output_config.task_budget: not supported; use max_tokens",
                    param="output_config.task_budget",
                )
            if self.output_config.format is not None and self.output_format is not None:
                raise RequestError(
                    "output_format and output_config.format cannot be combined: send only one",
                    param="output_format",
                )

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
