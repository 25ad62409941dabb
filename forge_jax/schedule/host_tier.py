"""Copies of evicted blocks in host memory: which exist, and which are being made or loaded.

A block that the pool evicts is copied to the host before its next owner overwrites it. Sequences
whose prefix continues in host memory wait until its blocks are back on the device (`loading.py`).
The copies stay on the host until newer ones replace them (LRU).

Only decisions are made here. A `HostMemory` performs the copies, and reports those that have
finished. A copy can be found once it has finished.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from forge_jax.schedule.cache_events import CacheEvents

# Loads per sequence: one that another sequence has begun, and its own. A bound is needed because
# loaded blocks may be evicted before the sequence is admitted.
MAX_LOADS = 2


@dataclass(slots=True, kw_only=True)
class Transfers:
    """Copies to start, all before the next step: `saves`, then `loads`, then `drops`.

    Attributes:
      saves: (copy, block): device to host.
      loads: (load, (copy, block) pairs): host to device.
      drops: copies that are not used anymore.
    """

    saves: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    loads: list[tuple[int, list[tuple[int, int]]]] = field(
        default_factory=list[tuple[int, list[tuple[int, int]]]]
    )
    drops: list[int] = field(default_factory=list[int])

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads or self.drops)


@dataclass(slots=True, kw_only=True)
class Finished:
    """Copies that have arrived on the host, and loads whose blocks all later steps can read."""

    saves: Seq[int] = ()
    loads: Seq[int] = ()


class HostMemory(Protocol):
    """The copies themselves. No method blocks, except `wait`.

    Attributes:
      block_bytes: bytes of one block, over all layers and shards.
    """

    block_bytes: int

    def start(self, transfers: Transfers) -> None:
        """Start copies. Steps that were dispatched before do not see the loaded blocks."""
        ...

    def finished(self) -> Finished:
        """Return everything that has finished since the last call."""
        ...

    def wait(self) -> None:
        """Block until a load can make progress."""
        ...

    def reset(self) -> None:
        """Drop all copies and unfinished loads."""
        ...


@dataclass(frozen=True, kw_only=True)
class HostKVStats:
    """A snapshot of the copies in host memory, and counters since the engine started."""

    num_blocks: int  # copies that exist or are being made
    capacity: int  # blocks
    queried_tokens: int  # tokens of admitted sequences that the device lacked
    hit_tokens: int  # the loaded ones among them
    saved_bytes: int
    loaded_bytes: int
    lost_blocks: int  # evicted while too many copies were in progress
    waited_s: float  # the sum over all sequences


@dataclass(slots=True)
class _Copy:
    number: int
    stored: bool = False


class HostTier:
    """The record of up to `capacity` copies of blocks, by hash.

    Args:
      capacity: blocks.
      block_size: tokens per block, for events.
      max_saving: copies that may be in progress at the same time. Further evicted blocks are lost.

    Attributes:
      queried_tokens: tokens of admitted sequences that the device did not have.
      hit_tokens: tokens among them that were loaded.
      waited_s: time that sequences have waited for loads, in seconds.
      events: records copies and drops. None: no events.
    """

    def __init__(self, capacity: int, block_size: int, max_saving: int):
        assert capacity > 0 and max_saving > 0
        self.capacity = capacity
        self.block_size = block_size
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.num_saved = 0  # blocks, over all time
        self.num_loaded = 0
        self.num_lost = 0  # evicted while too many copies were in progress
        self.waited_s = 0.0
        self.events: CacheEvents | None = None
        self._max_saving = max_saving
        self._num_copies = 0
        self._num_loads = 0
        self.reset()

    def reset(self) -> None:
        """Drop all copies and transfers, also those that are in progress."""
        self._copies: OrderedDict[bytes, _Copy] = OrderedDict()  # least recently used first
        self._saving: dict[int, bytes] = {}
        self._loading: dict[bytes, int] = {}  # by hash: the load
        self._transfers = Transfers()

    @property
    def num_blocks(self) -> int:
        """Copies that exist or are being made."""
        return len(self._copies)

    def evicted(self, block_hash: bytes, block: int) -> None:
        """Keep a block whose next owner will overwrite it in the next step at the earliest."""
        if block_hash in self._copies:
            self._copies.move_to_end(block_hash)
            return
        if len(self._saving) >= self._max_saving:
            self.num_lost += 1
            return
        number = self._num_copies
        self._num_copies += 1
        self._copies[block_hash] = _Copy(number)
        self._saving[number] = block_hash
        self._transfers.saves.append((number, block))
        if len(self._copies) > self.capacity:
            self._drop(next(iter(self._copies)))

    def has(self, block_hash: bytes) -> bool:
        """Return True if a copy can be loaded."""
        copy = self._copies.get(block_hash)
        return copy is not None and copy.stored

    def load_of(self, block_hash: bytes) -> int | None:
        """Return the load in progress that includes a block; None if there is none."""
        return self._loading.get(block_hash)

    def use(self, hashes: Seq[bytes]) -> list[int]:
        """Return the copies of blocks, which become the most recently used.

        A `load` in the same step may use them, even if they are dropped before.
        """
        copies = [self._copies[block_hash].number for block_hash in hashes]
        for block_hash in reversed(hashes):  # the end of a prefix is dropped before its beginning
            self._copies.move_to_end(block_hash)
        return copies

    def load(self, hashes: Seq[bytes], copies: Seq[int], blocks: Seq[int]) -> int:
        """Load copies into blocks that no sequence writes, and return the load's number."""
        number = self._num_loads
        self._num_loads += 1
        self._transfers.loads.append((number, list(zip(copies, blocks, strict=True))))
        self._loading.update(dict.fromkeys(hashes, number))
        return number

    def loaded(self, hashes: Iterable[bytes]) -> None:
        """Count the blocks of a load that has finished."""
        for block_hash in hashes:
            self._loading.pop(block_hash, None)  # two loads may have the same block
            self.num_loaded += 1

    def saved(self, numbers: Iterable[int]) -> None:
        """Make copies that have arrived findable, unless they have been dropped meanwhile."""
        for number in numbers:
            block_hash = self._saving.pop(number)
            self.num_saved += 1
            copy = self._copies.get(block_hash)
            if copy is not None and copy.number == number:
                copy.stored = True
                if self.events is not None:
                    self.events.copied(block_hash, self.block_size)

    def take(self) -> Transfers:
        """Return the copies to start now."""
        transfers, self._transfers = self._transfers, Transfers()
        return transfers

    def clear(self) -> None:
        """Drop all copies. Those in progress are dropped when they finish."""
        for block_hash in list(self._copies):
            self._drop(block_hash)
        self._loading.clear()

    def stats(self, block_bytes: int) -> HostKVStats:
        """Return the statistics of blocks of this size. Thread-safe."""
        return HostKVStats(
            num_blocks=self.num_blocks,
            capacity=self.capacity,
            queried_tokens=self.queried_tokens,
            hit_tokens=self.hit_tokens,
            saved_bytes=self.num_saved * block_bytes,
            loaded_bytes=self.num_loaded * block_bytes,
            lost_blocks=self.num_lost,
            waited_s=self.waited_s,
        )

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. For tests."""
        assert len(self._copies) <= self.capacity, "more copies than the budget allows"
        assert len(self._saving) <= self._max_saving, "more copies in progress than allowed"
        for block_hash, copy in self._copies.items():
            unfinished = self._saving.get(copy.number) == block_hash
            assert copy.stored != unfinished, "a copy is neither stored nor in progress"

    def _drop(self, block_hash: bytes) -> None:
        copy = self._copies.pop(block_hash)
        self._transfers.drops.append(copy.number)
        if copy.stored and self.events is not None:
            self.events.removed(block_hash, "CPU")
