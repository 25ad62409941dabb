"""`Connection`: one engine process on the event loop, with messages in both directions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from forge_jax.engine.process.launcher import ChildProcess
from forge_jax.engine.process.messages import FromEngine, ToEngine, decoded, frame, from_engine
from forge_jax.host import supervise

log = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    """The socket of an engine process.

    Args:
      receive: receives each message.
      on_lost: called with this connection when it closes, which means that its process ends.
      on_error: called with an exception of either, after which the engine's records may be
        inconsistent.
    """

    def __init__(
        self,
        process: ChildProcess,
        *,
        receive: Callable[[FromEngine], None],
        on_lost: Callable[[Connection], None],
        on_error: Callable[[BaseException], None],
    ):
        self.process = process
        self.lost = False
        self._receive = supervise.guarded(receive, "handling an engine message", on_error)
        self._on_lost = supervise.guarded(on_lost, "closing a connection", on_error)

    def send(self, message: ToEngine) -> None:
        self._transport.write(frame(message))

    def close(self) -> None:
        """Close the socket at once. The process then exits."""
        self._transport.abort()

    @property
    def closing(self) -> bool:
        return self.lost or self._transport.is_closing()

    # ---- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.WriteTransport) -> None:  # type: ignore[override]
        self._transport = transport
        for message in self.process.early:
            self._receive(message)

    def data_received(self, data: bytes) -> None:
        try:
            messages = list(decoded(self.process.frames, data, from_engine))
        except ValueError:
            log.exception("the engine process sent a message that does not match the schema")
            self._transport.abort()
            return
        for message in messages:
            self._receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._on_lost(self)
