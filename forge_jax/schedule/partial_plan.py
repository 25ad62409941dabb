"""A plan for one step while it is being assembled."""

from __future__ import annotations

from typing import NamedTuple

from forge_jax.schedule.plan import Admission, ScheduledSequence
from forge_jax.schedule.request import Sequence
from forge_jax.schedule.step_budget import StepBudget


class Chunk(NamedTuple):
    """Tokens of one sequence, starting at the first uncomputed one."""

    seq: Sequence
    num_tokens: int
    num_rows: int  # number of last tokens that get logits
    new_blocks: tuple[tuple[int, int], ...]  # (index in the block table, block)


class PartialPlan:
    """Rows that have been decided, and the remaining budget.

    Tokens do not count as computed or sampled before the plan is complete.

    Attributes:
      decodes: sequences that decode, by rank.
      grown: new blocks of decodes: (row, index in the block table, block).
      chunks: chunks of running sequences, then of admitted ones.
      drafts: rows that verify drafts. Their sequences are no longer in `decodes`.
    """

    # One is created per step: a dataclass takes three times as long to create its lists.
    __slots__ = ("admissions", "budget", "chunks", "decodes", "drafts", "grown")

    def __init__(self, budget: StepBudget):
        self.budget = budget
        self.decodes: list[Sequence] = []
        self.grown: list[tuple[int, int, int]] = []
        self.chunks: list[Chunk] = []
        self.admissions: list[Admission] = []
        self.drafts: dict[Sequence, ScheduledSequence] = {}

    def add_chunk(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.budget.take(chunk.num_tokens, chunk.num_rows)

    def drop_preempted(self) -> None:
        """Remove decodes that have lost their slots.

        Preemption starts from the last rank, so these are the last rows.
        """
        decodes, grown = self.decodes, self.grown
        while decodes and decodes[-1].slot is None:
            decodes.pop()
            self.budget.give_back(1, 1)
        while grown and grown[-1][0] >= len(decodes):
            grown.pop()
