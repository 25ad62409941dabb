"""The remaining capacity of one step while it is planned."""

from __future__ import annotations

from forge_jax.schedule.config import SchedulerConfig


class StepBudget:
    """Tokens, rows and sequences that a step can still take.

    The parts of a plan draw from one budget, in this order: decodes, prefill chunks, admissions,
    drafts. Tokens that are held back from prefill chunks are left for drafts.

    Attributes:
      tokens: tokens that may still be computed.
      rows: tokens that may still get logits.
      sequences: sequences that may still be admitted, which is the number of free slots.
    """

    __slots__ = ("_held_back", "rows", "sequences", "tokens")

    def __init__(self, config: SchedulerConfig, sequences: int = 0):
        self.tokens = config.max_num_batched_tokens
        self.rows = config.max_rows
        self.sequences = sequences
        self._held_back = 0

    @property
    def sampled_tokens(self) -> int:
        """Decodes or drafts that still fit: each takes a token and a row."""
        return self.tokens if self.tokens < self.rows else self.rows

    def take(self, tokens: int, rows: int) -> None:
        self.tokens -= tokens
        self.rows -= rows

    def give_back(self, tokens: int, rows: int) -> None:
        """Undo `take` for sequences that have lost their slots."""
        self.tokens += tokens
        self.rows += rows

    def take_sequence(self) -> None:
        self.sequences -= 1

    def hold_back(self, tokens: int) -> None:
        """Withhold this many remaining tokens from prefill chunks."""
        self.tokens -= tokens
        self._held_back += tokens

    def release_held_back(self) -> None:
        """Make the tokens that were held back available to drafts."""
        self.tokens += self._held_back
        self._held_back = 0
