"""Sequences without a slot: queued, or waiting to be queued."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from forge_jax.schedule.lifecycle import Status
from forge_jax.schedule.policy import Rank, WaitingQueue
from forge_jax.schedule.request import Sequence


class Backlog:
    """The waiting sequences.

    QUEUED sequences are in `queue`. FOLLOWING ones wait until the first sequence of their request
    has filled the prefix cache. HELD ones are excluded while admissions are restricted.
    LOADING ones wait for blocks from host memory.

    Args:
      make_queue: returns an empty queue of the policy.

    Attributes:
      queue: the QUEUED sequences.
      followers: the FOLLOWING sequences by request, without empty entries.
      loading: the LOADING sequences, each with the number of its load.
    """

    def __init__(self, make_queue: Callable[[], WaitingQueue]):
        self.queue = make_queue()
        self.followers: dict[str, list[Sequence]] = {}
        self.loading: dict[Sequence, int] = {}
        self._make_queue = make_queue
        self._num_followers = 0
        self._only: frozenset[Sequence] | None = None  # sequences that may be admitted; None: all
        self._held: list[Sequence] = []

    def rank(self, seq: Sequence) -> Rank:
        """Return the rank of a sequence among all; the lowest is served first."""
        return self.queue.rank(seq)

    def push(self, seq: Sequence) -> None:
        """Queue a QUEUED sequence, or hold it."""
        if self._only is None or seq in self._only:
            self.queue.push(seq)
        else:
            seq.hold()
            self._held.append(seq)

    def follow(self, request_id: str, seqs: Seq[Sequence]) -> None:
        """Keep sequences until `release_followers` is called for their request."""
        for seq in seqs:
            seq.follow()
        self.followers[request_id] = list(seqs)
        self._num_followers += len(seqs)

    def release_followers(self, request_id: str) -> None:
        released = self.followers.pop(request_id, ())
        self._num_followers -= len(released)
        for seq in released:
            seq.release()
            self.push(seq)

    def load(self, seq: Sequence, number: int) -> None:
        """Keep the sequence that the queue has just yielded until a load has finished."""
        self.queue.remove(seq)
        seq.load()
        self.loading[seq] = number

    def release_loading(self, number: int) -> list[Sequence]:
        """Queue the sequences that wait for a load again, and return them."""
        released = [seq for seq, load in self.loading.items() if load == number]
        for seq in released:
            del self.loading[seq]
            seq.release()
            self.push(seq)
        return released

    def forget(self, seq: Sequence, status: Status) -> None:
        """Remove a sequence that has just finished, and had `status` before."""
        if status is Status.FOLLOWING:
            followers = self.followers[seq.request_id]
            followers.remove(seq)
            self._num_followers -= 1
            if not followers:
                del self.followers[seq.request_id]
        elif status is Status.HELD:
            self._held.remove(seq)
        elif status is Status.LOADING:
            del self.loading[seq]
        else:
            self.queue.forget(seq)

    def restrict(self, only: Iterable[Sequence] | None, waiting: Iterable[Sequence]) -> None:
        """Queue only the sequences of `only` from now on, or all if it is None.

        Args:
          waiting: all waiting sequences, in order of arrival.
        """
        self._only = None if only is None else frozenset(only)
        self.queue, self._held = self._make_queue(), []
        for seq in waiting:
            if seq.status is Status.HELD:
                seq.release()
            if seq.status is Status.QUEUED:
                self.push(seq)

    @property
    def num_deferred(self) -> int:
        """Sequences that wait for another sequence or for host memory, not for a slot or blocks."""
        return self._num_followers + len(self._held) + len(self.loading)

    def __len__(self) -> int:
        return len(self.queue) + self.num_deferred
