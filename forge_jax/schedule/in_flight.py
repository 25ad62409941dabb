"""Steps that have been scheduled and not committed."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from forge_jax.schedule.request import Sequence


class Dispatched(NamedTuple):
    """The sequences of one step in flight."""

    step: int
    seqs: list[Sequence]  # one per row
    epochs: list[int]  # the sequences' epochs when the step was scheduled


class InFlight:
    """The numbers of steps, and the sequences of those in flight, oldest first.

    Attributes:
      last_scheduled, last_read: step numbers; -1 before the first.
    """

    def __init__(self) -> None:
        self.last_scheduled = -1
        self.last_read = -1
        self._steps: deque[Dispatched] = deque()

    def add(self, seqs: list[Sequence], epochs: list[int]) -> int:
        """Add a step and return its number."""
        self.last_scheduled += 1
        self._steps.append(Dispatched(self.last_scheduled, seqs, epochs))
        return self.last_scheduled

    def take_oldest(self) -> Dispatched:
        """Remove and return the oldest step, which has been read."""
        oldest = self._steps.popleft()
        self.last_read = oldest.step
        return oldest

    def sequences_of(self, step: int) -> list[Sequence]:
        return next(each.seqs for each in self._steps if each.step == step).copy()

    def forget(self) -> None:
        """Drop all steps in flight: they count as read, without results."""
        self._steps.clear()
        self.last_read = self.last_scheduled

    def __len__(self) -> int:
        return len(self._steps)
