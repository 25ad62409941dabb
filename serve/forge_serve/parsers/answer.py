"""One choice's text, taken apart: reasoning first, then content and calls of tools."""

from __future__ import annotations

from forge_serve.parsers.parts import Parts
from forge_serve.parsers.reasoning import ReasoningParser
from forge_serve.parsers.tool_calls import ToolCallParser


class AnswerParser:
    """`push` the text piece by piece, then `finish`; each returns what it has brought."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolCallParser | None):
        self._reasoning = reasoning
        self._tools = tools

    @property
    def called(self) -> bool:
        """Whether there has been a complete call of a tool."""
        return self._tools is not None and self._tools.num_calls > 0

    @property
    def over(self) -> bool:
        """Whether all that is to come is content, as it is."""
        return self._tools is None and (self._reasoning is None or self._reasoning.over)

    def read(self, text: str, *, last: bool) -> Parts:
        """`push`, and `finish` after the last piece."""
        parts = self.push(text)
        if last:
            parts.add(self.finish())
        return parts

    def push(self, text: str) -> Parts:
        parts = Parts()
        if self._reasoning is not None:
            text = self._reasoning.push(text, parts)
        self._add_content(text, parts)
        return parts

    def finish(self) -> Parts:
        parts = Parts()
        if self._reasoning is not None:
            self._add_content(self._reasoning.finish(parts), parts)
        if self._tools is not None:
            self._tools.finish(parts)
        return parts

    def _add_content(self, text: str, parts: Parts) -> None:
        if self._tools is not None:
            self._tools.push(text, parts)
        elif text:
            parts.content.append(text)
