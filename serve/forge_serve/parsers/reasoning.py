"""Reasoning, which a model writes between two tags before its answer."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from forge_serve.parsers.markers import begun_at_end
from forge_serve.parsers.parts import Parts


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """A model family's reasoning format."""

    name: str  # the value of --reasoning-parser
    begin: str
    end: str
    always: bool = False  # True: every answer begins with reasoning, even without the opening tag
    repeats: bool = False  # True: reasoning may follow reasoning, without line breaks
    switchable: bool = True  # True: variables of the chat template may switch reasoning off
    answer: str = ""  # opens the answer

    @property
    def markup(self) -> tuple[str, ...]:
        """The texts that may be special tokens."""
        return (self.begin, self.end)

    def is_open_after(self, prompt: str) -> bool:
        """Return True if the answer to this prompt begins inside reasoning."""
        prompt = prompt.rstrip()
        return prompt.endswith(self.begin) or (self.always and not prompt.endswith(self.end))

    def is_over_after(self, prompt: str) -> bool:
        """Return True if this prompt closes the reasoning, so that the answer has none."""
        return prompt.rstrip().endswith(self.end)

    def is_open_in(self, message: str) -> bool:
        """Return True if the continuation of this message begins inside reasoning."""
        return message.rfind(self.begin) > message.rfind(self.end)


class ReasoningParser:
    """Splits a text into reasoning, which goes to `Parts`, and the rest, which `push` returns.

    The text begins with reasoning if the opening tag comes first or the reasoning is `open`
    already. If the closing tag is missing, all of the text is reasoning. Line breaks next to the
    tags are removed.
    """

    def __init__(self, form: ReasoningFormat, *, open: bool):
        self.found = open  # True if there is reasoning, even if it is empty
        self._form = form
        self._open = open
        self._before = not open  # only whitespace so far
        self._blank: list[str] = []
        self._held = ""  # text that may begin a tag
        self._thought = False
        self._newlines = 0  # line breaks at the end, removed if the reasoning ends here
        self._ended_now = False  # removing line breaks after the closing tag

    @property
    def over(self) -> bool:
        """True if all further text is returned unchanged."""
        return self.past and not self._ended_now

    @property
    def past(self) -> bool:
        """True if no more reasoning can follow."""
        return not (self._before or self._open)

    def push(self, text: str, parts: Parts) -> str:
        if self._before:
            text = self._opening(text)
        if self._open:
            text = self._reasoning(text, parts)
        if self._ended_now:
            text = text.lstrip("\n")
            self._ended_now = not text
        return text

    def finish(self, parts: Parts) -> str:
        """End the text, and return the withheld text that is not reasoning."""
        held, self._held = self._held, ""
        if self._open:
            self._think(held, parts)
            parts.reasoning.append("\n" * self._newlines)
            return ""
        return "".join(self._blank) + held

    def _opening(self, text: str) -> str:
        """Look for the opening tag, which only whitespace may precede."""
        tag = self._form.begin
        text, self._held = self._held + text, ""
        rest = text.lstrip()
        if len(rest) < len(text):
            self._blank.append(text[: len(text) - len(rest)])
        if rest.startswith(tag):
            self._before, self._open, self.found = False, True, True
            self._blank = []
            return rest[len(tag) :]
        if tag.startswith(rest):
            self._held = rest
            return ""
        blank, self._blank = self._blank, []
        self._before = False
        return "".join([*blank, rest])

    def _reasoning(self, text: str, parts: Parts) -> str:
        tag = self._form.end
        text, self._held = self._held + text, ""
        at = text.find(tag)
        if at >= 0:
            self._think(text[:at], parts)
            self._open, self._ended_now = False, True
            return text[at + len(tag) :]
        at = len(text) - begun_at_end(text, (tag,))
        self._think(text[:at], parts)
        self._held = text[at:]
        return ""

    def _think(self, text: str, parts: Parts) -> None:
        if not self._thought:
            text = text.lstrip("\n")
        stripped = text.rstrip("\n")
        if stripped:
            parts.reasoning.append("\n" * self._newlines + stripped)
            self._thought, self._newlines = True, 0
        self._newlines += len(text) - len(stripped)


class TokenCounter(Protocol):
    """A counter of the reasoning tokens of an answer."""

    number: int

    def push(self, token_ids: Iterable[int]) -> None: ...


class ReasoningTokens:
    """A counter of the reasoning tokens of an answer, including the tags.

    It parses the text of each token separately. The count therefore does not depend on how tokens
    are batched or whether their text is withheld.

    Args:
      parser: a new parser, used only by this counter.
      token_bytes: returns the text of a token, including special tokens.
    """

    def __init__(self, parser: ReasoningParser, token_bytes: Callable[[int], bytes]):
        self.number = 0
        self._parser = parser
        self._token_bytes = token_bytes
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._undecided = 0  # tokens up to the end of the opening tag

    def push(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if self._parser.past:
                return
            self._parser.push(self._text.decode(self._token_bytes(token_id)), Parts())
            self._undecided += 1
            if self._parser.found:
                self.number += self._undecided
                self._undecided = 0
