"""Admissions of a step: waiting sequences that get a slot, blocks and a first chunk."""

from __future__ import annotations

from collections.abc import Callable

from forge_jax.schedule.config import SchedulerConfig
from forge_jax.schedule.loading import Loading
from forge_jax.schedule.partial_plan import Chunk, PartialPlan
from forge_jax.schedule.plan import Admission
from forge_jax.schedule.prefill import PrefillPart
from forge_jax.schedule.prefix_cache import PrefixCache
from forge_jax.schedule.request import Sequence
from forge_jax.schedule.slots import Slots


class AdmissionPart:
    """The admission of waiting sequences in the order of the policy. None is overtaken.

    The exception are sequences whose prefix is in host memory: others run while it is loaded.

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
        loading: Loading | None = None,
    ):
        self.cached_prompt_tokens = 0
        self.computed_prompt_tokens = 0
        self._slots = slots
        self._pool = slots.pool
        self._prefixes = prefixes
        self._prefill = prefill
        self._clock = clock
        self._loading = loading

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
            if seq.resume_after > slots.in_flight.last_read:
                break  # not all of its tokens have been read
            hit = self._prefixes.match(seq)
            if not self._fits(seq, hit, reserved):
                break
            if self._loading is not None and self._loading.begin(seq, hit):
                continue
            chunk = self._admit(seq, hit, plan, config)
            if chunk is None:
                break
            needed = slots.blocks_for(len(seq.tokens))
            reserved += needed - len(seq.blocks) + (needed < seq.max_blocks)
            budget.take_sequence()
            plan.add_chunk(chunk)
            plan.admissions.append(_admission(seq))

    def _fits(self, seq: Sequence, hit: list[int], reserved: int) -> bool:
        """Return True if there are blocks for all tokens of a sequence, of which it has `hit`."""
        pool = self._pool
        missing = self._slots.blocks_for(len(seq.tokens)) - len(hit)
        return missing + reserved <= pool.num_free - pool.num_unreferenced(hit)

    def _admit(
        self, seq: Sequence, hit: list[int], plan: PartialPlan, config: SchedulerConfig
    ) -> Chunk | None:
        """Give a waiting sequence a slot, its cached blocks, and those of its first chunk.

        None if the step has no room for the chunk.
        """
        pool, slots, prefill = self._pool, self._slots, self._prefill
        start = len(hit) * pool.block_size
        num_tokens, num_rows = prefill.chunk_size(seq, start, plan.budget, config)
        if not num_tokens:
            return None
        if not config.chunked_prefill and prefill.is_cut_needlessly(seq, start, num_tokens, config):
            return None
        pool.acquire_cached(hit)
        on_device = start if self._loading is None else self._loading.record_admission(seq, start)
        pool.record_lookup(len(seq.tokens), on_device)
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
