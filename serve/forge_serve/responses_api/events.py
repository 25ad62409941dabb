"""Serializer of /v1/responses: `response` objects, whole or as a stream of numbered events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast, get_args

import msgspec
from msgspec import UNSET, UnsetType

from forge_jax.schedule.plan import TokenLogprobs
from forge_serve.errors import ErrorReply
from forge_serve.generation.generation import Usage
from forge_serve.generation.prompts import Prompt
from forge_serve.openai.serializers import ChatSerializer
from forge_serve.parsers.parts import CallPiece, Parts
from forge_serve.responses_api.output import Logprobs, MessageItem, Output
from forge_serve.responses_api.requests import ResponsesChat
from forge_serve.responses_api.response_types import (
    DoneStatus,
    Event,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseAnswer,
    ResponseCompleted,
    ResponseCreated,
    ResponseErrorEvent,
    ResponseEvent,
    ResponseFailed,
    ResponseFailure,
    ResponseHead,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
    ResponseReasoning,
    ResponseStatus,
    ResponseText,
    ResponseUsage,
)
from forge_serve.responses_api.store import joined

if TYPE_CHECKING:
    from forge_jax.schedule.outputs import Delta
    from forge_jax.text import Tokenizer

_json = msgspec.json.Encoder().encode
_NAMES: dict[type, str] = {
    kind: str(kind.__struct_config__.tag) for kind in get_args(ResponseEvent)
}

type _OfResponse = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)
# Tool fields that Open Responses requires in a response. By default, tools are not strict here.
_TOOL_DEFAULTS = {"description": None, "parameters": None, "strict": False}


class ResponsesSerializer(ChatSerializer):
    """Serializer of a `response` object, whose output has reasoning, messages and calls.

    When the response is `concluded`, `head` and `output` are its final JSON.
    """

    id_prefix = "resp"

    def __init__(
        self,
        request: ResponsesChat,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer | None,
        *,
        unique_id: str,
        **kwargs: Any,
    ):
        super().__init__(request, prompts, tokenizer, unique_id=unique_id, **kwargs)
        # The id of a stored response grants access to it, so it must not be guessable.
        self.id = f"resp_{secrets.token_hex(24)}"
        self.unique_id = unique_id  # part of the items' ids
        self.asked, self.kept, self.previous = request.asked, request.kept, request.previous
        self.background = bool(request.asked.background)
        self.usage_always = False  # only the last event has usage
        self.concluded = False
        self.when_concluded: Callable[[], None] | None = None  # runs before the last event is sent
        self.head = self.output = b""
        self._items = Output(unique_id)
        self._num_events = 0
        self._num_tokens = 0  # tokens whose logprobs have arrived
        self._waiting: list[TokenLogprobs] = []  # logprobs whose text has not arrived
        self._plain_parts: tuple[bytes, ...] = ()  # see `_plain_template`
        self._stream_id: str | UnsetType = UNSET

    def beginning(self) -> bytes:
        return b"".join(self.beginning_events())

    def events(self, choice: int, delta: Delta, usage: Usage | None = None) -> bytes:
        if self._plain_parts and delta.finish_reason is None:
            return self._plain(delta.text)
        return b"".join(self.delta_events(delta))

    def add(self, choice: int, delta: Delta) -> None:
        if self._plain_parts and delta.finish_reason is None:
            self._plain(delta.text)
            return
        for _ in self._delta_events(delta):
            pass

    def end(self, usage: Usage) -> bytes:
        return b"".join(self.end_events(usage))

    def error_event(self, reply: ErrorReply) -> bytes:
        return b"".join(self.error_events(reply))

    def body(self, usage: Usage) -> bytes:
        return self._conclude(self._status(), usage)

    # ---- lists of events -----------------------------------------------------------------------

    def beginning_events(self) -> list[bytes]:
        now = self.snapshot()
        waits = ResponseQueued if self.background else ResponseInProgress
        return self._encoded([self._told(ResponseCreated, now), self._told(waits, now)])

    def delta_events(self, delta: Delta) -> list[bytes]:
        return self._encoded(self._delta_events(delta))

    def end_events(self, usage: Usage) -> list[bytes]:
        status = self._status()
        kind = ResponseCompleted if status == "completed" else ResponseIncomplete
        return self._encoded([self._told(kind, self._conclude(status, usage))])

    def error_events(self, reply: ErrorReply) -> list[bytes]:
        updates: list[Event] = [*self._items.close("incomplete"), *self._error(reply)]
        updates.append(self._told(ResponseFailed, self._conclude("failed", error=reply)))
        return self._encoded(updates)

    def cancel_events(self, usage: Usage) -> list[bytes]:
        """Return the last events of a cancelled stream.

        The protocol has no event for cancellation, so the last one is `response.incomplete`.
        """
        updates: list[Event] = [*self._items.close("incomplete")]
        updates.append(self._told(ResponseIncomplete, self._conclude("cancelled", usage)))
        return self._encoded(updates)

    def snapshot(self) -> bytes:
        """Return the current response. The output has the items with events so far."""
        waits = self.background and not self._choices[0].started
        status = "queued" if waits else "in_progress"
        return joined(_json(self._head(status)), _json(self._items.shown()))

    # ---- events --------------------------------------------------------------------------------

    def _delta_events(self, delta: Delta) -> Iterator[Event]:
        [state] = self._choices
        if not state.started:
            state.started = True
            if self.background:
                yield self._told(ResponseInProgress, self.snapshot())
        parts = self._read(state, delta)
        if state.parser is not None and state.parser.over:
            state.parser = None
        state.finish_reason = delta.finish_reason
        yield from self._take(parts, delta.logprobs or ())
        if delta.finish_reason is not None:
            self._plain_parts = ()
            yield from self._items.close(self._status())
        elif state.parser is None and not self.with_logprobs and parts.content:
            self._plain_parts = self._plain_template(self._items.open)

    def _take(self, parts: Parts, logprobs: Sequence[TokenLogprobs]) -> Iterator[Event]:
        """Add new parts to the items, and yield the events."""
        if parts.reasoning:
            self._waiting.clear()
        self._waiting += self._of_text(logprobs)
        for piece in parts.in_order(self._items.open_call):
            match piece:
                case "reasoning", text:
                    if self.with_reasoning:
                        yield from self._items.think(text)
                case "content", text:
                    yield from self._items.say(text, self._logprobs_of_text())
                case CallPiece():
                    if not parts.content:
                        self._waiting.clear()  # logprobs of calls belong to no text
                    yield from self._items.call(piece)

    def _of_text(self, logprobs: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        """Return the logprobs without those of the leading reasoning and of special tokens."""
        num_reasoning = sum(counter.number for counter in self.reasoning_tokens)
        begin = max(num_reasoning - self._num_tokens, 0)
        self._num_tokens += len(logprobs)
        return [entry for entry in logprobs[begin:] if self.tokens.shown(entry.token_id)]

    def _logprobs_of_text(self) -> Logprobs:
        entries, self._waiting = self._waiting, []
        found = self._logprobs(entries)
        return [] if found is None else found.content

    def _plain_template(self, item: Any) -> tuple[bytes, ...]:
        """Return the three pieces of a plain delta event.

        The sequence number goes between the first two, and the text between the last two. Only
        message items have plain deltas; for others the result is empty.
        """
        if not isinstance(item, MessageItem):
            return ()
        number = 2**53  # far above any real sequence number
        data = _json(self._numbered(item.delta(""), number))
        head, _, rest = data.partition(b"%d" % number)
        return head, *rest.split(b'""', 1)

    def _plain(self, text: str) -> bytes:
        if not text:
            return b""
        item = self._items.open
        assert item is not None
        item.pieces.append(text)
        head, middle, tail = self._plain_parts
        number, self._num_events = self._num_events, self._num_events + 1
        data = b"%b%d%b%b%b" % (head, number, middle, _json(text), tail)
        return self._framed("response.output_text.delta", data)

    def _error(self, reply: ErrorReply) -> list[Event]:
        """Return the events before the last one of a failed stream."""
        error = reply.error
        event = ResponseErrorEvent(
            code=error.code, message=error.message, param=error.param, error=error
        )
        return [event]

    def _told(self, kind: type[_OfResponse], response: bytes) -> Event:
        """Return an event with a response that is already encoded as JSON."""
        return kind(response=cast(ResponseAnswer, msgspec.Raw(response)))

    def _encoded(self, events: Iterable[Event]) -> list[bytes]:
        return [self._event_bytes(event) for event in events]

    def _event_bytes(self, event: Event) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return self._framed(_NAMES[type(event)], _json(self._numbered(event, number)))

    def _numbered(self, event: Event, number: int) -> Event:
        event.sequence_number, event.stream_id = number, self._stream_id
        return event

    def _framed(self, name: str, data: bytes) -> bytes:
        """Return the bytes that transport an event."""
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)

    # ---- the object ----------------------------------------------------------------------------

    def _status(self) -> DoneStatus:
        return "incomplete" if self._choices[0].finish_reason == "length" else "completed"

    def _conclude(
        self, status: ResponseStatus, usage: Usage | None = None, error: ErrorReply | None = None
    ) -> bytes:
        """Conclude the response, and return its final JSON."""
        head = self._head(status)
        if usage is not None:
            head.usage = usage_of(usage)
        if status == "completed":
            head.completed_at = int(time.time())
        if status == "incomplete":
            head.incomplete_details = IncompleteDetails()
        if error is not None:
            head.error = ResponseFailure(message=error.text, type=error.type)
        self.concluded = True
        self.head, self.output = _json(head), _json(self._items.shown())
        tell, self.when_concluded = self.when_concluded, None
        if tell is not None:
            tell()
        return joined(self.head, self.output)

    def _head(self, status: ResponseStatus) -> ResponseHead:
        asked = self.asked
        text = ResponseText(asked.format or {"type": "text"})
        if asked.text is not None and asked.text.verbosity is not None:
            text.verbosity = asked.text.verbosity
        return ResponseHead(
            id=self.id,
            created_at=self.created_s,
            status=status,
            background=self.background,
            frequency_penalty=asked.frequency_penalty or 0.0,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            max_tool_calls=asked.max_tool_calls,
            metadata=asked.metadata or {},
            model=self.model,
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            presence_penalty=asked.presence_penalty or 0.0,
            previous_response_id=asked.previous_response_id,
            prompt_cache_key=asked.prompt_cache_key,
            reasoning=ResponseReasoning(asked.effort),
            safety_identifier=asked.safety_identifier,
            store=self.kept,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            text=text,
            tool_choice="auto" if asked.tool_choice is None else asked.tool_choice,
            tools=[{**_TOOL_DEFAULTS, **tool} for tool in asked.tools or ()],
            top_logprobs=asked.top_logprobs or 0,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            user=asked.user,
        )


def usage_of(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
        usage.total_tokens,
    )
