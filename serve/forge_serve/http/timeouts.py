"""How long the server waits for the network."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds after which a slow client is given up.

    Attributes:
      body_s: for the whole body of a request to arrive.
      write_stall_s: without any progress of a client that reads a stream.
    """

    body_s: float = 60.0
    write_stall_s: float = 30.0
