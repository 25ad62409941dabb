"""The parts of an answer: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class CallPiece:
    """An addition to call `index`. The first has the id and name; all may have arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: list[str] = field(default_factory=list)  # consecutive pieces of a JSON object


@dataclass(slots=True)
class Parts:
    """The parts in one piece of text, or in the whole text."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallPiece] = field(default_factory=list)
    _turns: list[Parts] = field(default_factory=list)  # the same in order; empty: in one turn

    def call(self, index: int) -> CallPiece:
        """Return the last piece if it belongs to this call, otherwise a new one."""
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(CallPiece(index))
        return self.calls[-1]

    def in_order(self, open_call: int | None) -> Iterator[tuple[str, str] | CallPiece]:
        """Yield the parts in the order of an answer's blocks.

        They are `("reasoning", text)`, `("content", text)` and call pieces. The rest of the open
        call precedes the content, so that no call begins twice.
        """
        for turn in self._turns or (self,):
            yield from turn._of_turn(open_call)
            open_call = turn.calls[-1].index if turn.calls else None

    def _of_turn(self, open_call: int | None) -> Iterator[tuple[str, str] | CallPiece]:
        reasoning, content = "".join(self.reasoning), "".join(self.content)
        if reasoning:
            yield "reasoning", reasoning
        rest = [piece for piece in self.calls if piece.index == open_call]
        yield from rest
        if content:
            yield "content", content
        yield from self.calls[len(rest) :]

    def follow(self, turn: Parts) -> None:
        """Append parts that begin a new turn of reasoning, content and calls."""
        if turn.content or turn.reasoning or turn.calls:
            self.add(turn)
            self._turns.append(turn)

    def add(self, more: Parts) -> None:
        """Append parts that follow these."""
        self.content += more.content
        self.reasoning += more.reasoning
        for piece in more.calls:
            mine = self.call(piece.index)
            mine.id, mine.name = mine.id or piece.id, mine.name or piece.name
            mine.arguments += piece.arguments
