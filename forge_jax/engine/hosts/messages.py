"""Messages between the hosts of a group, and the connection that carries them.

Messages are MessagePack with a schema, in the frames of `forge_jax.engine.process.messages`. Data
that a host receives is never executed.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import Any

import msgspec

from forge_jax.engine.process.messages import Frames, decoded
from forge_jax.step.mirror import (
    Activate,
    ActivatePooling,
    CompilePooling,
    Complete,
    Operation,
    Run,
    SetAdapter,
    UpdateSlots,
)

RECEIVE_BYTES = 1 << 20
# After a host loses its network, the others notice in about 30 s. Keepalive covers idle
# connections, and the user timeout those with data that the other host has not acknowledged.
KEEPALIVE = (
    *((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)),
    (socket.TCP_USER_TIMEOUT, 30_000),  # ms
)


class Join(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A host's first message to host 0."""

    rank: int
    version: str  # version of forge-jax


class Begin(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """All hosts have joined: start JAX's own group at an address of host 0."""

    port: int


class Reject(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The host cannot take part, for the reason in `message`."""

    message: str


class Value(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A host's number, and then the smallest of all hosts."""

    number: int


class Identity(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Everything that determines a host's executables and weights, by name, as JSON texts."""

    texts: dict[str, str]


type Message = Join | Begin | Reject | Value | Identity | Operation

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(
    Join
    | Begin
    | Reject
    | Value
    | Identity
    | UpdateSlots
    | Run
    | Complete
    | Activate
    | SetAdapter
    | CompilePooling
    | ActivatePooling
)


class Peer:
    """A connection to another host. It blocks."""

    def __init__(self, sock: socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._sock = sock
        self._frames = Frames()
        self._received: deque[Any] = deque()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
          OSError: if the connection is lost.
        """
        payload = _encoder.encode(message)
        self._sock.sendall(len(payload).to_bytes(4, "big") + payload)

    def receive(self, timeout_s: float | None = None) -> Message:
        """Wait for the next message.

        Raises:
          OSError: if the connection is lost, or nothing arrives in time.
          ValueError: if the data is no message.
        """
        self._sock.settimeout(timeout_s)
        try:
            while not self._received:
                data = self._sock.recv(RECEIVE_BYTES)
                if not data:
                    raise ConnectionResetError("the other host closed the connection")
                self._received.extend(decoded(self._frames, data, _decoder))
        finally:
            self._sock.settimeout(None)
        return self._received.popleft()

    def close(self) -> None:
        self._sock.close()
