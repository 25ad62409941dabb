"""Loads from host memory: sequences that wait for them, and blocks that they fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forge_jax.schedule.backlog import Backlog
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.host_tier import MAX_LOADS, HostTier
from forge_jax.schedule.prefix_cache import PrefixCache
from forge_jax.schedule.request import Sequence


@dataclass(slots=True)
class _Load:
    """Blocks on their way to the device.

    It belongs to no sequence, so an abort does not affect it. It holds a reference to each of its
    blocks, and to the cached blocks before them, without which they could not be found.
    """

    seq: Sequence  # the one that began it
    cached: list[int]
    blocks: list[int]
    void: bool = False  # the prefix cache was emptied: the blocks are released unregistered


class Loading:
    """The loads in progress.

    A sequence waits as LOADING, outside the queue, so that later ones can be admitted. Then its
    blocks are in the prefix cache, and it is queued again at its place.

    Args:
      clock: seconds, for the time that sequences wait.
    """

    def __init__(
        self,
        pool: BlockPool,
        host: HostTier,
        prefixes: PrefixCache,
        backlog: Backlog,
        clock: Callable[[], float],
    ):
        self.host = host
        self._pool = pool
        self._prefixes = prefixes
        self._backlog = backlog
        self._clock = clock
        self._loads: dict[int, _Load] = {}

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def held_blocks(self) -> list[int]:
        """The blocks to which loads hold references."""
        return [block for load in self._loads.values() for block in (*load.cached, *load.blocks)]

    def begin(self, seq: Sequence, hit: list[int]) -> bool:
        """Let a queued sequence wait if the prefix after its cached blocks is in host memory.

        The pool must have blocks for the whole sequence.

        Returns:
          True if it waits. False if it can be admitted now.
        """
        if seq.num_loads >= MAX_LOADS:
            return False
        first, last = len(hit), self._prefixes.cacheable_blocks(seq)
        if first >= last:
            return False
        number = self.host.load_of(seq.block_hashes[first])
        if number is None:
            missing = self._prefixes.missing_on_device(seq, first, last, self.host.has)
            if not missing:
                return False
            copies = self.host.use(missing)  # before the next line evicts blocks, which are copied
            self._pool.acquire_cached(hit)
            blocks = self._pool.allocate(len(missing))
            assert blocks is not None
            number = self.host.load(missing, copies, blocks)
            self._loads[number] = _Load(seq, hit, blocks)
        seq.num_loads += 1
        if seq.num_cached_before is None:
            seq.num_cached_before = first * self._pool.block_size
        seq.load_began_s = self._clock()
        self._backlog.load(seq, number)
        return True

    def finish(self, numbers: Iterable[int]) -> None:
        """Register the blocks of finished loads, and queue the sequences that wait for them."""
        for number in numbers:
            load = self._loads.pop(number)
            first = len(load.cached)
            hashes = load.seq.block_hashes[first : first + len(load.blocks)]
            self.host.loaded(hashes)
            if not load.void:
                self._prefixes.register_loaded(load.seq, first, load.blocks)
            self._pool.release([*load.cached, *load.blocks])
            now_s = self._clock()
            for seq in self._backlog.release_loading(number):
                self.host.waited_s += max(now_s - seq.load_began_s, 0.0)

    def void(self) -> None:
        """Keep the blocks of all loads in progress out of the prefix cache."""
        for load in self._loads.values():
            load.void = True

    def forget(self) -> None:
        """Drop all loads, whose blocks the pool has already taken back."""
        for number in self._loads:
            self._backlog.release_loading(number)
        self._loads.clear()

    def record_admission(self, seq: Sequence, num_cached: int) -> int:
        """Count a sequence's use of host memory. Return the tokens that the device had before."""
        before, seq.num_cached_before = seq.num_cached_before, None
        before = num_cached if before is None else min(before, num_cached)
        self.host.queried_tokens += len(seq.tokens) - before
        self.host.hit_tokens += num_cached - before
        return before
