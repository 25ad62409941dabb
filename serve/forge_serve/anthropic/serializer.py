"""Serializer of /v1/messages, for whole responses and streams, and Anthropic's error body."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from forge_serve.anthropic.response_types import (
    BlockDelta,
    BlockStart,
    BlockStop,
    BlockUpdate,
    InputDelta,
    MessageDelta,
    MessagesAnswer,
    MessagesBegun,
    MessagesError,
    MessagesErrorAnswer,
    MessagesEvent,
    MessageStart,
    MessageStop,
    MessagesUsage,
    OutputTokens,
    SignatureDelta,
    StopDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ThinkingStart,
    ToolUseBlock,
)
from forge_serve.anthropic.translation import TOOL_ID_PREFIX
from forge_serve.errors import ErrorReply
from forge_serve.generation.generation import Usage
from forge_serve.openai.serializers import ChatSerializer
from forge_serve.parsers.parts import CallPiece

if TYPE_CHECKING:
    from forge_jax.schedule.outputs import Delta

_json = msgspec.json.Encoder().encode

_STOP_REASONS: dict[str, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesSerializer(ChatSerializer):
    """Serializer of `message` objects, which have blocks of thinking, text and tool calls.

    In a stream, each block has a start and a stop event, and only the last block is open.
    """

    id_prefix = "msg_"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.usage_always = False  # only the first and last events have usage
        self._num_blocks = 0
        self._open: str | int | None = None  # "thinking", "text", or the index of a call

    def events(self, choice: int, delta: Delta, usage: Usage | None = None) -> bytes:
        return b"".join(self._events(delta))

    def end(self, usage: Usage) -> bytes:
        stop = StopDelta(self._stop_reason(), self._stop_sequence())
        delta = MessageDelta(stop, OutputTokens(usage.completion_tokens))
        return _event(delta) + _event(MessageStop())

    def error_event(self, reply: ErrorReply) -> bytes:
        return b"event: error\ndata: " + error_body(reply) + b"\n\n"

    def body(self, usage: Usage) -> bytes:
        [state] = self._choices
        parts = self._all_parts(state)
        blocks: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
        if self.with_reasoning and parts.reasoning:
            blocks.append(ThinkingBlock("".join(parts.reasoning)))
        text = "".join(parts.content)
        if text:
            blocks.append(TextBlock(text))
        for call in parts.calls:
            arguments = complete_values("".join(call.arguments))
            blocks.append(_tool_use(call, msgspec.Raw(arguments.encode())))
        cached = usage.prompt_tokens_details.cached_tokens
        answer = MessagesAnswer(
            id=self.id,
            model=self.model,
            content=blocks,
            stop_reason=self._stop_reason(),
            stop_sequence=self._stop_sequence(),
            usage=_usage(usage.prompt_tokens, cached, usage.completion_tokens),
        )
        return _json(answer)

    def _events(self, delta: Delta) -> Iterator[bytes]:
        [state] = self._choices
        if not state.started:
            state.started = True
            usage = _usage(len(state.of.prompt.token_ids), delta.num_cached_tokens, 0)
            yield _event(MessageStart(MessagesBegun(id=self.id, model=self.model, usage=usage)))
        parts = self._read(state, delta)
        state.finish_reason, state.stop_reason = delta.finish_reason, delta.stop_reason
        open_call = self._open if isinstance(self._open, int) else None
        for piece in parts.in_order(open_call):
            match piece:
                case "reasoning", text:
                    if self.with_reasoning:
                        yield from self._say("thinking", ThinkingStart(), ThinkingDelta(text))
                case "content", text:
                    yield from self._say("text", TextBlock(""), TextDelta(text))
                case CallPiece():
                    if piece.index != self._open:
                        yield from self._begin(piece.index, _tool_use(piece, {}))
                    yield self._update(InputDelta("".join(piece.arguments)))
        if delta.finish_reason is not None:
            yield from self._close()

    def _say(
        self, kind: str, block: TextBlock | ThinkingStart, update: BlockUpdate
    ) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._begin(kind, block)
        yield self._update(update)

    def _update(self, update: BlockUpdate) -> bytes:
        """Return an event of the open block."""
        return _event(BlockDelta(self._num_blocks - 1, update))

    def _begin(
        self, what: str | int, block: TextBlock | ThinkingStart | ToolUseBlock
    ) -> Iterator[bytes]:
        yield from self._close()
        self._open = what
        yield _event(BlockStart(self._num_blocks, block))
        self._num_blocks += 1

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":  # the protocol requires a signature, which is empty here
            yield self._update(SignatureDelta())
        if self._open is not None:
            yield _event(BlockStop(self._num_blocks - 1))
        self._open = None

    def _stop_reason(self) -> StopReason:
        [state] = self._choices
        reason = state.finish_reason or "stop"
        if reason == "stop" and state.parser is not None and state.parser.called:
            return "tool_use"
        return "stop_sequence" if self._stop_sequence() is not None else _STOP_REASONS[reason]

    def _stop_sequence(self) -> str | None:
        stop = self._choices[0].stop_reason
        return stop if isinstance(stop, str) else None


def error_body(reply: ErrorReply) -> bytes:
    """Return `{"type": "error", "error": {...}}` as JSON."""
    kind = _ERROR_TYPES.get(
        reply.status, "invalid_request_error" if reply.status < 500 else "api_error"
    )
    error = MessagesError(kind, reply.text)
    if reply.details is not None:
        error.details = reply.details
    return _json(MessagesErrorAnswer(error))


_HEADS = {
    kind: f"event: {kind.__struct_config__.tag}\ndata: ".encode()
    for kind in get_args(MessagesEvent)
}


def _event(event: MessagesEvent) -> bytes:
    return b"%b%b\n\n" % (_HEADS[type(event)], _json(event))


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> MessagesUsage:
    return MessagesUsage(
        input_tokens=prompt_tokens - cached_tokens,
        cache_read_input_tokens=cached_tokens,
        output_tokens=output_tokens,
    )


def _tool_use(call: CallPiece, arguments: Any) -> ToolUseBlock:
    id = f"{TOOL_ID_PREFIX}{(call.id or '').removeprefix('call_')}"
    return ToolUseBlock(id, call.name or "", arguments)


_JSON_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+)')


def complete_values(text: str) -> str:
    """Return a valid JSON object with the complete values of a truncated one.

    The token limit may cut off the arguments of a tool call.
    """
    closers: list[str] = []
    end, closing, key_next, at = 0, "{}", False, 0
    while (token := _JSON_TOKEN.match(text, at)) is not None:
        what, at, complete = token[1], token.end(), True
        if what in "{[":
            closers.append("}" if what == "{" else "]")
            key_next = what == "{"
        elif what in "}]":
            closers.pop()
        elif what == ",":
            key_next, complete = closers[-1] == "}", False
        elif what == ":":
            complete = False
        elif key_next:
            key_next = complete = False
        elif what[0] != '"':
            complete = at < len(text)  # a scalar at the end may be truncated
        if complete:
            end, closing = at, "".join(reversed(closers))
    return text[:end] + closing
