"""Publication of prefix cache events over ZeroMQ, in vLLM's wire format.

A batch is a message of three frames: topic, sequence number (8 bytes, big-endian) and payload. The
payload is MessagePack of `[time, events, rank]`. A subscriber that misses numbers can request them
from the ROUTER socket: it sends the first number, and receives the buffered batches from there. The
sequence number -1 ends them.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from forge_jax.config import EngineConfig
from forge_jax.config.kv_events import FLAG, KVEvents, read_kv_events
from forge_jax.errors import ConfigError
from forge_jax.host import supervise
from forge_jax.schedule.cache_events import AllBlocksCleared, CacheEvent

if TYPE_CHECKING:
    import zmq

END = (-1).to_bytes(8, "big", signed=True)
LINGER_MS = 100  # time to send the last batches when the publisher closes

log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode


class _Batch(msgspec.Struct, array_like=True):
    ts: float  # Unix time in seconds
    events: Seq[CacheEvent] | msgspec.Raw
    data_parallel_rank: int = 0


def encoded(events: Seq[CacheEvent]) -> msgspec.Raw:
    """Return the events in MessagePack."""
    return msgspec.Raw(_encode(events))


class Publisher:
    """A thread that sends batches of events. `publish` never waits for it.

    The first batch clears all blocks, because subscribers may remember an earlier server.

    Args:
      config: the settings, with the addresses of this publisher.
      rank: index of the engine in a group.

    Attributes:
      num_dropped: batches that were dropped because the queue was full. Each one leaves a gap in
        the sequence numbers.
      endpoint, replay_endpoint: the addresses, with the actual ports.
    """

    def __init__(self, config: KVEvents, rank: int = 0):
        zmq = _import_zmq()
        self.num_dropped = 0
        self._config = config
        self._rank = rank
        self._queue: deque[tuple[int, _Batch]] = deque()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0  # sequence number
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        self.endpoint = self._open(self._pub, "endpoint", config.endpoint)
        self.replay_endpoint: str | None = None
        if config.replay_endpoint is not None:
            self._replay = replay = self._context.socket(zmq.ROUTER)
            replay.set_hwm(config.buffer_steps + 1)
            address = config.replay_endpoint
            self.replay_endpoint = self._open(replay, "replay_endpoint", address, binds=True)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self.publish([AllBlocksCleared()])
        self._thread = supervise.start_thread(self._run, "the publisher of KV events", _failed)

    @classmethod
    @contextmanager
    def started(cls, config: EngineConfig, rank: int = 0) -> Iterator[Publisher | None]:
        """Yield the publisher of `--kv-events-config`, for an engine that the block creates.

        It is None if events are off. If the block raises, the publisher is closed.

        Args:
          rank: index of the engine in a group, which selects its addresses.

        Raises:
          ConfigError: if pyzmq is missing, or an endpoint cannot be used.
        """
        events = read_kv_events(config.cache.kv_events_config)
        publisher = None if events is None else cls(events.of_rank(rank), rank)
        try:
            yield publisher
        except BaseException:
            if publisher is not None:
                publisher.close()
            raise

    def publish(self, events: Seq[CacheEvent] | msgspec.Raw, ts: float | None = None) -> None:
        """Queue a batch. If the queue is full, drop it. Call it from one thread at a time.

        Args:
          events: a list, or its encoding.
          ts: Unix time in seconds. Default: now.
        """
        number, self._next = self._next, self._next + 1
        if len(self._queue) >= self._config.max_queue_size:
            self.num_dropped += 1
            return
        batch = _Batch(time.time() if ts is None else ts, events, self._rank)
        self._queue.append((number, batch))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send the queued batches, and close the sockets."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()

    def _open(
        self, socket: zmq.Socket[bytes], field: str, address: str, *, binds: bool = False
    ) -> str:
        import zmq

        binds = binds or "*" in address or "::" in address or not address.startswith("tcp://")
        try:
            (socket.bind if binds else socket.connect)(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"{FLAG}: {field} {address}: {error}: choose another address"
            ) from error
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    # ---- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._closing or self._queue:
            ready: dict[Any, int] = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            self._send_queued()
            if self._replay is not None and self._replay in ready:
                self._resend(self._replay)
        self._context.destroy(linger=LINGER_MS)

    def _send_queued(self) -> None:
        while self._queue:
            number, batch = self._queue.popleft()
            frames = number.to_bytes(8, "big"), _encode(batch)
            self._sent.append(frames)
            self._pub.send_multipart((self._topic, *frames))

    def _resend(self, replay: zmq.Socket[bytes]) -> None:
        """Answer one request for batches. Ignore it if it is not a sequence number."""
        request = replay.recv_multipart()
        if len(request) != 3 or len(request[2]) != 8:
            log.warning("ignoring an invalid request for KV events of %d frames", len(request))
            return
        reader, _, first = request
        for number, payload in self._sent:
            if number >= first:
                replay.send_multipart((reader, b"", number, payload))
        replay.send_multipart((reader, b"", END, b""))


def _import_zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise ConfigError(
            f"{FLAG} requires the extra events: pip install -c constraints.txt -e '.[events]'"
        ) from error
    return zmq


def _failed(error: BaseException) -> None:
    log.error("KV events are no longer published: restart the server to resume")
