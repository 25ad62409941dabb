"""What one step may still hold, while it is planned."""

from __future__ import annotations

from forge_jax.schedule.config import SchedulerConfig


class StepBudget:
    """Tokens, rows and sequences that a step can still take.

    The parts of a plan draw from one budget, in this order: decodes, prefill chunks, admissions,
    drafts. Tokens that are held back from the prefill chunks are left for drafts.

    Attributes:
      tokens: that may still be computed.
      rows: that may still get logits.
      sequences: that may still be admitted: free slots.
    """

    __slots__ = ("_held_back", "rows", "sequences", "tokens")

    def __init__(self, config: SchedulerConfig, sequences: int = 0):
        self.tokens = config.max_num_batched_tokens
        self.rows = config.max_rows
        self.sequences = sequences
        self._held_back = 0

    @property
    def sampled_tokens(self) -> int:
        """Decodes or drafts that there is room for: each takes a token and a row."""
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
        """Keep so many of the tokens that are left from prefill chunks."""
        self.tokens -= tokens
        self._held_back += tokens

    def release_held_back(self) -> None:
        """Let drafts have the tokens that were held back."""
        self.tokens += self._held_back
        self._held_back = 0
