"""What an answer's text turns out to be: content, reasoning, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class CallPiece:
    """News of call `index`: its id and name with the first piece, then pieces of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: list[str] = field(default_factory=list)  # of a JSON object, to be joined


@dataclass(slots=True)
class Parts:
    """What one piece of text has brought, or the whole of it."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallPiece] = field(default_factory=list)

    def call(self, index: int) -> CallPiece:
        """The last call's piece, to be added to; a new one if it is of another call."""
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(CallPiece(index))
        return self.calls[-1]

    def in_order(self, open_call: int | None) -> Iterator[tuple[str, str] | CallPiece]:
        """What there is, as the blocks of an answer have it: `("reasoning", text)`,
        `("content", text)` and calls' pieces. The rest of the open call comes first, so that no
        call is begun twice.
        """
        reasoning, content = "".join(self.reasoning), "".join(self.content)
        if reasoning:
            yield "reasoning", reasoning
        rest = [piece for piece in self.calls if piece.index == open_call]
        yield from rest
        if content:
            yield "content", content
        yield from self.calls[len(rest) :]

    def add(self, more: Parts) -> None:
        """Appends what comes after this."""
        self.content += more.content
        self.reasoning += more.reasoning
        for piece in more.calls:
            mine = self.call(piece.index)
            mine.id, mine.name = mine.id or piece.id, mine.name or piece.name
            mine.arguments += piece.arguments
