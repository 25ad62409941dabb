"""The responses of /v1/messages, whole or as events, and Anthropic's error body."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from forge_serve.anthropic.translation import TOOL_ID_PREFIX
from forge_serve.errors import ErrorReply
from forge_serve.generation.generation import Usage
from forge_serve.openai.serializers import ChatSerializer
from forge_serve.parsers.parts import CallPiece

if TYPE_CHECKING:
    from forge_jax.schedule.outputs import Delta

_json = msgspec.json.Encoder().encode

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
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
    """`message` objects: blocks of thinking, text and calls of tools.

    In a stream each block has its own beginning and end, and only the last one is open.
    """

    id_prefix = "msg_"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.usage_always = False  # no event in the middle has the usage here
        self._num_blocks = 0
        self._open: str | int | None = None  # "thinking", "text", or the index of a call

    def events(self, choice: int, delta: Delta, usage: Usage | None = None) -> bytes:
        return b"".join(self._events(delta))

    def end(self, usage: Usage) -> bytes:
        stop = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
        tokens = {"output_tokens": usage.completion_tokens}
        return _event("message_delta", delta=stop, usage=tokens) + _event("message_stop")

    def error_event(self, reply: ErrorReply) -> bytes:
        return b"event: error\ndata: " + error_body(reply) + b"\n\n"

    def body(self, usage: Usage) -> bytes:
        [state] = self._choices
        parts = self._all_parts(state)
        blocks: list[dict[str, Any]] = []
        if self.with_reasoning and parts.reasoning:
            thinking = "".join(parts.reasoning)
            blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
        text = "".join(parts.content)
        if text:
            blocks.append({"type": "text", "text": text})
        for call in parts.calls:
            arguments = complete_values("".join(call.arguments))
            blocks.append(_tool_use(call, msgspec.Raw(arguments.encode())))
        cached = usage.prompt_tokens_details["cached_tokens"]
        return _json(
            {
                **self._message(blocks),
                "stop_reason": self._stop_reason(),
                "stop_sequence": self._stop_sequence(),
                "usage": {
                    "input_tokens": usage.prompt_tokens - cached,
                    "cache_creation_input_tokens": 0,
                    "cache_read_input_tokens": cached,
                    "output_tokens": usage.completion_tokens,
                },
            }
        )

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._common["model"],
            "content": blocks,
        }

    def _events(self, delta: Delta) -> Iterator[bytes]:
        [state] = self._choices
        if not state.started:
            state.started = True
            prompt_tokens, cached = len(state.of.prompt.token_ids), delta.num_cached_tokens
            usage = {
                "input_tokens": prompt_tokens - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": 0,
            }
            message = {**self._message([]), "stop_reason": None, "stop_sequence": None}
            yield _event("message_start", message={**message, "usage": usage})
        parts = self._read(state, delta)
        state.finish_reason, state.stop_reason = delta.finish_reason, delta.stop_reason
        open_call = self._open if isinstance(self._open, int) else None
        for piece in parts.in_order(open_call):
            match piece:
                case "reasoning", text:
                    if self.with_reasoning:
                        yield from self._say("thinking", text)
                case "content", text:
                    yield from self._say("text", text)
                case CallPiece():
                    if piece.index != self._open:
                        yield from self._begin(piece.index, _tool_use(piece, {}))
                    yield self._input(piece)
        if delta.finish_reason is not None:
            yield from self._close()

    def _say(self, kind: str, text: str) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._begin(kind, {"type": kind, kind: ""})
        updates = {"type": f"{kind}_delta", kind: text}
        yield _event("content_block_delta", index=self._num_blocks - 1, delta=updates)

    def _input(self, piece: CallPiece) -> bytes:
        updates = {"type": "input_json_delta", "partial_json": "".join(piece.arguments)}
        return _event("content_block_delta", index=self._num_blocks - 1, delta=updates)

    def _begin(self, what: str | int, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._open = what
        yield _event("content_block_start", index=self._num_blocks, content_block=block)
        self._num_blocks += 1

    def _close(self) -> Iterator[bytes]:
        index = self._num_blocks - 1
        if self._open == "thinking":  # nothing vouches for it
            updates = {"type": "signature_delta", "signature": ""}
            yield _event("content_block_delta", index=index, delta=updates)
        if self._open is not None:
            yield _event("content_block_stop", index=index)
        self._open = None

    def _stop_reason(self) -> str:
        [state] = self._choices
        reason = state.finish_reason or "stop"
        if reason == "stop" and state.parser is not None and state.parser.called:
            return "tool_use"
        return "stop_sequence" if self._stop_sequence() is not None else _STOP_REASONS[reason]

    def _stop_sequence(self) -> str | None:
        stop = self._choices[0].stop_reason
        return stop if isinstance(stop, str) else None


def error_body(reply: ErrorReply) -> bytes:
    """`{"type": "error", "error": {...}}`, as JSON."""
    kind = _ERROR_TYPES.get(
        reply.status, "invalid_request_error" if reply.status < 500 else "api_error"
    )
    details = {} if reply.details is None else {"details": reply.details}
    return _json({"type": "error", "error": {"type": kind, "message": reply.text, **details}})


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _json({"type": name, **fields}))


def _tool_use(call: CallPiece, arguments: Any) -> dict[str, Any]:
    id = f"{TOOL_ID_PREFIX}{(call.id or '').removeprefix('call_')}"
    return {"type": "tool_use", "id": id, "name": call.name, "input": arguments}


_JSON_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+)')


def complete_values(text: str) -> str:
    """The JSON object that `text` begins, with the values in it that are complete: the token limit
    may have cut off the rest.
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
            complete = at < len(text)  # else there may be more of it
        if complete:
            end, closing = at, "".join(reversed(closers))
    return text[:end] + closing
