"""The items of an answer, and the events that tell of each.

An item is begun, added to, and ended; each of these yields events as pairs of a name and fields.
Only one item is open at a time, and an ended one never changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec

from forge_serve.parsers.parts import CallPiece

type Event = tuple[str, dict[str, Any]]
type Logprobs = Sequence[dict[str, Any]]

DELTA = "response.output_text.delta"


class OutputItem:
    """Item `index` of an answer."""

    prefix: ClassVar[str]  # of its id

    def __init__(self, unique_id: str, index: int):
        self.id = f"{self.prefix}_{unique_id}o{index}"
        self.index = index
        self.status = "in_progress"
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index}

    def json(self) -> dict[str, Any]:
        raise NotImplementedError

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self.index, "item": self.json()}

    def end(self, status: str) -> Iterator[Event]:
        """`status` is "completed" or "incomplete"."""
        self.status = status
        yield from self._ending()
        yield "response.output_item.done", {"output_index": self.index, "item": self.json()}

    def _ending(self) -> Iterator[Event]:
        raise NotImplementedError


class _TextItem(OutputItem):
    """An item whose content is one part, a text."""

    events: ClassVar[str]  # the beginning of their names

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        yield "response.content_part.added", {**self.place, "part": self.part()}

    @property
    def place(self) -> dict[str, Any]:
        return {**super().place, "content_index": 0}

    def part(self) -> dict[str, Any]:
        raise NotImplementedError

    def content(self) -> list[dict[str, Any]]:
        """Nothing while the item is open: its events tell of the part."""
        return [] if self.status == "in_progress" else [self.part()]

    def _ending(self) -> Iterator[Event]:
        yield f"{self.events}.done", {**self.place, "text": self.text, **self.logprobs_field()}
        yield "response.content_part.done", {**self.place, "part": self.part()}

    def logprobs_field(self) -> dict[str, Any]:
        return {}


class ReasoningItem(_TextItem):
    """Reasoning in full; there is no summary of it."""

    prefix = "rs"
    events = "response.reasoning_text"

    def json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": self.content(),
            "status": self.status,
        }

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def add(self, text: str) -> Event:
        self.pieces.append(text)
        return f"{self.events}.delta", {**self.place, "delta": text}


class MessageItem(_TextItem):
    prefix = "msg"
    events = "response.output_text"

    def __init__(self, unique_id: str, index: int):
        super().__init__(unique_id, index)
        self.logprobs: list[dict[str, Any]] = []

    def json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": self.status,
            "content": self.content(),
        }

    def part(self) -> dict[str, Any]:
        about = {"type": "output_text", "text": self.text, "annotations": []}
        return {**about, **self.logprobs_field()}

    def logprobs_field(self) -> dict[str, Any]:
        return {"logprobs": self.logprobs}

    def add(self, text: str, logprobs: Logprobs = ()) -> Event:
        self.pieces.append(text)
        self.logprobs += logprobs
        return DELTA, {**self.place, "delta": text, "logprobs": logprobs}


class CallItem(OutputItem):
    """A call of a function; `number` is the call's among those of the answer."""

    prefix = "fc"

    def __init__(self, unique_id: str, index: int, call: CallPiece):
        super().__init__(unique_id, index)
        self.number = call.index
        self._call_id, self._name = call.id, call.name

    def json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
            "status": self.status,
        }

    def add(self, piece: CallPiece) -> Event:
        arguments = "".join(piece.arguments)
        self.pieces.append(arguments)
        return "response.function_call_arguments.delta", {**self.place, "delta": arguments}

    def end(self, status: str) -> Iterator[Event]:
        return super().end(status if self._is_whole() else "incomplete")

    def _ending(self) -> Iterator[Event]:
        done = {**self.place, "name": self._name, "arguments": self.text}
        yield "response.function_call_arguments.done", done

    def _is_whole(self) -> bool:
        """Whether the arguments are JSON: the model may have broken the call off."""
        try:
            msgspec.json.decode(self.text)
        except msgspec.DecodeError:
            return False
        return True


class Output:
    """All items of an answer, in their order."""

    def __init__(self, unique_id: str):
        self.items: list[OutputItem] = []
        self.open: OutputItem | None = None
        self._unique_id = unique_id

    @property
    def open_call(self) -> int | None:
        return self.open.number if isinstance(self.open, CallItem) else None

    def think(self, text: str) -> Iterator[Event]:
        item = self.open
        if not isinstance(item, ReasoningItem):
            item = ReasoningItem(self._unique_id, len(self.items))
            yield from self._begin(item)
        yield item.add(text)

    def say(self, text: str, logprobs: Logprobs = ()) -> Iterator[Event]:
        item = self.open
        if not isinstance(item, MessageItem):
            item = MessageItem(self._unique_id, len(self.items))
            yield from self._begin(item)
        yield item.add(text, logprobs)

    def call(self, piece: CallPiece) -> Iterator[Event]:
        item = self.open
        if not isinstance(item, CallItem) or item.number != piece.index:
            item = CallItem(self._unique_id, len(self.items), piece)
            yield from self._begin(item)
        yield item.add(piece)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Ends the item that is open, if there is one."""
        item, self.open = self.open, None
        if item is not None:
            yield from item.end(status)

    def json(self) -> list[dict[str, Any]]:
        return [item.json() for item in self.items]

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        yield from self.close()
        self.items.append(item)
        self.open = item
        yield from item.begin()
