"""The items of an output and their events.

An item is begun, extended and ended, and each of these yields events. Only one item is open at a
time, and an ended item never changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec

from forge_serve.openai.response_types import TokenLogprob
from forge_serve.parsers.parts import CallPiece
from forge_serve.responses_api.response_types import (
    ArgumentsDelta,
    ArgumentsDone,
    DoneStatus,
    Event,
    ItemAdded,
    ItemDone,
    ItemStatus,
    OutputCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
)
from forge_serve.responses_api.response_types import Output as AnyItem

type Logprobs = Sequence[TokenLogprob]


class OutputItem:
    """Item `index` of an output."""

    prefix: ClassVar[str]  # prefix of the id

    def __init__(self, unique_id: str, index: int):
        self.id = f"{self.prefix}_{unique_id}o{index}"
        self.index = index
        self.status: ItemStatus = "in_progress"
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def shown(self) -> AnyItem:
        """Return the item for clients."""
        raise NotImplementedError

    def begin(self) -> Iterator[Event]:
        yield ItemAdded(output_index=self.index, item=self.shown())

    def end(self, status: DoneStatus) -> Iterator[Event]:
        self.status = status
        yield from self._ending()
        yield ItemDone(output_index=self.index, item=self.shown())

    def _ending(self) -> Iterator[Event]:
        raise NotImplementedError


class _TextItem[Part: OutputText | ReasoningText](OutputItem):
    """An item whose content is a single text part."""

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        yield PartAdded(item_id=self.id, output_index=self.index, part=self.part())

    def part(self) -> Part:
        raise NotImplementedError

    def content(self) -> list[Part]:
        """Return the content, which is empty while the item is open."""
        return [] if self.status == "in_progress" else [self.part()]

    def _ending(self) -> Iterator[Event]:
        yield self.done()
        yield PartDone(item_id=self.id, output_index=self.index, part=self.part())

    def done(self) -> Event:
        raise NotImplementedError


class ReasoningItem(_TextItem[ReasoningText]):
    """The full reasoning. There are no summaries."""

    prefix = "rs"

    def shown(self) -> AnyItem:
        return OutputReasoning(id=self.id, content=self.content(), status=self.status)

    def part(self) -> ReasoningText:
        return ReasoningText(self.text)

    def add(self, text: str) -> Event:
        self.pieces.append(text)
        return ReasoningTextDelta(item_id=self.id, output_index=self.index, delta=text)

    def done(self) -> Event:
        return ReasoningTextDone(item_id=self.id, output_index=self.index, text=self.text)


class MessageItem(_TextItem[OutputText]):
    prefix = "msg"

    def __init__(self, unique_id: str, index: int):
        super().__init__(unique_id, index)
        self.logprobs: list[TokenLogprob] = []

    def shown(self) -> AnyItem:
        return OutputMessage(id=self.id, status=self.status, content=self.content())

    def part(self) -> OutputText:
        return OutputText(self.text, logprobs=self.logprobs)

    def add(self, text: str, logprobs: Logprobs = ()) -> Event:
        self.pieces.append(text)
        self.logprobs += logprobs
        return self.delta(text, logprobs)

    def delta(self, text: str, logprobs: Logprobs = ()) -> Event:
        """Return the event of a piece of the text."""
        return OutputTextDelta(
            item_id=self.id, output_index=self.index, delta=text, logprobs=list(logprobs)
        )

    def done(self) -> Event:
        return OutputTextDone(
            item_id=self.id, output_index=self.index, text=self.text, logprobs=self.logprobs
        )


class CallItem(OutputItem):
    """A function call. `number` is its index among the output's calls."""

    prefix = "fc"

    def __init__(self, unique_id: str, index: int, call: CallPiece):
        super().__init__(unique_id, index)
        self.number = call.index
        self._call_id, self._name = call.id, call.name

    def shown(self) -> AnyItem:
        return OutputCall(
            self.id, self._call_id or "", self._name or "", self.text, status=self.status
        )

    def add(self, piece: CallPiece) -> Event:
        arguments = "".join(piece.arguments)
        self.pieces.append(arguments)
        return ArgumentsDelta(item_id=self.id, output_index=self.index, delta=arguments)

    def end(self, status: DoneStatus) -> Iterator[Event]:
        return super().end(status if self._is_whole() else "incomplete")

    def _ending(self) -> Iterator[Event]:
        yield ArgumentsDone(
            item_id=self.id, output_index=self.index, name=self._name or "", arguments=self.text
        )

    def _is_whole(self) -> bool:
        """Return True if the arguments are valid JSON. A truncated call's are not."""
        try:
            msgspec.json.decode(self.text)
        except msgspec.DecodeError:
            return False
        return True


class Output:
    """All items of an output, in order."""

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

    def close(self, status: DoneStatus = "completed") -> Iterator[Event]:
        item, self.open = self.open, None
        if item is not None:
            yield from item.end(status)

    def shown(self) -> list[AnyItem]:
        return [item.shown() for item in self.items]

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        yield from self.close()
        self.items.append(item)
        self.open = item
        yield from item.begin()
