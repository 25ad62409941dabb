"""Network timeouts of the server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds after which a slow client is disconnected.

    Attributes:
      body_s: maximum time for the whole body of a request to arrive.
      write_stall_s: maximum time in which the client of a stream reads nothing.
    """

    body_s: float = 60.0
    write_stall_s: float = 30.0
