"""The states of an engine, and the only transitions between them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Literal

State = Literal[
    "starting", "serving", "ready", "recovering", "unavailable", "stopping", "stopped", "failed"
]

TRANSITIONS: Mapping[State, frozenset[State]] = {
    "starting": frozenset({"serving", "ready", "stopping", "failed"}),
    "serving": frozenset({"ready", "recovering", "stopping", "failed"}),
    "ready": frozenset({"recovering", "stopping", "failed"}),
    "recovering": frozenset({"serving", "ready", "unavailable", "stopping", "failed"}),
    "unavailable": frozenset({"serving", "ready", "stopping", "failed"}),
    "stopping": frozenset({"stopped", "failed"}),
    "failed": frozenset({"stopped"}),
    "stopped": frozenset(),
}


class Lifecycle:
    """The state of one engine. Thread-safe.

        from        to          when
        starting    serving     `start`: the engine takes requests while it compiles
        starting    ready       `start` of a process in which everything is compiled
        starting    stopping    `stop` before `start`
        starting    failed      an unrecoverable error
        serving     ready       the last executable is compiled and in use
        serving     recovering  the engine process ended: a successor is launched
        serving     stopping    `stop`: no new requests, running ones may finish
        serving     failed      an unrecoverable error
        ready       recovering  the engine process ended: a successor is launched
        ready       stopping    `stop`
        ready       failed      an unrecoverable error
        recovering  serving     the successor is connected and still compiles
        recovering  ready       the successor is connected
        recovering  unavailable  launches keep failing: other engines of the group took its requests
        recovering  stopping    `stop`: the launch continues while requests drain
        recovering  failed      no successor could be launched
        unavailable serving     a successor is connected at last and still compiles
        unavailable ready       a successor is connected at last
        unavailable stopping    `stop`
        unavailable failed      no other engine of the group takes requests any more
        stopping    stopped     every stream has ended
        stopping    failed      an error while requests drained
        failed      stopped     `stop`

    A process that ends while the engine is stopping is replaced without a transition. An engine in
    a thread never enters "recovering": its core retries failed steps. Only an engine of a group
    enters "unavailable".
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: State = "starting"

    @property
    def state(self) -> State:
        return self._state

    @property
    def takes_requests(self) -> bool:
        """True if requests can be submitted. A recovering engine computes them later."""
        return self.state in ("serving", "ready", "recovering")

    @property
    def healthy(self) -> bool:
        """True if accepted requests are being computed."""
        return self.state in ("serving", "ready", "stopping")

    @property
    def ended(self) -> bool:
        """True if no request will be computed any more."""
        return self.state in ("stopped", "failed")

    def enter(self, state: State) -> bool:
        """Make a transition.

        Returns:
          True if the state has changed. False if the table has no such transition, for example
          because another thread has stopped the engine. The state is then unchanged.
        """
        with self._lock:
            if state not in TRANSITIONS[self._state]:
                return False
            self._state = state
            return True
