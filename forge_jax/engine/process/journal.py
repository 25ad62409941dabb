"""`Journal`: accepted requests and their tokens so far, all of which must survive a crash.

It also selects the requests for the next process, because a request that crashes every process is
isolated by bisection (`fault_isolation.Bisection`). It does no I/O.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from forge_jax.engine.core import Outputs
from forge_jax.engine.fault_isolation import Bisection
from forge_jax.engine.streams import last_deltas
from forge_jax.errors import ForgeError
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.request import FinishReason, Request


@dataclass(slots=True)
class Entry:
    """An accepted request, and the tokens of its samples."""

    request: Request
    outputs: dict[int, list[int]]  # tokens of unfinished samples
    num_tokens: int = 0  # over all samples
    sent: bool = False  # True if sent to the current process
    aborted: bool = False

    @classmethod
    def of(cls, request: Request) -> Entry:
        so_far = request.outputs or {index: () for index in range(request.params.n)}
        return cls(request, {index: list(tokens) for index, tokens in so_far.items()})

    def remaining(self) -> Request:
        """Return the request with its output so far, for another process."""
        outputs = {index: tuple(tokens) for index, tokens in self.outputs.items()}
        return dataclasses.replace(self.request, outputs=outputs)

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self.outputs.pop(delta.index, None)
            elif delta.index in self.outputs:
                self.outputs[delta.index] += delta.token_ids
            self.num_tokens += len(delta.token_ids)


class Journal:
    """The entries of all unfinished requests, in order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._bisection: Bisection[str] = Bisection()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def searching(self) -> bool:
        """True while a crashing request is being isolated. New requests wait meanwhile."""
        return self._bisection.active

    @property
    def num_tokens(self) -> int:
        """Tokens of all unfinished samples."""
        return sum(len(out) for entry in self._entries.values() for out in entry.outputs.values())

    def accept(self, request: Request, *, sent: bool) -> None:
        """Add a request.

        Args:
          sent: True if it is already on its way to a process.
        """
        entry = self._entries[request.request_id] = Entry.of(request)
        entry.sent = sent

    def find(self, request_id: str) -> Entry | None:
        return self._entries.get(request_id)

    def requests_with(self, lora: str) -> list[str]:
        """Return the ids of the requests that use the adapter of this name."""
        return [
            request_id
            for request_id, entry in self._entries.items()
            if entry.request.lora is not None and entry.request.lora.name == lora
        ]

    def steered(self) -> list[str]:
        """Return the ids of the requests with steering vectors."""
        return [each for each, entry in self._entries.items() if entry.request.params.steered_by]

    def unsent(self) -> Iterator[Request]:
        """Yield the rest of each request that may run and has not been sent. Mark it as sent."""
        only = self._bisection.only
        for request_id in list(self._entries if only is None else only):
            entry = self._entries[request_id]
            if not entry.sent:
                entry.sent = True
                yield entry.remaining()

    def take(self, outputs: Outputs) -> bool:
        """Record the tokens of a step. Return True if other requests may run now."""
        for request_id, deltas in outputs.items():
            entry = self._entries.get(request_id)
            if entry is not None:
                entry.take(deltas)
                if not entry.outputs:
                    del self._entries[request_id]
        return self._bisection.drop(outputs)

    def end(
        self, request_id: str, reason: FinishReason, error: ForgeError | None = None
    ) -> tuple[Outputs, bool]:
        """Remove a request.

        Returns:
          The last deltas of its unfinished samples, and True if other requests may run now.
        """
        entry = self._entries.pop(request_id)
        may_run = self._bisection.drop([request_id])
        return {request_id: last_deltas(entry.outputs, reason, error)}, may_run

    def crashed(self) -> tuple[list[str], list[str]]:
        """Record that the process has ended: no request counts as sent.

        Returns:
          The ids of aborted requests, and of requests that must not run again because processes
          crash whenever they do.
        """
        aborted = [request_id for request_id, entry in self._entries.items() if entry.aborted]
        self._bisection.drop(aborted)
        reached: list[tuple[str, int]] = []
        for request_id, entry in self._entries.items():
            if entry.sent and not entry.aborted:
                entry.sent = False
                reached.append((request_id, entry.num_tokens))
        return aborted, self._bisection.failed(reached)

    def release(self) -> list[Request]:
        """Remove all requests. Return the rest of each, for other engines."""
        requests = [entry.remaining() for entry in self._entries.values()]
        self.clear()
        return requests

    def clear(self) -> None:
        self._entries.clear()
        self._bisection = Bisection()
