"""What a model thinks before it answers, between two tags."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forge_serve.parsers.markers import begun_at_end
from forge_serve.parsers.parts import Parts


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """How a family of models marks its reasoning."""

    name: str  # as --reasoning-parser takes it
    begin: str
    end: str
    always: bool = False  # an answer begins with it, and may leave out the opening tag

    @property
    def markup(self) -> tuple[str, ...]:
        """What may be special tokens."""
        return (self.begin, self.end)

    def is_open_after(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins in the middle of reasoning."""
        prompt = prompt.rstrip()
        return prompt.endswith(self.begin) or (self.always and not prompt.endswith(self.end))

    def is_over_after(self, prompt: str) -> bool:
        """Whether a prompt has ended the reasoning, so that the answer begins without any."""
        return prompt.rstrip().endswith(self.end)

    def is_open_in(self, message: str) -> bool:
        """Whether what continues this message begins in the middle of reasoning."""
        return message.rfind(self.begin) > message.rfind(self.end)


class ReasoningParser:
    """Splits a text into reasoning, which goes to `Parts`, and the rest, which `push` returns.

    The reasoning is what comes first, if it has its opening tag or is `open` already; without a
    closing tag it is all of the text. Line breaks next to the tags are left out.
    """

    def __init__(self, form: ReasoningFormat, *, open: bool):
        self.found = open  # there is reasoning, though it may be empty
        self._form = form
        self._open = open
        self._before = not open  # nothing but white space has been seen
        self._blank: list[str] = []  # of it
        self._held = ""  # what may be the beginning of a tag
        self._thought = False  # there was some reasoning
        self._newlines = 0  # after it, left out if it ends here
        self._ended_now = False  # line breaks that follow are left out

    @property
    def over(self) -> bool:
        """Whether all that is to come is returned as it is."""
        return self.past and not self._ended_now

    @property
    def past(self) -> bool:
        """Whether there will be no more reasoning."""
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
        """The text is over; returns what was held back of it and is no reasoning."""
        held, self._held = self._held, ""
        if self._open:
            self._think(held, parts)
            parts.reasoning.append("\n" * self._newlines)
            return ""
        return "".join(self._blank) + held

    def _opening(self, text: str) -> str:
        """Looks for the opening tag, before anything but white space."""
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


class ReasoningTokens:
    """How many tokens of an answer are reasoning: all up to its end, with the tags.

    They are counted by what each of them adds to the text, so it does not matter how many come at
    once, nor whether their text is held back.

    Args:
      parser: a fresh one, which is this counter's own.
      token_bytes: what a token adds to a text, special tokens too.
    """

    def __init__(self, parser: ReasoningParser, token_bytes: Callable[[int], bytes]):
        self.number = 0
        self._parser = parser
        self._token_bytes = token_bytes
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._undecided = 0  # tokens before the opening tag is complete

    def push(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if self._parser.past:
                return
            self._parser.push(self._text.decode(self._token_bytes(token_id)), Parts())
            self._undecided += 1
            if self._parser.found:
                self.number += self._undecided
                self._undecided = 0
