"""The gate of an engine thread: while it is closed, new requests wait in front of the scheduler."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, InvalidStateError

from forge_jax.engine.commands import ActivateExecutables, ActivatePooling
from forge_jax.schedule.request import Request

Activation = ActivateExecutables | ActivatePooling


class Gate:
    """New requests of a paused engine, and activations of one whose arrays are off the device.

    Only the engine thread changes it. Any thread may read `closed` and `num_waiting`.
    """

    def __init__(self) -> None:
        self.closed = False
        self.holds_activations = False  # an activation runs a step, which needs all arrays
        self.num_waiting = 0  # samples of held requests
        self._requests: dict[str, Request] = {}
        self._activations: list[Activation] = []
        self._on_idle: list[Future[None]] = []

    def hold(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._count()

    def drop(self, request_id: str) -> Request | None:
        """Remove a held request and return it; None if it is not held."""
        request = self._requests.pop(request_id, None)
        self._count()
        return request

    def take_requests(self) -> list[Request]:
        """Remove all held requests, and return them in order of arrival."""
        requests = list(self._requests.values())
        self._requests.clear()
        self._count()
        return requests

    def hold_activation(self, command: Activation) -> None:
        self._activations.append(command)

    def take_activations(self) -> list[Activation]:
        activations, self._activations = self._activations, []
        return activations

    def when_idle(self, idle: Future[None]) -> None:
        """Complete a future once all requests that are behind the gate have finished."""
        self._on_idle.append(idle)

    @property
    def awaits_idle(self) -> bool:
        return bool(self._on_idle)

    def idle(self, error: Exception | None = None) -> None:
        """Complete the futures of `when_idle`, with an exception if the wait is over without it."""
        waiting, self._on_idle = self._on_idle, []
        for future in waiting:
            with contextlib.suppress(InvalidStateError):  # its caller has left
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)

    def _count(self) -> None:
        self.num_waiting = sum(request.params.n for request in self._requests.values())
