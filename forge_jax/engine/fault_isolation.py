"""Who may run after a failure, and whose fault it was.

A step that raises loses nothing, nor does a process that dies: the tokens are on the host, so
everybody is computed anew. If it was chance, that is all. If a request brings the failure about
each time, everybody who runs beside it gets nowhere; so those that were part of `MAX_FAILURES`
failures and got no further in between are run by halves, each half alone, until the one is found
that fails by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

MAX_FAILURES = 3


class Bisection[Job: Hashable]:
    """Counts failures by job, and says which jobs may run.

    A job is a sequence where steps raise, and a request where processes die. `failed` after each
    failure; `drop` for jobs that got further or ended. Then `only` is who may run.
    """

    def __init__(self) -> None:
        self._failures: dict[Job, int] = {}  # since the job last got further
        self._furthest: dict[Job, int] = {}  # tokens at which it has failed
        self._groups: deque[dict[Job, None]] = deque()  # the first runs alone; each has its turn

    @property
    def active(self) -> bool:
        """Whether a culprit is being looked for."""
        return bool(self._groups)

    @property
    def only(self) -> Iterable[Job] | None:
        """Who may run; None: everybody."""
        return self._groups[0] if self._groups else None

    def failed(self, reached: Iterable[tuple[Job, int]]) -> list[Job]:
        """What ran failed. Each unfinished job of it would have got to so many tokens.

        Returns those that are to blame: they must not run again.
        """
        ran = []
        for job, tokens in reached:
            ran.append(job)
            further = tokens > self._furthest.get(job, -1)
            self._failures[job] = 1 if further else self._failures[job] + 1
            self._furthest[job] = max(tokens, self._furthest.get(job, -1))
        if self._groups:
            suspects = [job for job in ran if job in self._groups[0]]
        else:
            suspects = [job for job in ran if self._failures[job] >= MAX_FAILURES]
            if suspects:
                self._groups.append(dict.fromkeys(suspects))
        if not suspects:
            return []
        if len(ran) == 1 and self._failures[suspects[0]] >= MAX_FAILURES:
            self.drop(suspects)
            return suspects
        if len(self._groups[0]) > 1:
            jobs = list(self._groups.popleft())
            half = len(jobs) // 2
            self._groups.extendleft((dict.fromkeys(jobs[half:]), dict.fromkeys(jobs[:half])))
        return []

    def drop(self, jobs: Iterable[Job]) -> bool:
        """These are suspected no more: they got further, or ended. True if `only` has changed."""
        if not self._failures:
            return False
        for job in jobs:
            self._failures.pop(job, None)
            self._furthest.pop(job, None)
            for group in self._groups:
                group.pop(job, None)
        before = len(self._groups)
        self._groups = deque(group for group in self._groups if group)
        return len(self._groups) != before
