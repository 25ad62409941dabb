"""A load generator with little overhead: raw sockets on one epoll, in the calling thread.

Keep-alive connections send requests in a closed loop. Some answers are kept whole for the caller to
check; of all others only the events are counted. The HTTP support is minimal and matches the one
server.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_serve.bench.errors import BenchmarkError

EVENT = b"data: {"
LAST_CHUNK = b"\r\n0\r\n\r\n"
TAIL_BYTES = len(EVENT) - 1  # an event split over two reads is still counted, and once
READ_BYTES = 1 << 16


class BadAnswerError(BenchmarkError):
    """The server sent something that this client does not expect."""


@dataclass(frozen=True, kw_only=True)
class Body:
    """One request to send: its bytes and the expected answer."""

    request: bytes
    text: str  # expected text of the answer
    tokens: int


@dataclass(kw_only=True)
class Tally:
    """Counts between the end of the warm-up and the end of the load."""

    wall_s: float = 0.0
    cpu_s: float = 0.0  # CPU time of this process
    reads: int = 0
    events: int = 0  # except [DONE], including those of answers that were incomplete at the end
    begun: int = 0  # answers whose first byte arrived
    latencies_s: list[float] = field(default_factory=list)  # only complete answers
    complete_events: int = 0  # events of complete answers
    complete_tokens: int = 0
    samples: list[tuple[Body, bytes]] = field(default_factory=list)  # whole answers, with headers


class _Connection:
    __slots__ = ("_body_end", "body", "events", "kept", "sent_s", "sock", "streams", "tail")

    def __init__(self, address: tuple[str, int], streams: bool):
        self.sock = socket.create_connection(address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self.streams = streams

    def send(self, body: Body, keep: bool) -> None:
        self.body = body
        self.events = 0
        self.tail = b""
        self.kept: list[bytes] | None = [] if keep else None
        self.sent_s = time.perf_counter()
        if self.sock.send(body.request) != len(body.request):
            raise BadAnswerError("a request did not fit the socket's buffer")

    def take(self, data: bytes) -> bool:
        """Count the events in `data` and return True if the answer is complete."""
        if self.kept is not None:
            self.kept.append(data)
        data = self.tail + data
        if not self.streams:
            self.tail = data
            return _is_whole(data)
        if not self.tail and not data.startswith(b"HTTP/1.1 200"):
            raise BadAnswerError(data[:500].decode("utf-8", "replace"))
        self.events += data.count(EVENT)
        self.tail = data[-TAIL_BYTES:]
        return data.endswith(LAST_CHUNK)


def drive(
    address: tuple[str, int],
    bodies: Sequence[Body],
    *,
    streams: bool,
    concurrency: int,
    warm_up_s: float,
    load_s: float,
    sample_every: int,
    on_window: Callable[[], None],
) -> Tally:
    """Send `bodies` in turn over `concurrency` connections, without a pause.

    `on_window` is called when the warm-up ends and again when the load ends.

    Raises:
      BadAnswerError: An answer is not 200, or a connection was closed.
    """
    connections = {}
    for _ in range(concurrency):
        connection = _Connection(address, streams)
        connections[connection.sock.fileno()] = connection
    with select.epoll() as epoll:
        try:
            num_sent = 0
            for fd, connection in connections.items():
                epoll.register(fd, select.EPOLLIN)
                connection.send(bodies[num_sent % len(bodies)], keep=False)
                num_sent += 1
            warm = Tally()
            num_sent = _loop(epoll, connections, bodies, warm, num_sent, 0, warm_up_s)
            on_window()
            tally = Tally()
            _loop(epoll, connections, bodies, tally, num_sent, sample_every, load_s)
            on_window()
            return tally
        finally:
            for connection in connections.values():
                connection.sock.close()


def _loop(
    epoll: select.epoll,
    connections: dict[int, _Connection],
    bodies: Sequence[Body],
    tally: Tally,
    num_sent: int,
    sample_every: int,
    seconds: float,
) -> int:
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    now_s = begin_s
    while now_s < begin_s + seconds:
        ready = epoll.poll(1.0)
        for fd, _ in ready:
            connection = connections[fd]
            data = connection.sock.recv(READ_BYTES)
            if not data:
                raise BadAnswerError("the server closed a connection")
            tally.reads += 1
            if not connection.tail:
                tally.begun += 1
            before = connection.events
            complete = connection.take(data)
            tally.events += connection.events - before
            if complete:
                tally.latencies_s.append(time.perf_counter() - connection.sent_s)
                tally.complete_events += connection.events
                tally.complete_tokens += connection.body.tokens
                if connection.kept is not None:
                    tally.samples.append((connection.body, b"".join(connection.kept)))
                keep = sample_every > 0 and num_sent % sample_every == 0
                connection.send(bodies[num_sent % len(bodies)], keep)
                num_sent += 1
        now_s = time.perf_counter()
    tally.wall_s, tally.cpu_s = now_s - begin_s, time.process_time() - begin_cpu_s
    return num_sent


def _is_whole(data: bytes) -> bool:
    head, found, body = data.partition(b"\r\n\r\n")
    if not found:
        return False
    if not head.startswith(b"HTTP/1.1 200"):
        raise BadAnswerError(data[:500].decode("utf-8", "replace"))
    _, _, length = head.partition(b"Content-Length: ")
    return len(body) == int(length.partition(b"\r\n")[0])


def http_request(path: str, body: dict[str, Any]) -> bytes:
    """Return the bytes of a POST with a JSON body on a keep-alive connection."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def check_stream(body: Body, answer: bytes) -> None:
    """Check a whole streamed answer: HTTP chunks, events, JSON, text and ending.

    Raises:
      BadAnswerError: The answer is malformed or differs from the expected text.
    """
    head, _, rest = answer.partition(b"\r\n\r\n")
    _expect(b"Transfer-Encoding: chunked" in head, "is not chunked", answer)
    payload = b""
    while True:
        size, found, rest = rest.partition(b"\r\n")
        _expect(bool(found), "ends within a chunk", answer)
        length = int(size, 16)
        payload += rest[:length]
        _expect(rest[length : length + 2] == b"\r\n", "has a wrong chunk length", answer)
        rest = rest[length + 2 :]
        if not length:
            break
    _expect(not rest, "continues after its end", answer)
    *events, after = payload.split(b"\n\n")
    _expect(after == b"" and events[-1] == b"data: [DONE]", "does not end with [DONE]", answer)
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    _expect(len({chunk["id"] for chunk in chunks}) == 1, "has several ids", answer)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice.get("text") or _content(choice) for choice in choices)
    _expect(text == body.text, "has another text than the unstreamed answer", answer)
    reasons = [choice["finish_reason"] for choice in choices]
    _expect(reasons[-1] == "length" and not any(reasons[:-1]), "ends otherwise", answer)
    _expect(len(choices) <= body.tokens + 1, "has more events than tokens", answer)


def check_whole(body: Body, answer: bytes) -> None:
    """Check an answer that was not streamed.

    Raises:
      BadAnswerError: The text or the token count differs from the expected one.
    """
    _, _, data = answer.partition(b"\r\n\r\n")
    text, tokens = text_and_tokens(json.loads(data))
    _expect(text == body.text and tokens == body.tokens, "differs from an earlier one", answer)


def text_and_tokens(answer: dict[str, Any]) -> tuple[str, int]:
    choice = answer["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, answer["usage"]["completion_tokens"]


def _content(choice: dict[str, Any]) -> str:
    return choice.get("delta", {}).get("content") or ""


def _expect(fact: bool, problem: str, answer: bytes) -> None:
    if not fact:
        raise BadAnswerError(f"an answer {problem}: {answer[:300]!r} ... {answer[-300:]!r}")
