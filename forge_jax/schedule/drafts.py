"""Drafts of a step: proposed next tokens of decodes, which the step verifies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from forge_jax.schedule.lifecycle import Status
from forge_jax.schedule.partial_plan import PartialPlan
from forge_jax.schedule.plan import ScheduledSequence
from forge_jax.schedule.request import Sequence
from forge_jax.schedule.slots import Slots

Drafts = Mapping[Sequence, Seq[int]]


def verifiable(running: Iterable[Sequence]) -> list[Sequence]:
    """Return the sequences whose next step could verify drafts.

    All of their tokens have been read, only the last one is uncomputed, and at least two more
    output tokens are allowed.
    """
    return [
        seq
        for seq in running
        if seq.status is Status.DECODING
        and not seq.num_pending
        and len(seq.tokens) < seq.max_len - 1
        and seq.takes_drafts
    ]


class DraftPart:
    def __init__(self, slots: Slots):
        self._slots = slots
        self._pool = slots.pool

    def fill(self, plan: PartialPlan, drafts: Drafts) -> None:
        """Let decodes verify drafts within the remaining budget, in the order of `drafts`.

        They get only free blocks that are not reserved.
        """
        row_of = {seq: row for row, seq in enumerate(plan.decodes)}
        blocks_of = {row: ((index, block),) for row, index, block in plan.grown}
        budget = plan.budget
        budget.release_held_back()
        for seq, guesses in drafts.items():
            if not budget.sampled_tokens:
                break
            row = row_of.get(seq)
            if row is None or seq.num_pending:
                continue
            room = min(budget.sampled_tokens, seq.max_len - len(seq.tokens) - 1)
            count, new_blocks = self._place(seq, min(len(guesses), room))
            if count < 1:
                continue
            assert seq.slot is not None
            plan.drafts[seq] = ScheduledSequence(
                slot=seq.slot,
                start=seq.num_computed,
                token_ids=(seq.tokens[-1], *guesses[:count]),
                num_rows=1 + count,
                samples=True,
                new_blocks=(*blocks_of.get(row, ()), *new_blocks),
                num_output=seq.num_output,
                seq_key=seq.key,
                salt=seq.salt,
                num_returned=1 + count,
            )
            budget.take(count, count)
        _take_out_of_decodes(plan)

    def _place(self, seq: Sequence, count: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Return how many of `count` drafts there are blocks for, and the new blocks."""
        if count < 1:
            return 0, ()
        end = len(seq.tokens)
        new_blocks: tuple[tuple[int, int], ...] = ()
        missing = self._slots.blocks_for(end + count) - len(seq.blocks)
        if missing > 0 and self._pool.num_free >= missing + self._slots.reserved_blocks():
            new_blocks = self._slots.grow(seq, end + count) or ()
        return min(count, len(seq.blocks) * self._pool.block_size - end), new_blocks


def _take_out_of_decodes(plan: PartialPlan) -> None:
    """Remove the sequences that verify drafts from the decodes, with their new blocks."""
    before = plan.decodes
    plan.decodes = [seq for seq in before if seq not in plan.drafts]
    row_of = {seq: row for row, seq in enumerate(plan.decodes)}
    plan.grown = [
        (row_of[before[row]], index, block)
        for row, index, block in plan.grown
        if before[row] in row_of
    ]
