"""Harmony, gpt-oss's format: an output of messages, each with a header and a channel.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

The prompt ends with `<|start|>assistant`. The channel `analysis` has reasoning, and `final` has the
answer. A message to a function is a tool call. A message on `commentary` without a recipient is a
preamble, which users see. The recipient may also precede the channel.
Source: github.com/openai/harmony, docs/format.md.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from forge_serve.parsers.answer import AnswerParser
from forge_serve.parsers.markers import begun_at_end, find_first
from forge_serve.parsers.parts import Parts
from forge_serve.parsers.reading import MAX_NAME_CHARS, Malformed, Read, exactly, space, value, word
from forge_serve.parsers.reasoning import ReasoningFormat
from forge_serve.parsers.tool_calls import CallSink, ToolCallFormat, ToolCallParser, Written

MAX_HEADER_CHARS = 1024
START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
FINAL = f"{CHANNEL}final{MESSAGE}"

_TURN = f"{START}assistant"  # the prompt or the end of the previous message opens a message so
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BREAKS = (*_ENDS, START, CHANNEL)  # end a message's text
_HEADS = (START, CHANNEL, "<|constrain|>", MESSAGE, "to=")  # begin a header
_MARKERS = (*_ENDS, START, CHANNEL, "<|constrain|>", MESSAGE)
_FUNCTIONS = "functions."
_JSON = f" <|constrain|>json{MESSAGE}"
_ROLE = re.compile(r"<\|start\|>\s*([^\s<]*)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([^\s<]*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")

type _Kind = Literal["reasoning", "content", "call"]


class HarmonyFormat(ToolCallFormat):
    """The format of a call whose header `HarmonyParser` has rewritten to its usual form."""

    name = "harmony"
    markers = (f"{CHANNEL}commentary to={_FUNCTIONS}",)
    syntax_tokens = _MARKERS

    def read(self, calls: CallSink) -> Read[None]:
        name, c = yield from word((yield), lambda c: c != "<" and not c.isspace(), MAX_NAME_CHARS)
        calls.check(name)
        assert c == _JSON[0], "HarmonyParser writes the headers"
        yield from exactly(_JSON[1:])
        c = yield from space((yield))
        if c != "{":
            raise Malformed
        calls.begin(name)
        yield from value(c, calls.arguments)
        calls.end()

    def written(self, special_tokens: Collection[str]) -> Written | None:
        if not {START, CHANNEL, MESSAGE, "<|constrain|>", "<|end|>"} <= set(special_tokens):
            return None
        [marker] = self.markers
        return Written(
            marker=marker,
            begin=lambda name: name + _JSON,
            between=f"<|end|>{_TURN}{marker}",
            preamble=(f"{CHANNEL}commentary{MESSAGE}", f"<|end|>{_TURN}"),
            final=FINAL,
        )


@dataclass(frozen=True, kw_only=True)
class HarmonyReasoning(ReasoningFormat):
    """Messages on the channel `analysis`, of which there may be several."""

    name: str = "harmony"
    begin: str = f"{CHANNEL}analysis{MESSAGE}"
    end: str = f"<|end|>{_TURN}"
    repeats: bool = True
    switchable: bool = False
    answer: str = FINAL

    @property
    def markup(self) -> tuple[str, ...]:
        return _MARKERS

    def is_over_after(self, prompt: str) -> bool:
        return prompt.endswith(FINAL)


def opening_of(prompt_end: str) -> str:
    """Return the beginning of the output's first message, which the end of the prompt contains."""
    at = prompt_end.rfind(START)
    begun = prompt_end[at:] if at >= 0 else ""
    return "" if begun.strip() == _TURN or any(end in begun for end in _ENDS) else begun


