"""Threads for work that a request needs before it can be queued: decoding, tokenizing, rendering.

Each kind of work has a `Lane`, so that an expensive kind delays only itself. In a lane, tenants
take turns, waiting work is bounded, and work of disconnected clients is dropped before it starts.
A running call cannot be stopped, so callers split their work into short pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from forge_jax.errors import OverloadedError
from forge_serve.generation.pdf import MAX_PROCESSES, PdfReader
from forge_serve.limits import KIB, MIB

SHORT_BYTES = 64 * KIB  # requests with more text use the lane of long texts
PIECE_BYTES = 32 * KIB  # text per piece of work
MAX_HELD_BYTES = 64 * MIB  # input, running and waiting
MAX_BODY_BYTES = 512 * MIB  # bodies are in memory already
MAX_THREADS = 4


class Lane:
    """A thread pool with a bounded queue that serves tenants round robin.

    Owned by one event loop.

    Args:
      name: the threads' name.
      num_threads: maximum number of concurrent calls.
      max_held_bytes: maximum input of all admitted requests. One tenant gets at most half of it.
    """

    def __init__(self, name: str, num_threads: int, max_held_bytes: int = MAX_HELD_BYTES):
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"forge-{name}")
        self._free = num_threads
        self._most = max_held_bytes
        self._held: dict[str, int] = {}  # bytes by tenant
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # turns by tenant, next first

    @property
    def held_bytes(self) -> int:
        """Input of the running and waiting requests."""
        return sum(self._held.values())

    @property
    def num_waiting(self) -> int:
        """Calls that have not started."""
        return sum(map(len, self._waiting.values()))

    @contextlib.contextmanager
    def admit(self, tenant: str, num_bytes: int) -> Iterator[None]:
        """Reserve capacity while a request uses the lane. An empty lane admits any size.

        Raises:
          OverloadedError: the lane is full.
        """
        held, total = self._held.get(tenant, 0), self.held_bytes
        if (held and held + num_bytes > self._most // 2) or (
            total and total + num_bytes > self._most
        ):
            raise OverloadedError("too much text is waiting to be processed: try again later")
        self._held[tenant] = held + num_bytes
        try:
            yield
        finally:
            self._held[tenant] -= num_bytes
            if not self._held[tenant]:
                del self._held[tenant]

    async def run[T](self, tenant: str, work: Callable[[], T]) -> T:
        """Run `work` in a thread and return its result. Cancellation drops waiting work."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._drop(tenant, turn)
            else:  # cancelled between its turn and the start of the call
                self._release()
            raise
        call = self._threads.submit(work)
        call.add_done_callback(self._releases(asyncio.get_running_loop()))
        return await asyncio.wrap_future(call)

    def close(self) -> None:
        """Start no more calls. Running calls finish."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _releases(self, loop: asyncio.AbstractEventLoop) -> Callable[[Future], None]:
        """Return a callback that frees the thread, even if the call's task was cancelled."""

        def release(_: Future) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._release)

        return release

    def _release(self) -> None:
        self._free += 1
        self._start_next()

    def _start_next(self) -> None:
        while self._free and self._waiting:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind the other tenants
            if not turn.done():
                self._free -= 1
                turn.set_result(None)

    def _drop(self, tenant: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(tenant)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[tenant]


class Workers:
    """The lanes of one server, and its reader of PDFs."""

    def __init__(self) -> None:
        num_threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        self.bodies = Lane("body", 1, MAX_BODY_BYTES)
        self.short_texts = Lane("text", num_threads)
        self.long_texts = Lane("long-text", num_threads)
        self._pdfs = Lane("pdf", MAX_PROCESSES)
        self.pdfs = PdfReader(self._pdfs)

    def close(self) -> None:
        for lane in (self.bodies, self.short_texts, self.long_texts, self._pdfs):
            lane.close()


@dataclass(frozen=True, slots=True)
class TextWork:
    """One tenant's access to the text lanes.

    Attributes:
      workers: the server's lanes.
      tenant: the owner of the work.
      max_bytes: maximum text to tokenize per request.
    """

    workers: Workers
    tenant: str
    max_bytes: int

    async def run[T](self, num_bytes: int, pieces: Iterable[Callable[[], T]]) -> list[T]:
        """Run the pieces of one request's work, one at a time, and return their results.

        Args:
          num_bytes: total input of the pieces.

        Raises:
          OverloadedError: the lane is full.
        """
        workers = self.workers
        lane = workers.short_texts if num_bytes <= SHORT_BYTES else workers.long_texts
        with lane.admit(self.tenant, num_bytes):
            return [await lane.run(self.tenant, piece) for piece in pieces]


def in_pieces[T](items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield consecutive items in lists of about `PIECE_BYTES`."""
    piece: list[T] = []
    num_bytes = 0
    for item in items:
        piece.append(item)
        num_bytes += size(item)
        if num_bytes >= PIECE_BYTES:
            yield piece
            piece, num_bytes = [], 0
    if piece:
        yield piece
