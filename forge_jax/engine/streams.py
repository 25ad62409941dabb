"""Streams of deltas on the event loop, and the limit on requests that wait for their first token.

A step's outputs arrive for all requests together. `StreamTable` distributes them to the streams. It
depends on neither the core nor the engine process.
"""

# `Stream` and `StreamTable` use each other's private attributes.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forge_jax.errors import EngineError, ForgeError, OverloadedError
from forge_jax.host import supervise
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.request import FinishReason, LoraRef, Request

if TYPE_CHECKING:
    from forge_jax.engine.core import Outputs

QueueLimit = Literal["samples", "prompt_tokens"]  # fields of `QueueLimits`

log = logging.getLogger(__name__)


def samples_of(request: Request) -> Iterable[int]:
    """Return the indices of the samples that a request still has to finish."""
    return range(request.params.n) if request.outputs is None else request.outputs


def last_deltas(
    samples: Iterable[int], reason: FinishReason, error: ForgeError | None = None
) -> list[Delta]:
    """Return the deltas that end samples without another token."""
    return [Delta(index, finish_reason=reason, error=error) for index in samples]


class Stream:
    """The stream of one request's deltas. Iterate over it, or use `push_to`.

    Use it on the event loop that submitted the request. Each item is a list of deltas from one
    step, or from several steps if the reader is slower than the engine. The iteration ends when all
    `n` samples have finished.
    """

    def __init__(
        self,
        request_id: str,
        samples: Iterable[int],
        abort: Callable[[str], None],
        lora: LoraRef | None = None,
    ):
        self.request_id = request_id
        self.lora = lora
        self.engine = 0  # index in the group that computes it
        self.completed = True  # False once a sample is aborted or fails
        self._abort = abort
        self._open = set(samples)  # unfinished samples
        self._deltas: list[Delta] = []
        self._arrived = asyncio.Event()
        self._receive: Callable[[list[Delta]], None] | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[Delta]:
        while not self._deltas:
            if not self._open:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def finished(self) -> bool:
        """True once the last delta of every sample has arrived."""
        return not self._open

    def push_to(self, receive: Callable[[list[Delta]], None]) -> None:
        """Call `receive` with each item as it arrives, on the event loop, instead of iterating.

        This avoids waking a task for every step of every request. `receive` must return quickly,
        because other requests wait for it. If it raises, the request is aborted.
        """
        self._receive = receive
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            receive(deltas)

    def abort(self) -> None:
        """Abort the request, which frees its blocks within two steps. No-op after its end."""
        if self._open:
            self._abort(self.request_id)

    def _put(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self._open.discard(delta.index)
                self.completed &= delta.finish_reason not in ("abort", "error")
        if self._receive is not None:
            self._receive(deltas)
            return
        self._deltas.extend(deltas)
        with contextlib.suppress(RuntimeError):  # the reader's event loop may be closed
            self._arrived.set()

    def _end(self, error: ForgeError) -> None:
        self._put(last_deltas(self._open, "error", error))


class StreamTable:
    """The open streams of one engine, fed on one event loop.

    `deliver` and `fail_soon` are thread-safe. Everything else runs on the event loop.

    Args:
      clock: seconds.
      abort: aborts a request by its id.
      on_error: called with an exception after which streams may have lost deltas.
    """

    def __init__(
        self,
        *,
        queue_limits: QueueLimits,
        clock: Callable[[], float],
        abort: Callable[[str], None],
        on_error: Callable[[BaseException], None],
    ):
        self.num_completed = 0  # requests that ended without an abort or an error
        self.queue_limits = queue_limits
        self._abort = abort
        self._guarded_fan_out = supervise.guarded(self._fan_out, "delivering deltas", on_error)
        self._streams: dict[str, Stream] = {}
        self._queue = WaitingQueue(queue_limits, clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._updates: deque[Outputs] = deque()  # outputs that the loop has not processed
        self._fan_out_due = False
        self._idle = asyncio.Event()

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._streams

    def request_ids(self) -> list[str]:
        return list(self._streams)

    @property
    def num_waiting(self) -> int:
        """Requests that have no token yet."""
        return len(self._queue.waiting)

    @property
    def refusals(self) -> Mapping[QueueLimit, int]:
        """Number of requests rejected because too many were waiting, by limit."""
        return self._queue.refusals

    def num_requests_with(self, lora: LoraRef) -> int:
        return sum(stream.lora == lora for stream in self._streams.values())

    def loras_in_use(self) -> tuple[set[str], set[str]]:
        """Return the names of adapters in use: by waiting requests, and by other requests."""
        waiting: set[str] = set()
        running: set[str] = set()
        for stream in self._streams.values():
            if stream.lora is not None:
                waits = stream.request_id in self._queue.waiting
                (waiting if waits else running).add(stream.lora.name)
        return waiting, running

    # ---- opening and aborting -----------------------------------------------------------------

    def attach_loop(self) -> None:
        """Feed streams on the running event loop from now on.

        Streams of a closed loop have no reader, so they are aborted.

        Raises:
          EngineError: if streams of another loop are being read.
        """
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._streams:
            if self._loop is not None and not self._loop.is_closed():
                raise EngineError("the engine is in use on another event loop")
            self.abort_all()
        self._loop = loop
        # The previous loop may have closed before it ran its scheduled fan-out.
        loop.call_soon(self._guarded_fan_out)

    def open(self, request: Request) -> Stream:
        """Open the stream of a request. Raise OverloadedError if the queue is full."""
        request_id, samples = request.request_id, list(samples_of(request))
        self._queue.push(request_id, len(samples), len(request.prompt_token_ids))
        stream = Stream(request_id, samples, self._abort, request.lora)
        self._streams[request_id] = stream
        return stream

    def place(self, request_id: str, engine: int) -> None:
        """Record which engine of a group computes a request."""
        self._streams[request_id].engine = engine

    def discard(self, request_id: str) -> None:
        """Remove the stream of a request that could not be queued."""
        if request_id in self._queue.waiting:
            self._queue.pop(request_id)
        self._streams.pop(request_id, None)

    def abort_all(self) -> None:
        for request_id in list(self._streams):
            self._abort(request_id)

    def shed(self) -> bool:
        """End the newest request without a token with an OverloadedError. False if none."""
        request_id = next(reversed(self._queue.waiting), None)
        if request_id is None:
            return False
        self._queue.pop(request_id)
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            error = OverloadedError(
                "the request was dropped because memory is low: try again later", retry_after_s=10.0
            )
            stream._end(error)
        self._abort(request_id)
        return True

    async def drain(self, seconds: float) -> None:
        """Wait up to `seconds` for running requests to finish, then abort the rest."""
        if self._streams and seconds > 0:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)
        self.abort_all()

    # ---- updates -------------------------------------------------------------------------------

    def deliver(self, outputs: Iterable[Outputs]) -> None:
        """Pass steps' outputs to the event loop. Thread-safe."""
        self._updates.extend(outputs)
        if not self._fan_out_due:
            self._fan_out_due = True
            self._call_soon(self._guarded_fan_out)

    def deliver_now(self, outputs: Outputs) -> None:
        """Distribute a step's outputs to the streams. Call it on the event loop."""
        self._updates.append(outputs)
        self._fan_out()

    def fail(self, error: EngineError) -> None:
        for stream in list(self._streams.values()):
            try:
                stream._end(error)
            except Exception:  # the other streams must still end
                log.exception("request %s: could not deliver its error", stream.request_id)
        self._streams.clear()
        self._queue.clear()
        self._idle.set()

    def fail_soon(self, error: EngineError) -> None:
        """Schedule `fail` on the event loop. Thread-safe."""
        self._call_soon(self.fail, error)

    def _call_soon[*Ts](self, function: Callable[[*Ts], None], *arguments: *Ts) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no reader
                self._loop.call_soon_threadsafe(function, *arguments)

    def _fan_out(self) -> None:
        """Distribute the deltas of all steps since the last call."""
        # Cleared before the queue is read, so that later updates schedule another call.
        self._fan_out_due = False
        waiting = self._queue.waiting
        for request_id, deltas in self._merged_updates().items():
            if request_id in waiting:
                self._queue.pop(request_id)
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            try:
                stream._put(deltas)
            except Exception:  # only this request fails
                log.exception("request %s: could not deliver its deltas", request_id)
                stream.abort()
            if not stream._open:
                self._streams.pop(request_id, None)
                self.num_completed += stream.completed
        if not self._streams:
            self._idle.set()

    def _merged_updates(self) -> Outputs:
        updates: Outputs = {}
        while self._updates:
            outputs = self._updates.popleft()
            if not updates:
                updates = outputs
                continue
            for request_id, deltas in outputs.items():
                updates.setdefault(request_id, []).extend(deltas)
        return updates


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """Limits on the total of all requests that wait for their first token. None: unlimited."""

    samples: int | None = None
    prompt_tokens: int | None = None


class WaitingQueue:
    """The requests that wait for their first token, and the rate at which the queue drains.

    Attributes:
      waiting: (samples, prompt tokens) by request id, the newest request last.
      refusals: number of rejected requests, by limit.

    Args:
      clock: seconds.
    """

    def __init__(self, limits: QueueLimits, clock: Callable[[], float]):
        self.waiting: dict[str, tuple[int, int]] = {}
        self.refusals: dict[QueueLimit, int] = {"samples": 0, "prompt_tokens": 0}
        self._limits = limits
        self._clock = clock
        self._samples = 0
        self._tokens = 0
        # (time, prompt tokens) of the latest requests to leave
        self._left: deque[tuple[float, int]] = deque(maxlen=64)

    def push(self, request_id: str, samples: int, prompt_tokens: int) -> None:
        """Add a request; raise OverloadedError at a limit. An empty queue accepts any request."""
        limits = self._limits
        if self.waiting:
            if limits.samples is not None and self._samples + samples > limits.samples:
                self.refusals["samples"] += 1
                raise self._overloaded(f"{self._samples} samples")
            most = limits.prompt_tokens
            if most is not None and self._tokens + prompt_tokens > most:
                self.refusals["prompt_tokens"] += 1
                raise self._overloaded(f"{self._tokens} prompt tokens")
        self.waiting[request_id] = samples, prompt_tokens
        self._samples += samples
        self._tokens += prompt_tokens

    def pop(self, request_id: str) -> None:
        samples, tokens = self.waiting.pop(request_id)
        self._samples -= samples
        self._tokens -= tokens
        self._left.append((self._clock(), tokens))

    def clear(self) -> None:
        self.waiting.clear()
        self._samples = self._tokens = 0

    def _overloaded(self, load: str) -> OverloadedError:
        return OverloadedError(
            f"the queue is full ({load} waiting): try again later", retry_after_s=self._drain_s()
        )

    def _drain_s(self) -> float:
        """Return the seconds to drain the queue, at the rate of the latest 64 exits: 1 to 60."""
        if len(self._left) < 2:
            return 1.0
        seconds = self._clock() - self._left[0][0]
        left = sum(tokens for _, tokens in self._left)
        return min(max(seconds * self._tokens / max(left, 1), 1.0), 60.0)
