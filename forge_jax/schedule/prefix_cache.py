"""Blocks of sequences in the prefix cache: lookup before they run, registration after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.cache_events import CacheEvents
from forge_jax.schedule.request import Sequence


class PrefixCache:
    """The prefix index of sequences. Each block is hashed once, and found or registered."""

    def __init__(self, pool: BlockPool):
        self._pool = pool

    def match(self, seq: Sequence) -> list[int]:
        """Return the cached blocks that `seq` can begin with, without referencing them."""
        return self._pool.match(self._hashes(seq, self.cacheable_blocks(seq)))

    def cached_tokens(self, seq: Sequence) -> int:
        return len(self.match(seq)) * self._pool.block_size

    def cacheable_blocks(self, seq: Sequence) -> int:
        """Return how many leading blocks may be cached. All others have results to return."""
        if seq.pooling == "mean":
            return 0  # the mean needs the hidden states of all tokens
        limit = seq.num_scored if seq.scoring else len(seq.tokens) - 1
        if seq.num_returned is not None:
            limit = min(limit, seq.num_returned)
        return limit // self._pool.block_size

    def register(self, seq: Sequence, num_full: int, *, seen: bool, more: Seq[int] = ()) -> None:
        """Put the first `num_full` blocks, which steps have filled, into the prefix cache.

        Args:
          seen: logits that depend on these blocks were finite. A chunk in the middle of a prompt
            has no logits, so its blocks are only hashed. They are registered with the prompt's last
            chunk.
          more: tokens in these blocks that are not in `seq.tokens` yet: accepted drafts.
        """
        while len(seq.block_hashes) < num_full:
            self.hash_next_block(seq, more)
        if not seen:
            return
        stored: list[int] = []  # indices of blocks that were not registered before
        for index in range(seq.num_registered, num_full):
            if self._pool.register(seq.blocks[index], seq.block_hashes[index]):
                stored.append(index)
        seq.num_registered = num_full
        if stored and self._pool.events is not None:
            self._record(self._pool.events, seq, stored, more)

    def missing_on_device(
        self, seq: Sequence, first: int, last: int, has: Callable[[bytes], bool]
    ) -> list[bytes]:
        """Return the hashes of blocks from `first` on that `has` accepts and the pool lacks.

        They end before the first other block, and before block `last`.
        """
        missing: list[bytes] = []
        for index in range(first, last):
            if index == len(seq.block_hashes):
                self.hash_next_block(seq)
            block_hash = seq.block_hashes[index]
            if self._pool.has(block_hash) or not has(block_hash):
                break
            missing.append(block_hash)
        return missing

    def register_loaded(self, seq: Sequence, first: int, blocks: Seq[int]) -> None:
        """Put blocks that were loaded for `seq`, from index `first` on, into the prefix cache."""
        stored = [
            index
            for index, block in enumerate(blocks, first)
            if self._pool.register(block, seq.block_hashes[index])
        ]
        if stored and self._pool.events is not None:
            self._record(self._pool.events, seq, stored, ())

    def hash_next_block(self, seq: Sequence, more: Seq[int] = ()) -> None:
        """Append to `seq.block_hashes`. The block must be full, including the tokens of `more`."""
        hashes = seq.block_hashes
        tokens = self._tokens(seq, len(hashes), more)
        parent = hashes[-1] if hashes else None
        hashes.append(self._pool.hash_block(parent, tokens, seq.salt))

    def _record(
        self, events: CacheEvents, seq: Sequence, stored: list[int], more: Seq[int]
    ) -> None:
        """Record one event for each run of consecutive blocks in `stored`."""
        hashes, lora = seq.block_hashes, seq.request.lora
        begin = 0
        for end in range(1, len(stored) + 1):
            if end < len(stored) and stored[end] == stored[end - 1] + 1:
                continue
            run, begin = stored[begin:end], end
            events.stored(
                [hashes[index] for index in run],
                hashes[run[0] - 1] if run[0] else None,
                [token for index in run for token in self._tokens(seq, index, more)],
                self._pool.block_size,
                None if lora is None else lora.name,
            )

    def _tokens(self, seq: Sequence, index: int, more: Seq[int]) -> list[int]:
        """Return the tokens of block `index`, which is full including the tokens of `more`."""
        block_size, known = self._pool.block_size, len(seq.tokens)
        start = index * block_size
        tokens = seq.tokens[start : start + block_size]
        if len(tokens) < block_size:
            tokens += more[max(start - known, 0) : max(start + block_size - known, 0)]
        assert len(tokens) == block_size, "only full blocks have a hash"
        return tokens

    def _hashes(self, seq: Sequence, count: int) -> Iterator[bytes]:
        """Yield the hashes of the first `count` blocks, computing missing ones on demand."""
        for index in range(count):
            if index == len(seq.block_hashes):
                self.hash_next_block(seq)
            yield seq.block_hashes[index]
