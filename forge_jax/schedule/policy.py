"""The order in which waiting sequences are admitted, and in which running ones are preempted.

A queue holds the waiting sequences. `rank` orders all sequences; the lowest rank is served first.
If blocks run out, the running sequence with the last rank is preempted.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterator
from typing import Protocol

from forge_jax.config import Policy
from forge_jax.schedule.lifecycle import Status
from forge_jax.schedule.request import Sequence

Rank = tuple[int, int]


class WaitingQueue(Protocol):
    def rank(self, seq: Sequence) -> Rank: ...

    def push(self, seq: Sequence) -> None: ...

    def in_order(self, now_s: float) -> Iterator[Sequence]:
        """Yield the next to admit. The caller must `remove` it before the next one, or stop."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Remove the sequence that `in_order` has just yielded."""
        ...

    def forget(self, seq: Sequence) -> None:
        """Drop a sequence that finished while it was waiting."""
        ...

    def __len__(self) -> int: ...


class RankedQueue:
    """A queue that admits by rank alone.

    `by_priority` ranks `request.priority` before arrival. The order is strict: if requests of a
    better priority fill the engine, those of a worse one wait.
    """

    def __init__(self, *, by_priority: bool):
        self._by_priority = by_priority
        self._heap: list[tuple[Rank, Sequence]] = []
        # Number of QUEUED entries in the heap. Other threads read it while the heap changes.
        self._num_waiting = 0

    def rank(self, seq: Sequence) -> Rank:
        return (seq.request.priority if self._by_priority else 0, seq.order)

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (self.rank(seq), seq))
        self._num_waiting += 1

    def in_order(self, now_s: float) -> Iterator[Sequence]:
        while self._heap:
            seq = self._heap[0][1]
            if seq.status is Status.QUEUED:
                yield seq
            else:
                heapq.heappop(self._heap)

    def remove(self, seq: Sequence) -> None:
        assert self._heap[0][1] is seq
        heapq.heappop(self._heap)
        self._num_waiting -= 1

    def forget(self, seq: Sequence) -> None:
        self._num_waiting -= 1
        finished = len(self._heap) - self._num_waiting
        if finished > 64 and finished > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[1].status is Status.QUEUED]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return self._num_waiting


class PrefixQueue:
    """A queue that admits the longest cached prefix first, among the `WINDOW` oldest sequences.

    Sequences that have waited longer than `aging_s` are admitted first, in arrival order, so that a
    popular prefix starves none. Preemption goes by arrival.
    """

    WINDOW = 64

    def __init__(self, *, aging_s: float, cached_tokens: Callable[[Sequence], int]):
        self._aging_s = aging_s
        self._cached_tokens = cached_tokens
        self._window: list[tuple[Rank, Sequence]] = []  # sorted
        self._behind = RankedQueue(by_priority=False)

    def rank(self, seq: Sequence) -> Rank:
        return (0, seq.order)

    def push(self, seq: Sequence) -> None:
        entry = (self.rank(seq), seq)
        if not self._window or entry > self._window[-1]:
            self._behind.push(seq)
            return
        insort(self._window, entry)  # a preempted sequence is older than those in the window
        if len(self._window) > self.WINDOW:
            self._behind.push(self._window.pop()[1])

    def in_order(self, now_s: float) -> Iterator[Sequence]:
        if len(self._window) < self.WINDOW:
            for seq in self._behind.in_order(now_s):
                self._behind.remove(seq)
                self._window.append((self.rank(seq), seq))
                if len(self._window) == self.WINDOW:
                    break
        aged = [seq for _, seq in self._window if now_s - seq.queued_s > self._aging_s]
        fresh = [seq for _, seq in self._window if now_s - seq.queued_s <= self._aging_s]
        yield from aged
        yield from sorted(fresh, key=self._cached_tokens, reverse=True)  # stable: ties by arrival

    def remove(self, seq: Sequence) -> None:
        self._window.remove((self.rank(seq), seq))

    def forget(self, seq: Sequence) -> None:
        entry = (self.rank(seq), seq)
        if entry in self._window:
            self._window.remove(entry)
        else:
            self._behind.forget(seq)

    def __len__(self) -> int:
        return len(self._window) + len(self._behind)


def make_queue(
    policy: Policy, *, aging_s: float, cached_tokens: Callable[[Sequence], int]
) -> WaitingQueue:
    """Return a policy's queue. `cached_tokens` counts a sequence's tokens in the prefix cache."""
    if policy == "prefix":
        return PrefixQueue(aging_s=aging_s, cached_tokens=cached_tokens)
    return RankedQueue(by_priority=policy == "priority")
