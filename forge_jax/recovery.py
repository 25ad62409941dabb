"""Who may run after a step has raised, and whose fault it was.

A step that raises loses nothing: the tokens are on the host, so everybody is computed anew. If it
was chance, that is all. If a request makes its step raise each time, everybody who runs beside it
gets nowhere; so sequences that were `MAX_FAILURES` times in a step that raised, and got no further
in between, are run by halves, each half alone, until the one is found that fails by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from forge_jax.schedule.request import Sequence
from forge_jax.schedule.scheduler import Gain

MAX_FAILURES = 3


class Bisection:
    """Counts failures by sequence, and says which sequences may run.

    `failed` after each step that raised, `gained` after each that did not, `drop` for sequences
    that ended otherwise. Whenever `changed` is true afterwards, `only` is for the scheduler.
    """

    def __init__(self) -> None:
        self._failures: dict[Sequence, int] = {}  # since the sequence last got further
        self._furthest: dict[Sequence, int] = {}  # tokens at which it has failed
        self._groups: deque[set[Sequence]] = deque()  # the first runs alone; each runs in its turn

    @property
    def active(self) -> bool:
        """Whether a culprit is being looked for."""
        return bool(self._groups)

    @property
    def only(self) -> set[Sequence] | None:
        """Who may run; None: everybody."""
        return self._groups[0] if self._groups else None

    def failed(self, reached: Iterable[tuple[Sequence, int]]) -> list[Sequence]:
        """A step raised that would have computed each sequence up to so many tokens.

        Returns those that are to blame: they must not run again.
        """
        in_step = []
        for seq, tokens in reached:
            if seq.finished:
                continue
            in_step.append(seq)
            further = tokens > self._furthest.get(seq, -1)
            self._failures[seq] = 1 if further else self._failures[seq] + 1
            self._furthest[seq] = max(tokens, self._furthest.get(seq, -1))
        if self._groups:
            suspects = [seq for seq in in_step if seq in self._groups[0]]
        else:
            suspects = [seq for seq in in_step if self._failures[seq] >= MAX_FAILURES]
            if suspects:
                self._groups.append(set(suspects))
        if not suspects:
            return []
        if len(in_step) == 1 and self._failures[suspects[0]] >= MAX_FAILURES:
            self.drop(suspects)
            return suspects
        if len(self._groups[0]) > 1:
            ordered = sorted(self._groups.popleft(), key=lambda seq: seq.order)
            half = len(ordered) // 2
            self._groups.extendleft((set(ordered[half:]), set(ordered[:half])))
        return []

    def gained(self, gains: Iterable[Gain]) -> bool:
        """Takes what a step brought; true if `only` has changed."""
        if not self._failures:
            return False
        return self.drop(seq for seq, got in gains if got.token_ids or seq.finished)

    def drop(self, seqs: Iterable[Sequence]) -> bool:
        """These are suspected no more: they got further, or ended. True if `only` has changed."""
        for seq in seqs:
            self._failures.pop(seq, None)
            self._furthest.pop(seq, None)
            for group in self._groups:
                group.discard(seq)
        before = len(self._groups)
        self._groups = deque(group for group in self._groups if group)
        return len(self._groups) != before
