"""Sequences with a slot: their order, and the blocks that they hold."""

from __future__ import annotations

from bisect import bisect_left, insort

from forge_jax.schedule.backlog import Backlog
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.in_flight import InFlight
from forge_jax.schedule.request import FinishReason, Sequence


class Slots:
    """The allocator of slots and blocks.

    Blocks are allocated as tokens need them. If none is left, the running sequence of the last rank
    releases all its blocks and is queued again. The tokens are recomputed later, except those whose
    blocks are still in the prefix cache.

    A step in flight may still write to a slot or block that has been reallocated. It runs before
    any step of the next owner, because the device executes steps in order.

    Attributes:
      running: the sequences with a slot, by rank. Read-only.
      free: slots.
      pool, backlog, in_flight: the blocks, the sequences without a slot, and the steps in flight.
      num_changes: how often a slot was allocated or released.
      num_preemptions: preemptions of all sequences.
    """

    def __init__(self, count: int, pool: BlockPool, backlog: Backlog, in_flight: InFlight):
        self.running: list[Sequence] = []
        self.free = list(range(count - 1, -1, -1))  # a stack
        self.pool = pool
        self.backlog = backlog
        self.in_flight = in_flight
        self.num_changes = 0
        self.num_preemptions = 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def admit(self, seq: Sequence, blocks: list[int], *, num_shared: int) -> None:
        """Give a slot to a queued sequence, which holds references to `blocks`.

        The first `num_shared` blocks come from the prefix cache.
        """
        self.backlog.queue.remove(seq)
        num_computed = num_shared * self.pool.block_size
        seq.admit(self.free.pop(), blocks, num_shared=num_shared, num_computed=num_computed)
        self.num_changes += 1
        insort(self.running, seq, key=self.backlog.rank)

    def grow(self, seq: Sequence, num_tokens: int) -> tuple[tuple[int, int], ...] | None:
        """Allocate the blocks for the first `num_tokens` of `seq`, preempting others if needed.

        Returns:
          The new (index, block) pairs. None if the sequence itself was preempted.
        """
        held = len(seq.blocks)
        missing = self.blocks_for(num_tokens) - held
        if missing <= 0:
            return ()
        while (blocks := self.pool.allocate(missing)) is None:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return None
        seq.blocks += blocks
        return tuple(enumerate(blocks, held))

    def preempt(self, seq: Sequence) -> None:
        """Queue a running sequence again. Results in flight remain valid and are committed."""
        self._take_back(seq)
        seq.requeue()
        seq.num_preemptions += 1
        seq.resume_after = self.in_flight.last_scheduled
        self.num_preemptions += 1
        self.backlog.push(seq)

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        self._take_back(seq)
        seq.finish(reason, stop_reason)

    def requeue_all(self) -> None:
        """Queue all running sequences again, and empty the pool: the device has lost its KV."""
        for seq in reversed(self.running.copy()):
            self._take_back(seq)
            seq.requeue()
            self.backlog.push(seq)
        self.pool.reset()

    def reserved_blocks(self) -> int:
        """Return the free blocks that running sequences need soon: for prompts, and one to grow."""
        reserved, block_size = 0, self.pool.block_size
        for seq in self.running:
            held, most = len(seq.blocks), seq.max_blocks
            if held < most:
                needed = -(-(len(seq.tokens) + seq.num_pending) // block_size)
                if needed > held:
                    reserved += needed - held
                    held = needed
                reserved += held < most
        return reserved

    def _take_back(self, seq: Sequence) -> None:
        rank = self.backlog.rank
        index = bisect_left(self.running, rank(seq), key=rank)
        assert self.running[index] is seq and seq.slot is not None
        del self.running[index]
        self.num_changes += 1
        self.free.append(seq.slot)
        self.pool.release(seq.blocks)
