"""`Bisection`: selects the jobs that may run after a failure, and isolates the culprit.

Neither a step that raises nor a process that dies loses tokens: these are on the host, so every job
is recomputed. This suffices after a sporadic failure. A request that causes the failure each time
would block all other jobs. Therefore, jobs that took part in `MAX_FAILURES` failures without
progress run in halves, one half at a time, until a job fails alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

MAX_FAILURES = 3


class Bisection[Job: Hashable]:
    """Failure counts by job, and the resulting restriction on which jobs may run.

    A job is a sequence if steps raise, and a request if processes die. Call `failed` after each
    failure, and `drop` for jobs that made progress or ended. Then `only` may run.
    """

    def __init__(self) -> None:
        self._failures: dict[Job, int] = {}  # since the job's last progress
        self._furthest: dict[Job, int] = {}  # token counts at which it has failed
        self._groups: deque[dict[Job, None]] = deque()  # suspects; only the first group runs

    @property
    def active(self) -> bool:
        """True while suspects run in halves."""
        return bool(self._groups)

    @property
    def only(self) -> Iterable[Job] | None:
        """The jobs that may run; None: all."""
        return self._groups[0] if self._groups else None

    def failed(self, reached: Iterable[tuple[Job, int]]) -> list[Job]:
        """Count a failure.

        Args:
          reached: the unfinished jobs that ran, with the tokens that each would have reached.

        Returns:
          The jobs that caused it, which must not run again.
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
        """Clear jobs that made progress or ended. Return True if `only` has changed."""
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
