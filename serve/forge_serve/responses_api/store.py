"""The store of responses, which clients can retrieve and continue. It is in memory and bounded.

A response is stored as JSON, and its conversation as a chain of turns. A response that continues
another shares its turns, which are counted once. The first response of a conversation may therefore
be evicted while later ones still continue from its turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from forge_serve.errors import PreviousResponseNotFoundError, UnknownResponseError
from forge_serve.responses_api.items import Item

OVERHEAD_BYTES = 1024  # added to the JSON of each response and turn
MAX_LOCAL = 16  # unstored responses that a WebSocket can continue

_items = msgspec.json.Decoder(list[Item]).decode
_raw_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_item = msgspec.json.Decoder(Item).decode


@dataclass(eq=False, slots=True)
class Turn:
    """The input and output of a response, both as JSON arrays of items."""

    previous: Turn | None
    input: bytes
    output: bytes = b"[]"
    holders: int = 0  # reference count: stored responses and later turns

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.output) + OVERHEAD_BYTES

    def input_items(self) -> list[bytes]:
        """Return all input items as JSON, including those of previous turns."""
        chain: list[Turn] = []
        turn = self.previous
        while turn is not None:
            chain.append(turn)
            turn = turn.previous
        before = [part for turn in reversed(chain) for part in (turn.input, turn.output)]
        return [bytes(item) for part in (*before, self.input) for item in _raw_items(part)]

    def items(self) -> list[Item]:
        """Return the items of the whole conversation, including the output."""
        return [*map(_item, self.input_items()), *_items(self.output)]


class EventLog:
    """The events of a background response. Event i has the sequence number i."""

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
        await self._changed.wait()


@dataclass(eq=False, slots=True)
class StoredResponse:
    """One response. While it runs, `snapshot` returns its JSON."""

    id: str
    tenant: str
    turn: Turn
    snapshot: Callable[[], bytes] | None
    background: bool = False
    local: LocalResponses | None = None  # set if only this WebSocket can continue the response
    log: EventLog | None = None
    cancel: Callable[[], None] | None = None  # set while a background response runs
    head: bytes = b"{}"  # the JSON without the output, which the turn has

    @property
    def running(self) -> bool:
        return self.snapshot is not None

    def body(self) -> bytes:
        if self.snapshot is not None:
            return self.snapshot()
        return joined(self.head, self.turn.output)

    @property
    def num_bytes(self) -> int:
        """Bytes of the response without its turn."""
        events = sum(map(len, self.log.events)) if self.log is not None else 0
        return len(self.head) + events + OVERHEAD_BYTES


def joined(head: bytes, output: bytes) -> bytes:
    """Return a response as JSON. `head` must be a nonempty object."""
    return head[:-1] + b',"output":' + output + b"}"


@dataclass(eq=False, slots=True)
class _Tenant:
    """The finished responses of one tenant, least recently used first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    local: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)  # `store: false`
    num_bytes: int = 0

    def like(self, response: StoredResponse) -> OrderedDict[str, StoredResponse]:
        """Return the collection for this response."""
        return self.responses if response.local is None else self.local


class ResponseStore:
    """Finished responses of all tenants, limited to `max_responses` and `max_bytes`.

    The store evicts the least recently used response of the tenant that holds the most. A tenant
    therefore cannot evict responses of tenants that hold fewer. Running responses are not counted
    or evicted, because the engine's queue bounds them. `LocalResponses` count only in bytes and are
    evicted last, because their client is connected.
    """

    def __init__(self, max_responses: int, max_bytes: int):
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._running: dict[tuple[str, str], StoredResponse] = {}
        self._tenants: dict[str, _Tenant] = {}

    @property
    def keeps(self) -> bool:
        """True if the store keeps responses beyond their connection."""
        return self._max_responses > 0 and self._max_bytes > 0

    @property
    def num_responses(self) -> int:
        """Finished responses, without `LocalResponses`."""
        return sum(len(tenant.responses) for tenant in self._tenants.values())

    @property
    def num_bytes(self) -> int:
        return sum(tenant.num_bytes for tenant in self._tenants.values())

    def get(self, tenant: str, response_id: str, *, param: str | None = None) -> StoredResponse:
        """Return a response that is running or stored.

        Raises:
          UnknownResponseError: the response does not exist or belongs to another tenant.
        """
        found = self._running.get((tenant, response_id))
        if found is not None and found.local is None:
            return found
        mine = self._tenants.get(tenant)
        if mine is None or response_id not in mine.responses:
            raise UnknownResponseError(
                "unknown response: it was not stored, was deleted, or was evicted to make room for "
                "newer ones (--max-stored-responses, --max-stored-bytes)",
                param=param,
            )
        mine.responses.move_to_end(response_id)
        return mine.responses[response_id]

    def begin(self, response: StoredResponse) -> None:
        self._running[response.tenant, response.id] = response

    def finish(self, response: StoredResponse, head: bytes, output: bytes) -> None:
        """Store a finished response, unless it has been deleted."""
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
        """Delete a response. A running one continues, but will not be stored."""
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
    """The latest responses of one WebSocket with `store: false`.

    Only this connection can continue them, and they are deleted when it closes. They are part of
    the server's store, so that its byte limit includes them.
    """

    def __init__(self, store: ResponseStore):
        self._store = store
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def previous(self, tenant: str, response_id: str, param: str) -> StoredResponse:
        """Return a response to continue: a local one, or one that the tenant has stored.

        Raises:
          PreviousResponseNotFoundError: there is none with this id.
        """
        mine = self._responses.get(response_id)
        if mine is not None:
            self._responses.move_to_end(response_id)
            return mine
        try:
            return self._store.get(tenant, response_id, param=param)
        except UnknownResponseError as error:
            raise PreviousResponseNotFoundError(
                "unknown response: it is not stored, and this connection no longer keeps it; omit "
                "previous_response_id and send the whole input",
                param=param,
            ) from error

    def add(self, response: StoredResponse) -> None:
        """Enter a response of this connection, and delete the oldest beyond `MAX_LOCAL`."""
        self._responses[response.id] = response
        if len(self._responses) > MAX_LOCAL:
            self.forget(next(iter(self._responses)))

    def forget(self, response_id: str) -> None:
        """Delete a response, if it is local."""
        response = self._responses.pop(response_id, None)
        if response is not None:
            self._store.delete(response)

    def dropped(self, response: StoredResponse) -> None:
        """Remove a response that the store has evicted."""
        self._responses.pop(response.id, None)

    def close(self) -> None:
        while self._responses:
            self.forget(next(iter(self._responses)))
