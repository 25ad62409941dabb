"""What clients get back: whole bodies and server-sent events, in each endpoint's form.

Everything of an event that stays the same for a request is serialised once. Of a plain event (not
the first or last of its choice, nothing but text asked for) only the text is escaped.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

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
from forge_serve.parsers.answer import AnswerParser
from forge_serve.parsers.parts import CallPiece, Parts
from forge_serve.parsers.reasoning import ReasoningTokens

if TYPE_CHECKING:
    from forge_jax.schedule.outputs import Delta
    from forge_jax.text import Tokenizer

DONE = b"data: [DONE]\n\n"
_CHOICES = b',"choices":['
_NOTHING_MORE = b',"logprobs":null,"finish_reason":null}'
LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity

_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Prompt:
    """A prompt and its logprobs, which come with the deltas of its first choice."""

    prompt: Prompt
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    held: list[tuple[int, Delta]] = field(default_factory=list)  # until they are complete

    @property
    def scored(self) -> bool:
        """Whether every token but the first, which has none, has its logprobs."""
        return len(self.logprobs) >= len(self.prompt.token_ids) - 1


@dataclass(slots=True)
class _Choice:
    """What has been seen of one choice so far."""

    index: int
    of: _Prompt
    text: list[str] = field(default_factory=list)
    num_told: int = 0  # tokens that events have told of, unless they are plain
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    offsets: TextOffsets | None = None
    parser: AnswerParser | None = None  # None: what is to come is content
    parts: Parts = field(default_factory=Parts)  # of the whole answer, if there is a parser
    started: bool = False
    plain_head: bytes = b""  # of a plain event, up to its text; empty: none may be plain

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.of.logprobs += delta.prompt_logprobs or ()
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class ResponseSerializer:
    """One request's answer in the form of its endpoint; `events` while it streams, else `body`."""

    id_prefix: ClassVar[str]  # with what separates it from the rest
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    _plain_ending: ClassVar[bytes]  # of a plain event's choice, after its text

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
        # Without a tokenizer the ids are all that there is to answer with.
        self.with_token_ids = bool(request.return_token_ids) or tokenizer is None
        self.streams = request.streams
        self.include_usage = request.stream_usage
        self.usage_always = request.stream_usage_always
        self.id = self.id_prefix + unique_id
        self._common = {
            "id": self.id,
            "object": self.whole_object,
            "created": created_s,
            "model": model,
            "system_fingerprint": system_fingerprint,
        }
        self.reasoning_tokens: list[ReasoningTokens] = []  # of each choice, if any is looked for
        self._num_told = 0  # of all choices
        n = request.num_samples
        states = [_Prompt(prompt) for prompt in prompts]
        self._choices = [_Choice(i, states[i // n]) for i in range(len(prompts) * n)]
        chunk = _json({**self._common, "object": self.chunk_object})
        self._head = b"data: " + chunk[:-1] + _CHOICES
        self._tail = b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"
        self._only_text = not self.with_token_ids
        self._plain_tail = self._plain_ending + self._tail

    def events(self, choice: int, delta: Delta, usage: Usage | None = None) -> bytes:
        """The events of one delta: none if it has nothing to show yet."""
        state = self._choices[choice]
        if state.plain_head and usage is None and delta.text and delta.finish_reason is None:
            return state.plain_head + _json(delta.text) + self._plain_tail
        return self._full_events(choice, delta, usage)

    def _full_events(self, choice: int, delta: Delta, usage: Usage | None) -> bytes:
        state = self._choices[choice]
        first, state.started = not state.started, True
        begun = self._usage_tail(usage)
        state.num_told += len(delta.token_ids)
        self._num_told += len(delta.token_ids)
        if self._only_text and not state.plain_head and state.parser is None:
            state.plain_head = self._head + self._plain_start(state.index)
        opening = self._opening(state) if first else b""
        tail = self._usage_tail(usage)
        chunks = [(choice, tail) for choice in self._chunk_choices(state, delta, first)]
        if opening:
            chunks.insert(0, (opening, begun))
        return b"".join(part for choice, tail in chunks for part in (self._head, choice, tail))

    def _usage_tail(self, usage: Usage | None) -> bytes:
        """The end of an event: with the tokens that events have told of, up to this one."""
        if usage is None:
            return self._tail
        counters = zip(self.reasoning_tokens, self._choices, strict=False)
        reasoning = sum(min(counter.number, state.num_told) for counter, state in counters)
        details = {**usage.completion_tokens_details, "reasoning_tokens": reasoning}
        so_far = msgspec.structs.replace(
            usage,
            completion_tokens=self._num_told,
            total_tokens=usage.prompt_tokens + self._num_told,
            completion_tokens_details=details,
        )
        return b'],"usage":' + _json(so_far) + b"}\n\n"

    def beginning(self) -> bytes:
        """The events before any news."""
        return b""

    def end(self, usage: Usage) -> bytes:
        """The last events of a stream that went well."""
        if not self.include_usage:
            return DONE
        return self._head + b'],"usage":' + _json(usage) + b"}\n\n" + DONE

    def error_event(self, reply: ErrorReply) -> bytes:
        """The event of a failure in the middle of a stream."""
        return b"data: " + reply.body() + b"\n\n"

    def add(self, choice: int, delta: Delta) -> None:
        """Keeps a delta for `body`."""
        self._choices[choice].add(delta)

    def body(self, usage: Usage) -> bytes:
        """The whole answer, after every delta has been added."""
        choices = [self._whole_choice(state) for state in self._choices]
        return _json({**self._common, **self._whole_extra(), "choices": choices, "usage": usage})

    def _opening(self, state: _Choice) -> bytes:
        """What comes before the first token of a choice; empty: nothing."""
        return b""

    def _chunk_choices(self, state: _Choice, delta: Delta, first: bool) -> Iterable[bytes]:
        raise NotImplementedError

    def _plain_start(self, index: int) -> bytes:
        """The beginning of a plain event's choice, up to its text."""
        raise NotImplementedError

    def _whole_choice(self, state: _Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _whole_extra(self) -> dict[str, Any]:
        return {}

    def _stops(
        self, finish_reason: str | None, stop_reason: int | str | None, token_ids: Sequence[int]
    ) -> dict[str, int | str | None]:
        """What ended a choice: vLLM's `stop_reason`, and SGLang's `matched_stop`.

        The end token, for which the first is null, is the second.
        """
        matched = stop_reason
        if matched is None and finish_reason == "stop" and token_ids:
            matched = token_ids[-1] if self.tokens.is_special(token_ids[-1]) else None
        return {"stop_reason": stop_reason, "matched_stop": matched}

    def _prompt_logprobs(self, prompt: _Prompt) -> list[dict[str, Any] | None] | None:
        """In vLLM's form: for each token of the prompt, by id; nothing comes before the first."""
        count = self.prompt_logprobs
        if count is None:
            return None
        return [None, *(self.tokens.scores(entry, count) for entry in prompt.logprobs)]

    def _ending(self, logprobs: Any, delta: Delta, more: dict[str, Any]) -> bytes:
        """The rest of a chunk's choice, after its text."""
        if logprobs is None and delta.finish_reason is None and not more:
            return _NOTHING_MORE
        ending = {"logprobs": logprobs, "finish_reason": delta.finish_reason, **more}
        if delta.finish_reason is not None:
            ending |= self._stops(delta.finish_reason, delta.stop_reason, delta.token_ids)
        return b"," + _json(ending)[1:]


class CompletionSerializer(ResponseSerializer):
    """`text_completion` objects."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    _plain_ending = _NOTHING_MORE

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
        # The prompt goes out first and whole, so its choices wait for its last logprob.
        prompt = self._choices[choice].of
        prompt.logprobs += delta.prompt_logprobs or ()
        prompt.held.append((choice, delta))
        if not prompt.scored:
            return b""
        held, prompt.held = prompt.held, []
        events = super()._full_events
        return b"".join([events(index, waiting, usage) for index, waiting in held])

    def _chunk_choices(self, state: _Choice, delta: Delta, first: bool) -> Iterable[bytes]:
        text, more = delta.text, {}
        logprobs = self._logprobs(state, delta.logprobs or (), first)
        if first and self.echo:
            text = self._prompt_text(state) + text
        if self.with_token_ids:
            more["token_ids"] = delta.token_ids
            if first:
                more["prompt_token_ids"] = state.of.prompt.token_ids
        shown = text or delta.finish_reason or (self.with_token_ids and delta.token_ids)
        if shown or (logprobs and logprobs["tokens"]):
            head = b'{"index":%d,"text":%b' % (state.index, _json(text))
            yield head + self._ending(logprobs, delta, more)

    def _plain_start(self, index: int) -> bytes:
        return b'{"index":%d,"text":' % index

    def _whole_choice(self, state: _Choice) -> dict[str, Any]:
        prompt_text = self._prompt_text(state) if self.echo else ""
        choice = {
            "index": state.index,
            "text": prompt_text + "".join(state.text),
            "logprobs": self._logprobs(state, state.logprobs, True),
            "finish_reason": state.finish_reason,
            **self._stops(state.finish_reason, state.stop_reason, state.token_ids),
            "prompt_logprobs": self._prompt_logprobs(state.of),
            "prompt_token_ids": state.of.prompt.token_ids if self.with_token_ids else None,
            "token_ids": state.token_ids if self.with_token_ids else None,
        }
        return choice

    def _prompt_text(self, state: _Choice) -> str:
        if state.of.prompt.text is not None:
            return state.of.prompt.text
        return self.tokens.begun_text(state.of.prompt.token_ids)

    def _logprobs(
        self,
        state: _Choice,
        logprobs: Sequence[TokenLogprobs],
        first: bool,
    ) -> dict[str, list[Any]] | None:
        if not self.with_logprobs:
            return None
        out: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        assert state.offsets is not None
        entries = logprobs
        if first and self.echo:  # nothing comes before the first token of the prompt
            prompt = state.of.prompt
            out["tokens"].append(self.tokens.name(prompt.token_ids[0]))
            out["token_logprobs"].append(None)
            out["top_logprobs"].append(None)
            out["text_offset"] += state.offsets.prompt(
                prompt.token_ids, self._prompt_text(state), spelled_out=prompt.text is not None
            )
            entries = [*state.of.logprobs, *logprobs]
        for entry in entries:
            name = self.tokens.name(entry.token_id)
            top: dict[str, float] = {}
            # Different tokens may have the same name (parts of characters): the likeliest stays.
            for token_id, logprob in entry.top[: self.num_top]:  # the prompt's may have more
                top.setdefault(self.tokens.name(token_id), _finite(logprob))
            top.setdefault(name, _finite(entry.logprob))
            out["tokens"].append(name)
            out["token_logprobs"].append(_finite(entry.logprob))
            out["top_logprobs"].append(top)
        out["text_offset"] += [state.offsets.push(entry.token_id) for entry in logprobs]
        return out


class ChatSerializer(ResponseSerializer):
    """`chat.completion` objects."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    _plain_ending = b"}" + _NOTHING_MORE

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
        # Goes out with the first chunk; null fields are in whole answers alone.
        self._extra = {k: v for k, v in self._whole_extra().items() if v is not None}

    def _full_events(self, choice: int, delta: Delta, usage: Usage | None) -> bytes:
        events = super()._full_events(choice, delta, usage)
        if not self._extra:
            return events
        extra, self._extra = self._extra, {}
        first_head = self._head.removesuffix(_CHOICES) + b"," + _json(extra)[1:-1] + _CHOICES
        return first_head + events.removeprefix(self._head)

    def _opening(self, state: _Choice) -> bytes:
        start = b'{"index":%d,"delta":{"role":"assistant","content":""}' % state.index
        return start + _NOTHING_MORE

    def _chunk_choices(self, state: _Choice, delta: Delta, first: bool) -> Iterable[bytes]:
        more: dict[str, Any] = {"token_ids": delta.token_ids} if self.with_token_ids else {}
        logprobs = self._logprobs(delta.logprobs or ())
        if state.parser is None:
            updates = {"content": delta.text} if delta.text else {}
        else:
            updates = self._updates(self._read(state, delta))
            if delta.finish_reason == "stop" and state.parser.called:
                more["finish_reason"] = "tool_calls"
            if state.parser.over:
                state.parser = None
        shown = updates or delta.finish_reason or (self.with_token_ids and delta.token_ids)
        if shown or (logprobs and logprobs["content"]):
            head = b'{"index":%d,"delta":%b' % (state.index, _json(updates))
            yield head + self._ending(logprobs, delta, more)

    def add(self, choice: int, delta: Delta) -> None:
        super().add(choice, delta)
        state = self._choices[choice]
        if state.parser is not None:
            state.parts.add(self._read(state, delta))

    def _read(self, state: _Choice, delta: Delta) -> Parts:
        """What a delta brings."""
        if state.parser is None:
            return Parts(content=[delta.text] if delta.text else [])
        return state.parser.read(delta.text, last=delta.finish_reason is not None)

    def _all_parts(self, state: _Choice) -> Parts:
        """What the added deltas have brought."""
        return state.parts if state.parser is not None else Parts(content=state.text)

    def _updates(self, parts: Parts) -> dict[str, Any]:
        """What a message, or a piece of one, has beside its role."""
        updates: dict[str, Any] = {}
        reasoning, content = "".join(parts.reasoning), "".join(parts.content)
        if reasoning and self.with_reasoning:
            updates["reasoning"] = updates["reasoning_content"] = reasoning
        if content:
            updates["content"] = content
        if parts.calls:
            updates["tool_calls"] = [_call_json(piece) for piece in parts.calls]
        return updates

    def _plain_start(self, index: int) -> bytes:
        return b'{"index":%d,"delta":{"content":' % index

    def _whole_choice(self, state: _Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        finish_reason = state.finish_reason
        if state.parser is None:
            message["content"] = "".join(state.text)
        else:
            message |= self._updates(state.parts) or {"content": ""}
            for call in message.get("tool_calls", ()):
                del call["index"]
            if finish_reason == "stop" and state.parser.called:
                finish_reason = "tool_calls"
        choice = {
            "index": state.index,
            "message": message,
            "logprobs": self._logprobs(state.logprobs),
            "finish_reason": finish_reason,
            **self._stops(state.finish_reason, state.stop_reason, state.token_ids),
            "token_ids": state.token_ids if self.with_token_ids else None,
        }
        return choice

    def _whole_extra(self) -> dict[str, Any]:
        prompt = self._choices[0].of
        return {
            "prompt_logprobs": self._prompt_logprobs(prompt),
            "prompt_token_ids": prompt.prompt.token_ids if self.with_token_ids else None,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(*alternative) for alternative in entry.top],
            }
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.tokens.name(token_id),
            "logprob": _finite(logprob),
            "bytes": list(self.tokens.raw(token_id)),
        }


class GenerateSerializer(ResponseSerializer):
    """A bare object for /generate: the text and why it ended."""

    id_prefix = "gen-"
    whole_object = "text"
    chunk_object = "text"
    _plain_ending = b',"finish_reason":null}'

    def __init__(self, request: GenerateRequest, *args: Any, **kwargs: Any):
        super().__init__(request, *args, **kwargs)
        self.usage_always = False  # no event has the usage here
        self._head, self._tail = b"data: ", b"\n\n"
        self._plain_tail = self._plain_ending + self._tail
        self._request_id: str = kwargs["unique_id"]
        self._begin_s = time.monotonic()

    def end(self, usage: Usage) -> bytes:
        return DONE

    def body(self, usage: Usage) -> bytes:
        state = self._choices[0]
        answer = {
            "text": "".join(state.text),
            "finish_reason": state.finish_reason,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "generated_tokens": usage.completion_tokens,
            "request_id": self._request_id,
            "model": self._common["model"],
            "latency_ms": round(1e3 * (time.monotonic() - self._begin_s), 3),
        }
        if self.with_token_ids:
            answer["token_ids"] = state.token_ids
        return _json(answer)

    def _chunk_choices(self, state: _Choice, delta: Delta, first: bool) -> Iterable[bytes]:
        event: dict[str, Any] = {"text": delta.text, "finish_reason": delta.finish_reason}
        if self.with_token_ids:
            event["token_ids"] = delta.token_ids
        if delta.text or delta.finish_reason or (self.with_token_ids and delta.token_ids):
            yield _json(event)

    def _plain_start(self, index: int) -> bytes:
        return b'{"text":'


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

    def scores(self, entry: TokenLogprobs, count: int) -> dict[str, Any]:
        """By id, in vLLM's form, the entry's own token and the `count` likeliest."""
        own = (entry.token_id, entry.logprob, entry.rank)
        likeliest = ((id, score, rank) for rank, (id, score) in enumerate(entry.top[:count], 1))
        return {
            str(token_id): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": self._decoded(token_id),
            }
            for token_id, logprob, rank in (own, *likeliest)
        }

    def _decoded(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def raw(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def shown(self, token_id: int) -> bytes:
        """What the token adds to the text that the client sees."""
        return b"" if token_id in self._hidden else self.raw(token_id)

    def begun_text(self, token_ids: Sequence[int]) -> str:
        """The text up to a character that the tokens break off: it comes with the next text."""
        if self._tokenizer is None:
            return ""
        return Detokenizer(self._tokenizer, (), self._skip_special).push(token_ids)


class TextOffsets:
    """Where each token begins in the text, in characters."""

    def __init__(self, tokens: TokenNames):
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], text: str, *, spelled_out: bool) -> list[int]:
        """Offsets of a prompt's tokens in its text; what is pushed then comes after that text.

        `spelled_out`: special tokens are in `text` because the client wrote them there. The tokens
        may spell more than `text`: a BOS or a space before it that tokenizers add.
        """
        pieces = [self._tokens.raw(i) if spelled_out else self._tokens.shown(i) for i in token_ids]
        # A tokenizer that rewrites its text spells another one: then nothing is before it.
        before = b"".join(pieces).decode("utf-8", "replace").rfind(text)
        self._offset = -max(before, 0)
        offsets = []
        for piece in pieces:
            offsets.append(min(max(self._offset, 0), len(text)))
            self._offset += len(self._decoder.decode(piece))
        self._offset = len(text)
        return offsets

    def push(self, token_id: int) -> int:
        begin = self._offset
        self._offset += len(self._decoder.decode(self._tokens.shown(token_id)))
        return begin


def _call_json(piece: CallPiece) -> dict[str, Any]:
    arguments = "".join(piece.arguments)
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": arguments}}
    function = {"name": piece.name, "arguments": arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
