"""Responses that are kept for later: to be looked up, and to be continued. In memory, and bounded.

A response is kept as JSON, and its conversation as a chain of turns. Turns are shared: a response
that continues another holds its turns too, and they are counted once. So to look up the first
response of a conversation may fail while the conversation goes on.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from forge_serve.errors import UnknownResponseError
from forge_serve.responses_items import Item

OVERHEAD_BYTES = 1024  # of a response, or of a turn, beside its JSON

_items = msgspec.json.Decoder(list[Item]).decode
_raw_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_item = msgspec.json.Decoder(Item).decode


@dataclass(eq=False, slots=True)
class Turn:
    """What a response was asked, and what it answered; both are JSON arrays of items."""

    previous: Turn | None
    input: bytes
    output: bytes = b"[]"
    holders: int = 0  # responses in the store, and turns that they hold

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.output) + OVERHEAD_BYTES

    def input_items(self) -> list[bytes]:
        """Everything that the response was made from, each item as JSON: what came before, too."""
        chain: list[Turn] = []
        turn = self.previous
        while turn is not None:
            chain.append(turn)
            turn = turn.previous
        before = [part for turn in reversed(chain) for part in (turn.input, turn.output)]
        return [bytes(item) for part in (*before, self.input) for item in _raw_items(part)]

    def items(self) -> list[Item]:
        """The whole conversation, with the answer."""
        return [*map(_item, self.input_items()), *_items(self.output)]


class EventLog:
    """The events of a response in the background; event i has the sequence number i."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.over = False
        self._changed = asyncio.Event()

    def add(self, events: Sequence[bytes], *, last: bool = False) -> None:
        self.events += events
        self.over |= last
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Waits for more events, or for the end."""
        await self._changed.wait()


@dataclass(eq=False, slots=True)
class StoredResponse:
    """One response. While it runs, `snapshot` gives its JSON."""

    id: str
    tenant: str
    turn: Turn
    snapshot: Callable[[], bytes] | None
    background: bool = False
    log: EventLog | None = None
    cancel: Callable[[], None] | None = None  # of one in the background, while it runs
    head: bytes = b"{}"  # its JSON without the output, which is the turn's

    @property
    def running(self) -> bool:
        return self.snapshot is not None

    def body(self) -> bytes:
        if self.snapshot is not None:
            return self.snapshot()
        return joined(self.head, self.turn.output)

    @property
    def num_bytes(self) -> int:
        """Without its turn's."""
        events = sum(map(len, self.log.events)) if self.log is not None else 0
        return len(self.head) + events + OVERHEAD_BYTES


def joined(head: bytes, output: bytes) -> bytes:
    """A response as JSON; `head` is an object that is not empty."""
    return head[:-1] + b',"output":' + output + b"}"


@dataclass(eq=False, slots=True)
class _Tenant:
    """The finished responses of one tenant, the one used least recently first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """At most `max_responses` and `max_bytes` of finished responses, over all tenants.

    What has to go is the least recently used response of the tenant that holds most: nobody's
    responses are pushed out by somebody who has more of them. Responses that run are not counted,
    and stay: the engine's queue bounds them.
    """

    def __init__(self, max_responses: int, max_bytes: int):
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._running: dict[tuple[str, str], StoredResponse] = {}
        self._tenants: dict[str, _Tenant] = {}

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_responses > 0 and self._max_bytes > 0

    @property
    def num_responses(self) -> int:
        """Those that are finished."""
        return sum(len(tenant.responses) for tenant in self._tenants.values())

    @property
    def num_bytes(self) -> int:
        return sum(tenant.num_bytes for tenant in self._tenants.values())

    def get(self, tenant: str, response_id: str, *, param: str | None = None) -> StoredResponse:
        """Raises `UnknownResponseError`: there is none, or it is another tenant's."""
        found = self._running.get((tenant, response_id))
        if found is not None:
            return found
        mine = self._tenants.get(tenant)
        if mine is None or response_id not in mine.responses:
            raise UnknownResponseError(
                "there is no such response here: it was not stored, has been deleted, or had to "
                "make room for newer ones (--max-stored-responses, --max-stored-bytes)",
                param=param,
            )
        mine.responses.move_to_end(response_id)
        return mine.responses[response_id]

    def begin(self, response: StoredResponse) -> None:
        self._running[response.tenant, response.id] = response

    def finish(self, response: StoredResponse, head: bytes, output: bytes) -> None:
        """Keeps a response as it is now, unless it has been deleted meanwhile."""
        response.head, response.turn.output = head, output
        response.snapshot = response.cancel = None
        if self._running.pop((response.tenant, response.id), None) is None:
            return
        tenant = self._tenants.setdefault(response.tenant, _Tenant())
        tenant.responses[response.id] = response
        tenant.num_bytes += response.num_bytes
        self._hold(tenant, response.turn)
        self._make_room()

    def delete(self, response: StoredResponse) -> None:
        """Forgets a response; one that runs goes on, but is not kept."""
        if self._running.pop((response.tenant, response.id), None) is not None:
            return
        tenant = self._tenants.get(response.tenant)
        if tenant is not None and response.id in tenant.responses:
            self._drop(tenant, response)

    def _make_room(self) -> None:
        tenants = self._tenants.values()
        while self.num_responses > self._max_responses:
            self._drop_oldest(max(tenants, key=lambda tenant: len(tenant.responses)))
        while self.num_bytes > self._max_bytes:
            self._drop_oldest(max(tenants, key=lambda tenant: tenant.num_bytes))

    def _drop_oldest(self, tenant: _Tenant) -> None:
        self._drop(tenant, next(iter(tenant.responses.values())))

    def _drop(self, tenant: _Tenant, response: StoredResponse) -> None:
        del tenant.responses[response.id]
        tenant.num_bytes -= response.num_bytes
        turn: Turn | None = response.turn
        while turn is not None:
            turn.holders -= 1
            if turn.holders:
                break
            tenant.num_bytes -= turn.num_bytes
            turn = turn.previous

    def _hold(self, tenant: _Tenant, turn: Turn | None) -> None:
        while turn is not None:
            turn.holders += 1
            if turn.holders > 1:
                break
            tenant.num_bytes += turn.num_bytes
            turn = turn.previous
