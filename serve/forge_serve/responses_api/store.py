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

from forge_serve.errors import PreviousResponseNotFoundError, UnknownResponseError
from forge_serve.responses_api.items import Item

OVERHEAD_BYTES = 1024  # of a response, or of a turn, beside its JSON
MAX_LOCAL = 16  # responses that a WebSocket can go on from without storing them

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
    local: LocalResponses | None = None  # those of a WebSocket, which alone can continue this one
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
    local: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)  # of WebSockets
    num_bytes: int = 0

    def like(self, response: StoredResponse) -> OrderedDict[str, StoredResponse]:
        """The responses that this one belongs to."""
        return self.responses if response.local is None else self.local


class ResponseStore:
    """At most `max_responses` and `max_bytes` of finished responses, over all tenants.

    What has to go is the least recently used response of the tenant that holds most: nobody's
    responses are pushed out by somebody who has more of them. Responses that run are not counted,
    and stay: the engine's queue bounds them. Of `LocalResponses` only the bytes are counted, and
    they make room last: somebody is connected for them.
    """

    def __init__(self, max_responses: int, max_bytes: int):
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._running: dict[tuple[str, str], StoredResponse] = {}
        self._tenants: dict[str, _Tenant] = {}

    @property
    def keeps(self) -> bool:
        """Whether anything is kept that outlives a connection."""
        return self._max_responses > 0 and self._max_bytes > 0

    @property
    def num_responses(self) -> int:
        """Those that are finished, without those of WebSockets."""
        return sum(len(tenant.responses) for tenant in self._tenants.values())

    @property
    def num_bytes(self) -> int:
        return sum(tenant.num_bytes for tenant in self._tenants.values())

    def get(self, tenant: str, response_id: str, *, param: str | None = None) -> StoredResponse:
        """Raises `UnknownResponseError`: there is none, or it is another tenant's."""
        found = self._running.get((tenant, response_id))
        if found is not None and found.local is None:
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
        tenant.like(response)[response.id] = response
        tenant.num_bytes += response.num_bytes
        self._hold(tenant, response.turn)
        self._make_room()

    def delete(self, response: StoredResponse) -> None:
        """Forgets a response; one that runs goes on, but is not kept."""
        if self._running.pop((response.tenant, response.id), None) is not None:
            return
        tenant = self._tenants.get(response.tenant)
        if tenant is not None and response.id in tenant.like(response):
            self._drop(tenant, response)

    def _make_room(self) -> None:
        tenants = self._tenants.values()
        while self.num_responses > self._max_responses:
            self._drop_oldest(max(tenants, key=lambda tenant: len(tenant.responses)))
        while self.num_bytes > self._max_bytes:
            self._drop_oldest(max(tenants, key=lambda tenant: tenant.num_bytes))

    def _drop_oldest(self, tenant: _Tenant) -> None:
        self._drop(tenant, next(iter((tenant.responses or tenant.local).values())))

    def _drop(self, tenant: _Tenant, response: StoredResponse) -> None:
        del tenant.like(response)[response.id]
        if response.local is not None:
            response.local.dropped(response)
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


class LocalResponses:
    """The last responses of one WebSocket that were asked with `store: false`: nobody else can
    look them up or continue them, and they end with the connection.

    They are in the server's store, so that their bytes are bounded with all others'.
    """

    def __init__(self, store: ResponseStore):
        self._store = store
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def previous(self, tenant: str, response_id: str, param: str) -> StoredResponse:
        """A response to be continued: one of these, or one that the tenant has stored.

        Raises:
          PreviousResponseNotFoundError: it is neither.
        """
        mine = self._responses.get(response_id)
        if mine is not None:
            self._responses.move_to_end(response_id)
            return mine
        try:
            return self._store.get(tenant, response_id, param=param)
        except UnknownResponseError as error:
            raise PreviousResponseNotFoundError(
                "there is no such response here: it was not stored and is not one of this "
                "connection's last, or a turn that continued it has failed: leave "
                "previous_response_id out and send the whole input",
                param=param,
            ) from error

    def add(self, response: StoredResponse) -> None:
        """Enters a response of this connection. The one before `MAX_LOCAL` others is forgotten."""
        self._responses[response.id] = response
        if len(self._responses) > MAX_LOCAL:
            self.forget(next(iter(self._responses)))

    def forget(self, response_id: str) -> None:
        """Forgets a response, if it is one of these."""
        response = self._responses.pop(response_id, None)
        if response is not None:
            self._store.delete(response)

    def dropped(self, response: StoredResponse) -> None:
        """Called by the store: the response had to make room."""
        self._responses.pop(response.id, None)

    def close(self) -> None:
        """Forgets them all."""
        while self._responses:
            self.forget(next(iter(self._responses)))