class HarmonyParser(AnswerParser):
    """Splits an output in Harmony into reasoning, content and tool calls.

    - A message that begins without a header is content. So is one without a channel.
    - A call of a built-in tool on the channel `analysis` is reasoning.
    - A message that is neither the assistant's nor for a function is content, with its header. So
      are calls if there is no tool parser, reasoning if `reasons` is False, and text that begins
      like a header but has no `<|message|>`. An incomplete header at the end is dropped.
    - An empty line separates several messages of reasoning or of content.

    Args:
      tools: a parser with the format `harmony`, which receives the content and the calls.
      functions: names of functions, which may be recipients without the prefix `functions.`.
      reasons: True if reasoning is separated.
      opening: the beginning of the first message; see `opening_of`.
      final_is_last: True if all text of the channel `final` is content, even if it has markers.
    """

    def __init__(
        self,
        tools: ToolCallParser | None = None,
        *,
        functions: Collection[str] = (),
        reasons: bool = True,
        opening: str = "",
        final_is_last: bool = False,
    ):
        super().__init__(None, tools)
        self.kind: _Kind | None = None  # kind of the open message; None: in a header
        self._functions = functions
        self._reasons = reasons
        self._final_is_last = final_is_last
        self._header = ""  # without text of earlier messages
        self._held = ""  # text of the message that may begin a marker
        self._fresh = True  # the message has no text yet
        self._seen: set[_Kind] = set()  # kinds of the texts so far
        self._final = False
        self.push(opening)

    @property
    def over(self) -> bool:
        return self._final and self._final_is_last

    def read(self, text: str, *, last: bool) -> Parts:
        parts = self.push(text)
        if last:
            parts.follow(self.finish())
        return parts

    def push(self, text: str) -> Parts:
        parts = Parts()
        text, self._held = self._held + text, ""
        while text:
            if self.over:
                self._say(text, parts)
                break
            text = self._in_header(text, parts) if self.kind is None else self._in_body(text, parts)
        return parts

    def finish(self) -> Parts:
        parts = Parts()
        held, self._held = self._held, ""
        if self.kind is None:
            held, self._header = self._header, ""
            if not self._is_cut_off(held):
                self._say_header(held, parts)
        elif self.kind != "call" or (self._tools is not None and self._tools.reads):
            self._say(held, parts)
        if self._tools is not None:
            rest = Parts()
            self._tools.finish(rest)
            parts.follow(rest)
        return parts

    # ---- headers -------------------------------------------------------------------------------

    def _in_header(self, text: str, parts: Parts) -> str:
        """Read a header, and return the text after it."""
        text, self._header = self._header + text, ""
        begun = text.lstrip()
        _, end = find_first(begun, _ENDS)
        if end and begun.startswith(end):  # end of a message that has ended
            return begun[len(end) :]
        short = len(text) < MAX_HEADER_CHARS + len(MESSAGE)
        if short and any(each.startswith(begun) for each in (*_HEADS, *_ENDS)):
            self._header = text
            return ""
        if not begun.startswith(_HEADS):
            self._begin("content")
            return text
        at, marker = find_first(text, (MESSAGE, *_ENDS))
        if 0 <= at <= MAX_HEADER_CHARS:
            if marker == MESSAGE:
                at += len(MESSAGE)
                self._open(text[:at], parts)
                return text[at:]
        elif short:
            self._header = text
            return ""
        else:
            at = MAX_HEADER_CHARS
        self._say_header(text[:at], parts)
        return text[at:]

    def _is_cut_off(self, header: str) -> bool:
        """Return True if text at the end of the output is an incomplete header or a separator."""
        text = header.removeprefix(_TURN)
        begun = text.strip()
        if text == header and not begun:
            return bool(self._seen)
        if text != header and any(h.startswith(begun) or begun.startswith(h) for h in _HEADS):
            return True
        return any(marker in text for marker in _MARKERS)

    def _say_header(self, header: str, parts: Parts) -> None:
        """Begin a message of content with text that looked like a header, or with a header."""
        self._begin("content")
        self._say(header.removeprefix(_TURN), parts)

    def _open(self, header: str, parts: Parts) -> None:
        """Begin the message of a complete header."""
        role, channel, recipient = (
            (pattern.findall(header) or [""])[-1] for pattern in (_ROLE, _CHANNEL, _RECIPIENT)
        )
        function = self._function(recipient)
        if role not in ("", "assistant"):
            self._say_header(header, parts)
        elif function and self._tools is not None:
            self._begin("call")
            [marker] = HarmonyFormat.markers
            self._tools.push(f"{marker}{function}{_JSON}", parts)
        elif channel == "analysis" and self._reasons:
            self._begin("reasoning")
        elif recipient or channel == "analysis":
            self._say_header(header, parts)
        else:
            self._begin("content")
            self._final = channel == "final"

    def _function(self, recipient: str) -> str:
        """Return the name of the function that a call is for; "": the message is no call."""
        if self._tools is None:
            return ""
        name = recipient.removeprefix(_FUNCTIONS)
        known = name != recipient or name in self._functions
        return name if known and len(name) <= MAX_NAME_CHARS else ""

    # ---- messages ------------------------------------------------------------------------------

    def _in_body(self, text: str, parts: Parts) -> str:
        """Read the text of a message, and return the text after it."""
        at, marker = find_first(text, _BREAKS)
        if not marker:
            at = len(text) - begun_at_end(text, _BREAKS)
            self._say(text[:at], parts)
            self._held = text[at:]
            return ""
        self._say(text[:at], parts)
        if self.kind == "call" and self._tools is not None:
            rest = Parts()
            self._tools.end_call(rest)
            parts.follow(rest)
        self.kind = None
        return text[at + len(marker) :] if marker in _ENDS else text[at:]

    def _begin(self, kind: _Kind) -> None:
        self.kind, self._fresh, self._final = kind, True, False

    def _say(self, text: str, parts: Parts) -> None:
        """Add text to the open message."""
        if not text or self.kind is None:
            return
        said = Parts()
        if self._fresh and self.kind != "call":
            text = "\n\n" + text if self.kind in self._seen else text
            self._seen.add(self.kind)
            self._fresh = False
        if self.kind == "reasoning":
            said.reasoning.append(text)
        else:
            self._add_content(text, said)
        parts.follow(said)


class HarmonyTokens:
    """A counter of the tokens of reasoning, including headers up to the next message's text.

    Args:
      parser: a new parser, used only by this counter.
      token_bytes: returns the text of a token, including special tokens.
    """

    def __init__(self, parser: HarmonyParser, token_bytes: Callable[[int], bytes]):
        self.number = 0
        self._parser = parser
        self._token_bytes = token_bytes
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._undecided = 0  # tokens since the last message's text
        self._reasoned = False  # the last message was reasoning

    def push(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._parser.push(self._text.decode(self._token_bytes(token_id)))
            self._undecided += 1
            if self._parser.kind is None:
                continue
            reasons = self._parser.kind == "reasoning"
            if reasons or self._reasoned:
                self.number += self._undecided
            self._undecided, self._reasoned = 0, reasons
