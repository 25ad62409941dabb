"""Prefill chunks of a step: of prompts, and of tokens that preempted sequences recompute."""

from __future__ import annotations

from forge_jax.schedule.config import SchedulerConfig
from forge_jax.schedule.partial_plan import Chunk, PartialPlan
from forge_jax.schedule.plan import ScheduledSequence
from forge_jax.schedule.request import Sequence
from forge_jax.schedule.slots import Slots
from forge_jax.schedule.step_budget import StepBudget


class PrefillPart:
    def __init__(self, slots: Slots):
        self._slots = slots

    def fill(self, plan: PartialPlan, prompts: list[Sequence], config: SchedulerConfig) -> None:
        """Add a chunk of each of these running sequences, within the budget."""
        running = self._slots.running
        for seq in prompts:
            if not plan.budget.tokens:
                break
            if seq.slot is None:
                continue  # preempted by an earlier one
            start = seq.num_computed
            num_tokens, num_rows = self.chunk_size(seq, start, plan.budget, config)
            if not num_tokens:
                continue
            num_running = len(running)
            new_blocks = self._slots.grow(seq, start + num_tokens)
            if len(running) < num_running:
                plan.drop_preempted()
            if new_blocks is not None:
                plan.add_chunk(Chunk(seq, num_tokens, num_rows, new_blocks))

    def chunk_size(
        self, seq: Sequence, start: int, budget: StepBudget, config: SchedulerConfig
    ) -> tuple[int, int]:
        """Return the number of tokens to compute from `start`, and how many of them get logits."""
        known = len(seq.tokens)
        num_tokens = min(known - start, budget.tokens)
        if config.prefill_chunk_size is not None:
            num_tokens = min(num_tokens, config.prefill_chunk_size)
        if seq.scoring:
            # Each unscored token needs a row. Tokens scored before a preemption are only
            # recomputed.
            scored = max(seq.num_scored - start, 0)
            num_tokens = min(num_tokens, scored + budget.rows)
            return num_tokens, max(num_tokens - scored, 0)
        if start + num_tokens < known:
            return num_tokens, 0
        if not budget.rows:
            return num_tokens - 1, 0
        return num_tokens, 1

    def is_cut_needlessly(
        self, seq: Sequence, start: int, num_tokens: int, config: SchedulerConfig
    ) -> bool:
        """Return True if an empty step would hold all remaining tokens, but this step does not."""
        rest = len(seq.tokens) - start
        if num_tokens == rest:
            return False
        return self.chunk_size(seq, start, StepBudget(config, 0), config)[0] == rest

    def row(self, chunk: Chunk) -> ScheduledSequence:
        """Return the row of a chunk, and count it as scheduled."""
        seq, num_tokens, num_rows, new_blocks = chunk
        assert seq.slot is not None
        start, end = seq.num_computed, seq.num_computed + num_tokens
        targets: tuple[int, ...] = ()
        if num_rows and seq.scoring:
            targets = tuple(seq.tokens[end - num_rows + 1 : end + 1])
        return ScheduledSequence(
            slot=seq.slot,
            start=start,
            token_ids=tuple(seq.tokens[start:end]),
            num_rows=num_rows,
            samples=seq.prefill(num_tokens),
            new_blocks=new_blocks,
            num_output=len(seq.tokens) - seq.prompt_len,
            scoring=bool(targets),
            targets=targets,
            seq_key=seq.key,
            salt=seq.salt,
            pooling=seq.pooling,
            num_returned=(
                0 if seq.num_returned is None else max(end - max(start, seq.num_returned), 0)
            ),
        )
