"""The host's view of the KV cache: which blocks are free, shared or cached.

A block is in exactly one of three states:

    used       referenced by one or more sequences; registered in the prefix cache or not
    cached     unreferenced but registered: it can be acquired again, or evicted
    free       unreferenced; its content is invalid

The pool has no access to sequences or the device. It never moves or clears KV: a block's old
content stays until its next owner overwrites it.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal

from forge_jax.schedule.cache_events import CacheEvents
from forge_jax.schedule.host_tier import HostTier

Eviction = Literal["lru", "fifo"]


class BlockPool:
    """Free list, reference counts and prefix index over `num_blocks` blocks of `block_size` tokens.

    Only full blocks are registered, under a hash chained over everything before them
    (`hash_block`), so equal hashes mean equal KV. A registered or shared block is never written
    again. A block's owner may write to it only while it holds the only reference and the block is
    not registered.

    `eviction` selects the cached block to evict when no free one is left: the least recently used,
    or the one registered first.

    Attributes:
      events: records evictions and resets. `PrefixCache` records registrations. None: no events.
      host: keeps evicted blocks in host memory. None: they are lost.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: bool = True,
        eviction: Eviction = "lru",
    ):
        assert num_blocks > 0 and block_size > 0
        assert eviction in ("lru", "fifo")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.eviction: Eviction = eviction
        self.queried_tokens = 0  # tokens looked up at admissions
        self.hit_tokens = 0  # tokens among them that were found
        self.num_evictions = 0
        self.events: CacheEvents | None = None
        self.host: HostTier | None = None
        self.reset()

    def reset(self) -> None:
        """Drop every reference and all cached blocks, also on the host. Counters stay."""
        self._refs = [0] * self.num_blocks
        self._hashes: list[bytes | None] = [None] * self.num_blocks
        self._index: dict[bytes, int] = {}
        self._free = list(range(self.num_blocks - 1, -1, -1))  # a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # by last release, oldest first
        self._num_registered = 0  # since the reset: the age of a block for FIFO
        self._ages = [0] * self.num_blocks
        self._oldest: list[tuple[int, int]] = []  # heap of (age, block)
        self._queued_ages = [0] * self.num_blocks  # the age under which a block is in the heap
        if self.host is not None:
            self.host.reset()
        if self.events is not None:
            self.events.cleared()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can return: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that the prefix cache keeps until they are evicted."""
        return len(self._cached)

    def references(self) -> tuple[list[int], list[int]]:
        """Return copies of the reference counts and of the list of cached blocks."""
        return self._refs.copy(), list(self._cached)

    def ref_count(self, block: int) -> int:
        return self._refs[block]

    def is_registered(self, block: int) -> bool:
        return self._hashes[block] is not None

    def is_writable(self, block: int) -> bool:
        """Return True if the block's only owner may still write to it."""
        return self._refs[block] == 1 and self._hashes[block] is None

    def hash_block(self, parent: bytes | None, tokens: Sequence[int], salt: str) -> bytes:
        """Return the 32-byte key of a full block: a hash of the salt and every token up to its end.

        `parent` is the hash of the block before, None for the first. The salt enters with the first
        block and reaches the others through their parents.
        """
        if parent is None:
            parent = hashlib.blake2b(salt.encode(), digest_size=32).digest()
        return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=32).digest()

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix, without referencing them.

        `hashes` is read only up to the first miss, so it may be a generator that computes them.
        """
        if not self.prefix_cache:
            return []
        blocks: list[int] = []
        index = self._index
        for block_hash in hashes:
            block = index.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def has(self, block_hash: bytes) -> bool:
        """Return True if a block is in the prefix cache."""
        return block_hash in self._index

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """Return by how much `num_free` would fall if these blocks were acquired."""
        refs = self._refs
        return sum(refs[block] == 0 for block in blocks)

    def acquire_cached(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these registered blocks."""
        for block in blocks:
            assert self._hashes[block] is not None, f"block {block} is not cached"
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def record_lookup(self, queried_tokens: int, hit_tokens: int) -> None:
        """Count an admission's use of the prefix cache, in tokens."""
        self.queried_tokens += queried_tokens
        self.hit_tokens += hit_tokens

    def allocate(self, n: int) -> list[int] | None:
        """Return `n` writable blocks, evicting cached ones if needed. None if there are too few."""
        if n > self.num_free:
            return None
        blocks = []
        for _ in range(n):
            block = self._free.pop() if self._free else self._evict()
            assert self._refs[block] == 0, f"block {block} is free and referenced"
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block.

        Blocks are released in reverse, so that the tail of a chain is evicted before its head.
        If the head is gone, the tail cannot be found.
        """
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} is released twice"
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if self._hashes[block] is None:
                self._free.append(block)
                continue
            self._cached[block] = None
            if self.eviction == "fifo" and self._queued_ages[block] != self._ages[block]:
                self._queued_ages[block] = self._ages[block]
                heapq.heappush(self._oldest, (self._ages[block], block))

    def register(self, block: int, block_hash: bytes) -> bool:
        """Make a full block findable, and return True.

        If another block already has this hash, that one stays. The result is then False.
        """
        if not self.prefix_cache or block_hash in self._index:
            return False
        assert self._refs[block] > 0, f"block {block} is registered but unreferenced"
        assert self._hashes[block] is None, f"block {block} is registered twice"
        self._index[block_hash] = block
        self._hashes[block] = block_hash
        self._num_registered += 1
        self._ages[block] = self._num_registered
        return True

    def cached_hashes(self) -> set[bytes]:
        """Return the hashes of all registered blocks. Takes O(num_blocks)."""
        return set(self._index)

    def evict_all(self) -> None:
        """Empty the prefix cache, except for blocks that are in use."""
        host, self.host = self.host, None  # evicted blocks are not kept
        while self._cached:
            self._free.append(self._evict())
        self.host = host
        if host is not None:
            host.clear()

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. For tests: takes O(num_blocks)."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, refs in enumerate(self._refs) if refs}
        assert all(refs >= 0 for refs in self._refs), "a negative reference count"
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert not free & cached and not free & used and not cached & used, "states overlap"
        assert len(free) + len(cached) + len(used) == self.num_blocks, "a block is lost"
        registered = {block for block, hashed in enumerate(self._hashes) if hashed is not None}
        assert not free & registered, "a free block is in the prefix index"
        assert cached <= registered, "a cached block cannot be found"
        assert len(self._index) == len(registered), "index and blocks disagree"
        for block_hash, block in self._index.items():
            assert self._hashes[block] == block_hash, f"block {block} is indexed wrongly"

    def _evict(self) -> int:
        if self.eviction == "lru":
            block, _ = self._cached.popitem(last=False)
        else:
            block = self._pop_oldest()
            del self._cached[block]
        block_hash = self._hashes[block]
        assert block_hash is not None
        del self._index[block_hash]
        self._hashes[block] = None
        self.num_evictions += 1
        if self.events is not None:
            self.events.removed(block_hash)
        if self.host is not None:
            self.host.evicted(block_hash, block)
        return block

    def _pop_oldest(self) -> int:
        while True:
            age, block = heapq.heappop(self._oldest)
            assert self._ages[block] == age
            self._queued_ages[block] = 0
            if block in self._cached:
                return block
            # Referenced again: `release` will queue it under the same age.
