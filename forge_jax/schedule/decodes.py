"""Decodes of a step: one token of each sequence that waits for its next."""

from __future__ import annotations

from typing import NamedTuple

from forge_jax.schedule.lifecycle import Status
from forge_jax.schedule.partial_plan import PartialPlan
from forge_jax.schedule.plan import FED_BACK, Decodes
from forge_jax.schedule.request import Sequence
from forge_jax.schedule.slots import Slots

_DECODING, _PREFILLING = Status.DECODING, Status.PREFILLING


class _Standing(NamedTuple):
    """Columns that plans with the same decodes share. Nearly every plan is like the last."""

    num_changes: int  # count of slot changes
    seqs: list[Sequence]
    slots: list[int]
    keys: list[tuple[str, int]]
    salts: list[str]
    epochs: list[int]


class DecodePart:
    def __init__(self, slots: Slots):
        self._slots = slots
        self._standing = _Standing(-1, [], [], [], [], [])

    def forget(self) -> None:
        """Drop the columns of the last plan, which refer to its sequences."""
        self._standing = _Standing(-1, [], [], [], [], [])

    def fill(self, plan: PartialPlan, *, masks_late: bool) -> tuple[list[Sequence], bool]:
        """Add the decodes of a step.

        Returns:
          The running sequences that prefill, by rank, and True if any sequence waits for its next
          token.
        """
        decodes, grown, block_size = plan.decodes, plan.grown, self._slots.pool.block_size
        prompts: list[Sequence] = []
        awaited = False
        room = plan.budget.sampled_tokens
        # Preemption takes from the end of `running`, which this loop has not reached. No decode is
        # therefore dropped here, and the loop ends at the shortened end.
        for seq in self._slots.running:
            if seq.status is not _DECODING:
                if seq.status is _PREFILLING:
                    prompts.append(seq)
                continue
            awaited = True
            if seq.needs_host_token and seq.num_pending and not masks_late:
                continue
            if len(decodes) == room:
                continue
            if not seq.num_computed % block_size:  # otherwise its last block has a free position
                added = self._slots.grow(seq, seq.num_computed + 1)
                if added is None:
                    continue
                for index, block in added:
                    grown.append((len(decodes), index, block))
            decodes.append(seq)
        plan.budget.take(len(decodes), len(decodes))
        return prompts, awaited

    def columns(self, plan: PartialPlan) -> tuple[Decodes, list[int]]:
        """Return the decodes of a plan as columns, and the epochs of their sequences."""
        standing = self._standing_of(plan.decodes)
        seqs = standing.seqs
        columns = Decodes(
            slots=standing.slots,
            starts=[seq.num_computed for seq in seqs],
            tokens=[FED_BACK if seq.num_pending else seq.tokens[-1] for seq in seqs],
            num_outputs=[seq.num_computed + 1 - seq.prompt_len for seq in seqs],
            new_blocks=plan.grown,
            seq_keys=standing.keys,
            salts=standing.salts,
        )
        return columns, standing.epochs

    def _standing_of(self, seqs: list[Sequence]) -> _Standing:
        standing, num_changes = self._standing, self._slots.num_changes
        if standing.num_changes != num_changes or standing.seqs != seqs:
            standing = self._standing = _Standing(
                num_changes,
                seqs,
                [seq.slot for seq in seqs],  # type: ignore[misc]
                [seq.key for seq in seqs],
                [seq.salt for seq in seqs],
                [seq.epoch for seq in seqs],
            )
        return standing
