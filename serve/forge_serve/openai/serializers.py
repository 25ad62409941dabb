"""Serializers, which encode deltas as the response bodies and server-sent events of each endpoint.

Every body and event is a struct of `response_types`. A plain event carries only text and is neither
the first nor the last of its choice. Most events are plain, so the serializer encodes one as a
template and inserts the text of the others. This takes a tenth of the time.
"""

from __future__ import annotations

import binascii
import codecs
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from forge_jax.schedule.activations import Activations, joined
from forge_jax.schedule.plan import TokenLogprobs
from forge_jax.text import Detokenizer
from forge_serve.errors import ErrorReply
from forge_serve.generation.generation import Usage
from forge_serve.generation.prompts import Prompt
from forge_serve.openai.chat_output import ChatOutput
from forge_serve.openai.requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    GenerationRequest,
)
from forge_serve.openai.response_types import (
    ActivationArray,
    AlternativeLogprob,
    AnswerMessage,
    AnswerToolCall,
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatDelta,
    ChatEvent,
    ChatEventChoice,
    ChatLogprobs,
    CompletionAnswer,
    CompletionChoice,
    CompletionEvent,
    CompletionEventChoice,
    CompletionLogprobs,
    FunctionPiece,
    GenerateAnswer,
    GenerateEvent,
    PromptLogprob,
    PromptLogprobs,
    ReturnedActivations,
    TokenLogprob,
    ToolCallPiece,
)
from forge_serve.openapi.payload import Payload
from forge_serve.parsers.answer import AnswerParser
from forge_serve.parsers.parts import CallPiece, Parts
from forge_serve.parsers.reasoning import TokenCounter

if TYPE_CHECKING:
    from forge_jax.schedule.outputs import Delta
    from forge_jax.text import Tokenizer

DONE = b"data: [DONE]\n\n"
_TEXT = "\0"  # the place of the text in the template of a plain event
LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity

_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Prompt:
    """A prompt and its logprobs, which arrive with the deltas of its first choice."""

    prompt: Prompt
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    held: list[tuple[int, Delta]] = field(default_factory=list)  # until the logprobs are complete

    @property
    def scored(self) -> bool:
        """True if all logprobs have arrived. The first token has none."""
        return len(self.logprobs) >= len(self.prompt.token_ids) - 1


