"""The objects that /v1/messages sends: messages, their events and errors.

The serializer builds these structs, and `/openapi.json` is generated from them.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType, field

from forge_serve.errors import ThreadErrorDetails
from forge_serve.openapi.payload import Payload


class TextBlock(Payload, tag="text"):
    text: str


class ThinkingBlock(Payload, tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(Payload, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(Payload, kw_only=True):
    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesAnswer(Payload, kw_only=True):
    """Response of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesBegun(Payload, kw_only=True):
    """Message at the beginning of a stream."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Any] = field(default_factory=list)
    stop_reason: None = None
    stop_sequence: None = None
    usage: MessagesUsage


class MessageStart(Payload, tag="message_start"):
    message: MessagesBegun


class ThinkingStart(Payload, tag="thinking"):
    thinking: str = ""


class BlockStart(Payload, tag="content_block_start"):
    index: int
    content_block: TextBlock | ThinkingStart | ToolUseBlock


class TextDelta(Payload, tag="text_delta"):
    text: str


class ThinkingDelta(Payload, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Payload, tag="signature_delta"):
    signature: str = ""


class InputDelta(Payload, tag="input_json_delta"):
    partial_json: str


BlockUpdate = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(Payload, tag="content_block_delta"):
    index: int
    delta: BlockUpdate


class BlockStop(Payload, tag="content_block_stop"):
    index: int


class StopDelta(Payload):
    stop_reason: StopReason
    stop_sequence: str | None


class OutputTokens(Payload):
    output_tokens: int


class MessageDelta(Payload, tag="message_delta"):
    delta: StopDelta
    usage: OutputTokens


class MessageStop(Payload, tag="message_stop"):
    pass


MessagesEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class CountAnswer(Payload):
    """Number of tokens in a prompt."""

    input_tokens: int


class MessagesError(Payload):
    type: str
    message: str
    details: ThreadErrorDetails | UnsetType = UNSET


class MessagesErrorAnswer(Payload, tag="error"):
    """Error response in Anthropic's format."""

    error: MessagesError
