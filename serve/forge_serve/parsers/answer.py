"""A parser for one choice's text: reasoning first, then content and tool calls."""

from __future__ import annotations

from forge_serve.parsers.parts import Parts
from forge_serve.parsers.reasoning import ReasoningParser
from forge_serve.parsers.tool_calls import ToolCallParser


class AnswerParser:
    """An incremental parser: `push` pieces of text, then `finish`. Each returns the new parts."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolCallParser | None):
        self._reasoning = reasoning
        self._tools = tools

    @property
    def called(self) -> bool:
        """True if there has been a complete tool call."""
        return self._tools is not None and self._tools.num_calls > 0

    @property
    def over(self) -> bool:
        """True if all further text is content and passes through unchanged."""
        return self._tools is None and (self._reasoning is None or self._reasoning.over)

    def read(self, text: str, *, last: bool) -> Parts:
        """Call `push`, and also `finish` after the last piece."""
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