@dataclass(slots=True)
class _Choice:
    """The state of one choice."""

    index: int
    of: _Prompt
    text: list[str] = field(default_factory=list)
    num_told: int = 0  # tokens in events so far, except plain ones
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    activations: list[Activations] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    offsets: TextOffsets | None = None
    parser: AnswerParser | None = None  # None: all further text is content
    parts: Parts = field(default_factory=Parts)  # the whole answer, if there is a parser
    started: bool = False
    plain_head: bytes = b""  # a plain event up to its text; empty: no event may be plain yet

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.of.logprobs += delta.prompt_logprobs or ()
        if delta.activations is not None:
            self.activations.append(delta.activations)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class ResponseSerializer:
    """The encoder of one request's response. Call `events` if it streams, otherwise `body`."""

    id_prefix: ClassVar[str]  # including the separator

    def __init__(
        self,
        request: GenerationRequest,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer | None,
        *,
        unique_id: str,
        model: str,
        created_s: int,
        system_fingerprint: str | None = None,
    ):
        self.tokens = TokenNames(
            tokenizer,
            skip_special=request.skip_special_tokens is not False,
            as_ids=bool(request.return_tokens_as_token_ids),
        )
        self.prompt_logprobs = request.prompt_logprobs
        # A model without a tokenizer can only respond with token ids.
        self.with_token_ids = bool(request.return_token_ids) or tokenizer is None
        self.streams = request.streams
        self.include_usage = request.stream_usage
        self.usage_always = request.stream_usage_always
        self.id = self.id_prefix + unique_id
        self.created_s, self.model = created_s, model
        self._common = {
            "id": self.id,
            "created": created_s,
            "model": model,
            "system_fingerprint": system_fingerprint,
        }
        self.reasoning_tokens: list[TokenCounter] = []  # one per choice, or empty
        self._num_told = 0  # the sum over all choices
        n = request.num_samples
        states = [_Prompt(prompt) for prompt in prompts]
        self._choices = [_Choice(i, states[i // n]) for i in range(len(prompts) * n)]
        self._only_text = not self.with_token_ids and request.return_activations is None
        self._plain_tail = b""

    def events(self, choice: int, delta: Delta, usage: Usage | None = None) -> bytes:
        """Return the events of one delta, which may be none."""
        state = self._choices[choice]
        if state.plain_head and usage is None and delta.text and delta.finish_reason is None:
            return state.plain_head + _json(delta.text) + self._plain_tail
        return self._full_events(choice, delta, usage)

    def _full_events(self, choice: int, delta: Delta, usage: Usage | None) -> bytes:
        state = self._choices[choice]
        first, state.started = not state.started, True
        begun = self._usage_so_far(usage)
        state.num_told += len(delta.token_ids)
        self._num_told += len(delta.token_ids)
        if self._only_text and not state.plain_head and state.parser is None:
            state.plain_head, self._plain_tail = self._plain_template(state)
        events = b""
        if first and (opening := self._opening(state)) is not None:
            events = self._event([opening], begun)
        chunk = self._chunk(state, delta, first)
        if chunk is not None:
            events += self._event([chunk], self._usage_so_far(usage))
        return events

    def _plain_template(self, state: _Choice) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text of a plain event."""
        event = self._event([self._plain_chunk(state, _TEXT)], self._usage_so_far(None))
        head, _, tail = event.rpartition(_json(_TEXT))
        return head, tail

    def _usage_so_far(self, usage: Usage | None) -> Usage | UnsetType | None:
        """Return the usage for an event: the tokens of all events up to this one."""
        if usage is None:
            return None if self.include_usage else UNSET
        counters = zip(self.reasoning_tokens, self._choices, strict=False)
        reasoning = sum(min(counter.number, state.num_told) for counter, state in counters)
        details = usage.completion_tokens_details
        return msgspec.structs.replace(
            usage,
            completion_tokens=self._num_told,
            total_tokens=usage.prompt_tokens + self._num_told,
            completion_tokens_details=msgspec.structs.replace(details, reasoning_tokens=reasoning),
        )

    def beginning(self) -> bytes:
        """Return the events that precede the first delta."""
        return b""

    def end(self, usage: Usage) -> bytes:
        """Return the last events of a successful stream."""
        if not self.include_usage:
            return DONE
        return self._event([], usage) + DONE

    def error_event(self, reply: ErrorReply) -> bytes:
        """Return the event for a failure in the middle of a stream."""
        return b"data: " + reply.body() + b"\n\n"

    def add(self, choice: int, delta: Delta) -> None:
        """Store a delta for `body`."""
        self._choices[choice].add(delta)

    def body(self, usage: Usage) -> bytes:
        """Return the whole response, after every delta has been added."""
        raise NotImplementedError

    def _event(self, choices: list[Any], usage: Usage | UnsetType | None) -> bytes:
        raise NotImplementedError

    def _opening(self, state: _Choice) -> Payload | None:
        """Return the choice of the event before the first token, if there is one."""
        return None

    def _chunk(self, state: _Choice, delta: Delta, first: bool) -> Payload | None:
        """Return the choice of a delta's event; None if there is nothing to send yet."""
        raise NotImplementedError

    def _plain_chunk(self, state: _Choice, text: str) -> Payload:
        raise NotImplementedError

    def _stops(
        self, finish_reason: str | None, stop_reason: int | str | None, token_ids: Sequence[int]
    ) -> dict[str, Any]:
        """Return what ended a choice: vLLM's `stop_reason` and SGLang's `matched_stop`.

        After an EOS token, `stop_reason` is null and `matched_stop` is the token's id.
        """
        matched = stop_reason
        if matched is None and finish_reason == "stop" and token_ids:
            matched = token_ids[-1] if self.tokens.is_special(token_ids[-1]) else None
        return {"stop_reason": stop_reason, "matched_stop": matched}

    def _prompt_logprobs(self, prompt: _Prompt) -> PromptLogprobs | None:
        """Return the prompt's logprobs in vLLM's format. The first token has none."""
        count = self.prompt_logprobs
        if count is None:
            return None
        return [None, *(self.tokens.scores(entry, count) for entry in prompt.logprobs)]

    def _ending(self, delta: Delta) -> dict[str, Any]:
        """Return the fields of a choice's last event; empty for any other."""
        if delta.finish_reason is None:
            return {}
        stops = self._stops(delta.finish_reason, delta.stop_reason, delta.token_ids)
        return {"finish_reason": delta.finish_reason, **stops}

    def _shows(self, delta: Delta) -> bool:
        """Return True if the delta needs an event even without text."""
        shows_ids = self.with_token_ids and len(delta.token_ids) > 0
        return delta.finish_reason is not None or delta.activations is not None or shows_ids


class CompletionSerializer(ResponseSerializer):
    """Serializer of `text_completion` objects."""

    id_prefix = "cmpl-"

    def __init__(self, request: CompletionRequest, *args: Any, **kwargs: Any):
        super().__init__(request, *args, **kwargs)
        self.echo = bool(request.echo)
        self.with_logprobs = request.logprobs is not None
        self.num_top = request.logprobs or 0
        self._only_text &= not self.with_logprobs
        for state in self._choices:
            state.offsets = TextOffsets(self.tokens)

    def _full_events(self, choice: int, delta: Delta, usage: Usage | None) -> bytes:
        if not (self.echo and self.with_logprobs):
            return super()._full_events(choice, delta, usage)
        # The whole prompt is sent first, so its choices wait for its last logprob.
        prompt = self._choices[choice].of
        prompt.logprobs += delta.prompt_logprobs or ()
        prompt.held.append((choice, delta))
        if not prompt.scored:
            return b""
        held, prompt.held = prompt.held, []
        events = super()._full_events
        return b"".join([events(index, waiting, usage) for index, waiting in held])

    def body(self, usage: Usage) -> bytes:
        choices = [self._choice(state) for state in self._choices]
        return _json(CompletionAnswer(**self._common, choices=choices, usage=usage))

    def _event(self, choices: list[Any], usage: Usage | UnsetType | None) -> bytes:
        event = CompletionEvent(**self._common, choices=choices, usage=usage)
        return b"data: " + _json(event) + b"\n\n"

    def _chunk(self, state: _Choice, delta: Delta, first: bool) -> Payload | None:
        text = delta.text
        logprobs = self._logprobs(state, delta.logprobs or (), first)
        if first and self.echo:
            text = self._prompt_text(state) + text
        if not (text or self._shows(delta) or (logprobs and logprobs.tokens)):
            return None
        chunk = CompletionEventChoice(
            index=state.index, text=text, logprobs=logprobs, **self._ending(delta)
        )
        if delta.activations is not None:
            chunk.activations = _encoded(delta.activations)
        if self.with_token_ids:
            chunk.token_ids = delta.token_ids
            if first:
                chunk.prompt_token_ids = state.of.prompt.token_ids
        return chunk

    def _plain_chunk(self, state: _Choice, text: str) -> Payload:
        return CompletionEventChoice(index=state.index, text=text)

    def _choice(self, state: _Choice) -> CompletionChoice:
        prompt_text = self._prompt_text(state) if self.echo else ""
        return CompletionChoice(
            index=state.index,
            text=prompt_text + "".join(state.text),
            logprobs=self._logprobs(state, state.logprobs, True),
            finish_reason=state.finish_reason,  # type: ignore[arg-type]
            **self._stops(state.finish_reason, state.stop_reason, state.token_ids),
            prompt_logprobs=self._prompt_logprobs(state.of),
            prompt_token_ids=state.of.prompt.token_ids if self.with_token_ids else None,
            token_ids=state.token_ids if self.with_token_ids else None,
            activations=_encoded(joined(state.activations)) if state.activations else UNSET,
        )

    def _prompt_text(self, state: _Choice) -> str:
        if state.of.prompt.text is not None:
            return state.of.prompt.text
        return self.tokens.begun_text(state.of.prompt.token_ids)

    def _logprobs(
        self, state: _Choice, logprobs: Sequence[TokenLogprobs], first: bool
    ) -> CompletionLogprobs | None:
        if not self.with_logprobs:
            return None
        out = CompletionLogprobs()
        assert state.offsets is not None
        entries = logprobs
        if first and self.echo:  # the first token of the prompt has no logprob
            prompt = state.of.prompt
            out.tokens.append(self.tokens.name(prompt.token_ids[0]))
            out.token_logprobs.append(None)
            out.top_logprobs.append(None)
            out.text_offset += state.offsets.prompt(
                prompt.token_ids, self._prompt_text(state), spelled_out=prompt.text is not None
            )
            entries = [*state.of.logprobs, *logprobs]
        for entry in entries:
            name = self.tokens.name(entry.token_id)
            top: dict[str, float] = {}
            # Tokens that are parts of characters may share a name: keep the most likely one.
            for token_id, logprob in entry.top[: self.num_top]:  # prompt_logprobs may be larger
                top.setdefault(self.tokens.name(token_id), _finite(logprob))
            top.setdefault(name, _finite(entry.logprob))
            out.tokens.append(name)
            out.token_logprobs.append(_finite(entry.logprob))
            out.top_logprobs.append(top)
        out.text_offset += [state.offsets.push(entry.token_id) for entry in logprobs]
        return out


class ChatSerializer(ResponseSerializer):
    """Serializer of `chat.completion` objects."""

    id_prefix = "chatcmpl-"

    def __init__(
        self,
        request: ChatRequest,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer | None,
        *,
        answers: ChatOutput | None = None,
        **kwargs: Any,
    ):
        super().__init__(request, prompts, tokenizer, **kwargs)
        self.with_logprobs = bool(request.logprobs)
        self.with_reasoning = request.include_reasoning is not False
        if answers is not None:
            for state in self._choices:
                state.parser = answers.parser(prompts[0], tokenizer)
                counter = answers.reasoning_tokens(prompts[0], tokenizer)
                if counter is not None:
                    self.reasoning_tokens.append(counter)
        self._only_text &= not self.with_logprobs
        self._with_prompt_ids = self.with_token_ids  # True until the first event

    def body(self, usage: Usage) -> bytes:
        prompt = self._choices[0].of
        answer = ChatAnswer(
            **self._common,
            prompt_logprobs=self._prompt_logprobs(prompt),
            prompt_token_ids=prompt.prompt.token_ids if self.with_token_ids else None,
            choices=[self._choice(state) for state in self._choices],
            usage=usage,
        )
        return _json(answer)

    def _event(self, choices: list[Any], usage: Usage | UnsetType | None) -> bytes:
        event = ChatEvent(**self._common, choices=choices, usage=usage)
        if self._with_prompt_ids:
            event.prompt_token_ids = self._choices[0].of.prompt.token_ids
            self._with_prompt_ids = False
        return b"data: " + _json(event) + b"\n\n"

    def _opening(self, state: _Choice) -> Payload:
        return ChatEventChoice(state.index, ChatDelta(role="assistant", content=""))

    def _chunk(self, state: _Choice, delta: Delta, first: bool) -> Payload | None:
        logprobs = self._logprobs(delta.logprobs or ())
        ending = self._ending(delta)
        if state.parser is None:
            updates: dict[str, Any] = {"content": delta.text} if delta.text else {}
        else:
            parts = self._read(state, delta)
            updates = self._texts(parts)
            if parts.calls:
                updates["tool_calls"] = [_call_piece(piece) for piece in parts.calls]
            if delta.finish_reason == "stop" and state.parser.called:
                ending["finish_reason"] = "tool_calls"
            if state.parser.over:
                state.parser = None
        if not (updates or self._shows(delta) or (logprobs and logprobs.content)):
            return None
        chunk = ChatEventChoice(state.index, ChatDelta(**updates), logprobs, **ending)
        if delta.activations is not None:
            chunk.activations = _encoded(delta.activations)
        if self.with_token_ids:
            chunk.token_ids = delta.token_ids
        return chunk

    def _plain_chunk(self, state: _Choice, text: str) -> Payload:
        return ChatEventChoice(state.index, ChatDelta(content=text))

    def add(self, choice: int, delta: Delta) -> None:
        super().add(choice, delta)
        state = self._choices[choice]
        if state.parser is not None:
            state.parts.add(self._read(state, delta))

    def _read(self, state: _Choice, delta: Delta) -> Parts:
        """Return the parts that a delta adds."""
        if state.parser is None:
            return Parts(content=[delta.text] if delta.text else [])
        return state.parser.read(delta.text, last=delta.finish_reason is not None)

    def _all_parts(self, state: _Choice) -> Parts:
        return state.parts if state.parser is not None else Parts(content=state.text)

    def _texts(self, parts: Parts) -> dict[str, Any]:
        """Return the text fields of a message or delta, without empty ones."""
        texts: dict[str, Any] = {}
        reasoning, content = "".join(parts.reasoning), "".join(parts.content)
        if reasoning and self.with_reasoning:
            texts["reasoning"] = texts["reasoning_content"] = reasoning
        if content:
            texts["content"] = content
        return texts

    def _choice(self, state: _Choice) -> ChatChoice:
        finish_reason: Any = state.finish_reason
        if state.parser is None:
            message = AnswerMessage(content="".join(state.text))
        else:
            message = AnswerMessage(**self._texts(state.parts))
            if state.parts.calls:
                message.tool_calls = [_call(piece) for piece in state.parts.calls]
            elif message == AnswerMessage():
                message.content = ""
            if finish_reason == "stop" and state.parser.called:
                finish_reason = "tool_calls"
        return ChatChoice(
            index=state.index,
            message=message,
            logprobs=self._logprobs(state.logprobs),
            finish_reason=finish_reason,
            **self._stops(state.finish_reason, state.stop_reason, state.token_ids),
            token_ids=state.token_ids if self.with_token_ids else None,
            activations=_encoded(joined(state.activations)) if state.activations else UNSET,
        )

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self.with_logprobs:
            return None
        return ChatLogprobs([self._token_logprob(entry) for entry in logprobs])

    def _token_logprob(self, entry: TokenLogprobs) -> TokenLogprob:
        own = self._alternative(entry.token_id, entry.logprob)
        top = [self._alternative(*alternative) for alternative in entry.top]
        return TokenLogprob(own.token, own.logprob, own.bytes, top)

    def _alternative(self, token_id: int, logprob: float) -> AlternativeLogprob:
        return AlternativeLogprob(
            self.tokens.name(token_id), _finite(logprob), list(self.tokens.raw(token_id))
        )


class GenerateSerializer(ResponseSerializer):
    """Serializer of /generate's objects: the text and its finish reason."""

    id_prefix = "gen-"

    def __init__(self, request: GenerateRequest, *args: Any, **kwargs: Any):
        super().__init__(request, *args, **kwargs)
        self.usage_always = False  # this endpoint's events have no usage
        self._request_id: str = kwargs["unique_id"]
        self._begin_s = time.monotonic()

    def end(self, usage: Usage) -> bytes:
        return DONE

    def body(self, usage: Usage) -> bytes:
        state = self._choices[0]
        answer = GenerateAnswer(
            text="".join(state.text),
            finish_reason=state.finish_reason,  # type: ignore[arg-type]
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            generated_tokens=usage.completion_tokens,
            request_id=self._request_id,
            model=self.model,
            latency_ms=round(1e3 * (time.monotonic() - self._begin_s), 3),
        )
        if self.with_token_ids:
            answer.token_ids = state.token_ids
        return _json(answer)

    def _event(self, choices: list[Any], usage: Usage | UnsetType | None) -> bytes:
        [event] = choices
        return b"data: " + _json(event) + b"\n\n"

    def _chunk(self, state: _Choice, delta: Delta, first: bool) -> Payload | None:
        if not (delta.text or self._shows(delta)):
            return None
        event = GenerateEvent(delta.text, delta.finish_reason)  # type: ignore[arg-type]
        if self.with_token_ids:
            event.token_ids = delta.token_ids
        return event

    def _plain_chunk(self, state: _Choice, text: str) -> Payload:
        return GenerateEvent(text)


def _encoded(activations: Activations) -> ReturnedActivations:
    return ReturnedActivations(
        activations.start,
        {
            name: ActivationArray(
                array.dtype.name,
                array.shape,
                binascii.b2a_base64(array.tobytes(), newline=False).decode(),
            )
            for name, array in activations.arrays.items()
        },
    )


class TokenNames:
    """Tokens as strings and bytes, with or without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special: bool, as_ids: bool = False):
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None
        self._hidden = tokenizer.special_ids if tokenizer and skip_special else frozenset()
        self._skip_special = skip_special

    def name(self, token_id: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def is_special(self, token_id: int) -> bool:
        return self._tokenizer is None or token_id in self._tokenizer.special_ids

    def scores(self, entry: TokenLogprobs, count: int) -> dict[str, PromptLogprob]:
        """Return, by token id, the logprobs of the entry's token and the `count` most likely ones.

        The format is vLLM's.
        """
        own = (entry.token_id, entry.logprob, entry.rank)
        likeliest = ((id, score, rank) for rank, (id, score) in enumerate(entry.top[:count], 1))
        return {
            str(token_id): PromptLogprob(_finite(logprob), rank, self._decoded(token_id))
            for token_id, logprob, rank in (own, *likeliest)
        }

    def _decoded(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def raw(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def shown(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to the text that the client receives."""
        return b"" if token_id in self._hidden else self.raw(token_id)

    def begun_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of the tokens without an incomplete character at the end.

        The next text completes that character.
        """
        if self._tokenizer is None:
            return ""
        return Detokenizer(self._tokenizer, (), self._skip_special).push(token_ids)


class TextOffsets:
    """Offsets of the tokens in the text, in characters."""

    def __init__(self, tokens: TokenNames):
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], text: str, *, spelled_out: bool) -> list[int]:
        """Return the offsets of a prompt's tokens in its text. Tokens pushed later follow the text.

        The tokens may decode to more than `text`, because tokenizers add a BOS token or a space
        before it.

        Args:
          spelled_out: True if `text` contains its special tokens, because the client wrote them.
        """
        pieces = [self._tokens.raw(i) if spelled_out else self._tokens.shown(i) for i in token_ids]
        # -1 if the tokenizer normalizes the text, so that the tokens decode to another one.
        before = b"".join(pieces).decode("utf-8", "replace").rfind(text)
        self._offset = -max(before, 0)
        offsets = []
        for piece in pieces:
            offsets.append(min(max(self._offset, 0), len(text)))
            self._offset += len(self._decoder.decode(piece))
        self._offset = len(text)
        return offsets

    def push(self, token_id: int) -> int:
        """Return the offset of the next token."""
        begin = self._offset
        self._offset += len(self._decoder.decode(self._tokens.shown(token_id)))
        return begin


def _call_piece(piece: CallPiece) -> ToolCallPiece:
    function = FunctionPiece(arguments="".join(piece.arguments))
    if piece.id is None:
        return ToolCallPiece(index=piece.index, function=function)
    function.name = piece.name or ""
    return ToolCallPiece(index=piece.index, id=piece.id, type="function", function=function)


def _call(piece: CallPiece) -> AnswerToolCall:
    function = CalledFunction(piece.name or "", "".join(piece.arguments))
    return AnswerToolCall(id=piece.id or "", function=function)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
