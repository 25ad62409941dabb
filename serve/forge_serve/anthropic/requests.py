"""The body of POST /v1/messages: Anthropic's protocol.

`translation` turns it into a `ChatRequest`, which is then served like any other chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import msgspec

from forge_jax.errors import RequestError
from forge_serve.errors import UnsupportedThreadError
from forge_serve.openai.requests import ContentPart, GenerationRequest
from forge_serve.openai.structured import asks_for_something

PATH = "/v1/messages"


class Block(msgspec.Struct):
    """A content block of a request, of any type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentPart] | None = None


TurnRole = Literal["user", "assistant", "system"]


class Turn(msgspec.Struct):
    role: TurnRole
    content: str | list[Block]
    clear_at: Literal["never", "next_user_message"] | None = None  # of a system message
    output_config: dict[str, Any] | None = None  # refused unless empty


class Tool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[str] | None = None
    strict: bool | None = None


class Choice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputConfig(msgspec.Struct):
    format: dict[str, Any] | None = None
    effort: str | None = None
    task_budget: Any = None


class MessagesRequest(GenerationRequest, kw_only=True):
    """POST /v1/messages, and /v1/messages/count_tokens."""

    messages: list[Turn]
    system: str | list[ContentPart] | None = None
    stop_sequences: list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # the older name of output_config.format
    chat_template_kwargs: dict[str, Any] | None = None

    thread: Any = None
    container: Any = None
    mcp_servers: Any = None
    compaction: Any = None

    ROLES: ClassVar[tuple[str, ...]] = get_args(TurnRole)
    _REFUSED: ClassVar[Mapping[str, str]] = {
        **GenerationRequest._REFUSED,
        "thread": "this server keeps no conversations: send all messages, system and tools",
        "container": "this server runs no code and loads no skills",
        "mcp_servers": "this server calls no other servers: run the tools in the client",
        "compaction": "this server summarizes no conversations: ask for a summary in a message",
    }

    def check(self) -> None:
        if asks_for_something(self.thread):  # first: clients answer it by sending another request
            raise UnsupportedThreadError(f"thread: {self._REFUSED['thread']}", param="thread")
        GenerationRequest.check(self)
        if self.num_samples != 1:
            raise RequestError("n must be 1 here: ask for a chat completion", param="n")
        if self.stop is not None and self.stop_sequences is not None:
            raise RequestError("stop and stop_sequences are the same: send one", param="stop")
        if not self.messages:
            raise RequestError("messages must not be empty", param="messages")
        self._check_output()

    def _check_output(self) -> None:
        if self.output_config is not None:
            if asks_for_something(self.output_config.task_budget):
                raise RequestError(
                    "output_config.task_budget: not supported: use max_tokens",
                    param="output_config.task_budget",
                )
            if self.output_config.format is not None and self.output_format is not None:
                raise RequestError(
                    "output_format and output_config.format are the same: send one",
                    param="output_format",
                )

    def _check_prompt_logprobs(self) -> None:
        raise RequestError(
            "prompt_logprobs are not supported here: ask for a chat completion",
            param="prompt_logprobs",
        )
