"""Admissions of a step: waiting sequences that get a slot, blocks and a first chunk."""

from __future__ import annotations

from collections.abc import Callable

from forge_jax.schedule.config import SchedulerConfig
from forge_jax.schedule.partial_plan import Chunk, PartialPlan
from forge_jax.schedule.plan import Admission
from forge_jax.schedule.prefill import PrefillPart
from forge_jax.schedule.prefix_cache import PrefixCache
from forge_jax.schedule.request import Sequence
from forge_jax.schedule.slots import Slots


class AdmissionPart:
    """The admission of waiting sequences in the order of the policy. None is overtaken.

    To avoid thrashing, a sequence is admitted only if the blocks for all its known tokens are free.
    Blocks that running prompts still need, and one for each running sequence that can grow, are
    reserved.

    Attributes:
      cached_prompt_tokens: prompt tokens of admitted requests that the prefix cache had.
      computed_prompt_tokens: prompt tokens of admitted requests that it did not have.
    """

    def __init__(
        self,
        slots: Slots,
        prefixes: PrefixCache,
        prefill: PrefillPart,
        clock: Callable[[], float],
    ):
        self.cached_prompt_tokens = 0
        self.computed_prompt_tokens = 0
        self._slots = slots
        self._pool = slots.pool
        self._prefixes = prefixes
        self._prefill = prefill
        self._clock = clock

    def fill(self, plan: PartialPlan, config: SchedulerConfig, pools: bool | None) -> None:
        """Admit sequences within the budget, and add their first chunks.

        Args:
          pools: admit only sequences with (True) or without (False) `pooling`. None: both.
        """
        budget, queue, slots = plan.budget, self._slots.backlog.queue, self._slots
        if not (budget.tokens and budget.sequences and len(queue)):
            return
        reserved = slots.reserved_blocks()
        if reserved >= self._pool.num_free:
            return  # every sequence needs a block, so sorting the queue can be skipped
        for seq in queue.in_order(self._clock()):
            if not (budget.tokens and budget.sequences):
                break
            if pools is not None and (seq.pooling is not None) != pools:
                break  # it is admitted in the next step of its kind, and not overtaken
            chunk = self._admit(seq, plan, config, reserved)
            if chunk is None:
                break
            needed = slots.blocks_for(len(seq.tokens))
            reserved += needed - len(seq.blocks) + (needed < seq.max_blocks)
            budget.take_sequence()
            plan.add_chunk(chunk)
            plan.admissions.append(_admission(seq))

    def _admit(
        self, seq: Sequence, plan: PartialPlan, config: SchedulerConfig, reserved: int
    ) -> Chunk | None:
        """Give a waiting sequence a slot and the blocks of its first chunk.

        None if there are not enough blocks, or not all of its tokens have been read.
        """
        if seq.resume_after > self._slots.in_flight.last_read:
            return None
        pool, slots, prefill = self._pool, self._slots, self._prefill
        hit = self._prefixes.match(seq)
        start = len(hit) * pool.block_size
        num_tokens, num_rows = prefill.chunk_size(seq, start, plan.budget, config)
        if not num_tokens:
            return None
        if not config.chunked_prefill and prefill.is_cut_needlessly(seq, start, num_tokens, config):
            return None
        missing = slots.blocks_for(len(seq.tokens)) - len(hit)
        if missing + reserved > pool.num_free - pool.num_unreferenced(hit):
            return None
        pool.acquire_cached(hit)
        pool.record_lookup(len(seq.tokens), start)
        blocks = pool.allocate(slots.blocks_for(start + num_tokens) - len(hit))
        assert blocks is not None
        if seq.epoch == 0:
            self._count_first(seq, start)
        slots.admit(seq, hit + blocks, num_shared=len(hit))
        return Chunk(seq, num_tokens, num_rows, ())

    def _count_first(self, seq: Sequence, num_cached: int) -> None:
        """Record the cached tokens and the queue time of a sequence's first admission."""
        seq.num_cached = num_cached
        seq.queue_s = max(self._clock() - seq.queued_s, 0.0)
        if seq.leads:  # a prompt counts once, regardless of n
            cached = min(num_cached, seq.prompt_len)
            self.cached_prompt_tokens += cached
            self.computed_prompt_tokens += seq.prompt_len - cached


def _admission(seq: Sequence) -> Admission:
    assert seq.slot is not None
    prompt = seq.request.prompt_token_ids
    return Admission(
        slot=seq.slot,
        seed=seq.seed,
        params=seq.params,
        stop_ids=tuple(seq.stop_ids),
        prompt_len=seq.prompt_len,
        block_table=tuple(seq.blocks),
        tokens=tuple(seq.tokens) if seq.num_output else prompt,
        seq_key=seq.key,
        lora=0 if seq.request.lora is None else seq.request.lora.place,
    )
