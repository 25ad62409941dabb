"""What every engine does on the event loop: it takes requests, and feeds their streams.

Where the requests are computed is another matter: `Engine` has a thread for it, `EngineProcess` a
process. Both hand over the news of a step together, by request, and `AsyncEngine` gives each
stream its part.
"""

# `Stream`, `AsyncEngine` and `_Queue` use each other's private attributes.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forge_jax.config import Pooling
from forge_jax.engine.core import Limits, Outputs, check_request
from forge_jax.errors import EngineError, OverloadedError, RequestError
from forge_jax.host import supervise
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.request import LoraRef, Request, TokenIds
from forge_jax.speculate.speculator import SpeculationStats
from forge_jax.telemetry.engine_state import EngineState
from forge_jax.telemetry.phases import Phase, PhaseTotals, TokenTotals

if TYPE_CHECKING:
    from forge_jax.engine.adapters import Adapters, LoadedAdapter
    from forge_jax.grammar import GrammarCompiler, GrammarSpec
    from forge_jax.text import ChatTemplate, Tokenizer

log = logging.getLogger(__name__)

# "serving" takes requests, as "ready" does, while some executables are still being compiled.
# "recovering" takes them too, and computes nothing until there is a new process.
State = Literal["starting", "serving", "ready", "recovering", "stopping", "stopped", "failed"]
QueueLimit = Literal["samples", "prompt_tokens"]  # of `QueueLimits`
TAKES_REQUESTS = ("serving", "ready", "recovering")


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """The counters, read without stopping the engine: two fields may be a step apart."""

    state: State
    healthy: bool
    num_running: int
    num_waiting: int
    num_deferred: int  # of them: they wait for another sequence, and not for room
    num_slots: int  # how many can run
    policy: str  # in which order waiting requests are admitted
    tensor_parallel: int  # devices that share the model
    completed_requests: int  # that ended by themselves: neither aborted nor failed
    block_size: int  # tokens of a block
    num_blocks: int
    num_free_blocks: int  # free, or cached and evictable
    num_used_blocks: int  # held by live sequences
    num_cached_blocks: int  # of the free ones: kept by the prefix cache until they are evicted
    evictions: int  # of such blocks
    steps: int
    step_tokens: TokenTotals  # tokens that a step computes
    step_sequences: int  # of all steps together
    max_step_sequences: int  # of the largest step
    prompt_tokens: int
    cached_prompt_tokens: int  # of admitted requests; the others were computed
    computed_prompt_tokens: int
    generation_tokens: int
    preemptions: int
    recoveries: int  # after steps that raised
    restarts: int  # of an engine in a process of its own
    stalled_s: float  # for how long there has been work, and no step has come back
    prefix_cache_queries: int  # in tokens
    prefix_cache_hits: int
    compilations_after_ready: int
    step_phases: dict[Phase, PhaseTotals]  # the host's time by phase of a step
    startup_seconds: dict[str, float]  # by phase; "serving" and "ready" since the beginning
    step_token_budget: int  # tokens of the latest step that could take prompts, at most
    expected_step_s: float | None  # how long such a step takes; None: without a target, or unknown
    speculation: SpeculationStats | None = None  # where it is off


class Stream:
    """The news of one request, on the event loop that submitted it: iterate, or `push_to`.

    Each item is a list of deltas: one step's, or several steps' if the reader was slower than
    the engine. The iteration ends when all `n` samples have finished.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        request_id: str,
        samples: Iterable[int],
        lora: LoraRef | None = None,
    ):
        self.request_id = request_id
        self.lora = lora
        self._engine = engine
        self._open = set(samples)  # that have not finished
        self.completed = True  # as far as can be told: no sample was aborted or failed
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

    def push_to(self, receive: Callable[[list[Delta]], None]) -> None:
        """Calls `receive` with each item as it arrives, on the event loop, instead of iterating.

        It saves waking a task for every step of every request. `receive` must be quick: the next
        request gets its news of the same step after it. If it raises, its request is aborted.
        """
        self._receive = receive
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            receive(deltas)

    def abort(self) -> None:
        """Gives the request up: its blocks are free within two steps. After its end, nothing."""
        if self._open:
            self._engine.abort(self.request_id)

    def _put(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self._open.discard(delta.index)
                self.completed &= delta.finish_reason not in ("abort", "error")
        if self._receive is not None:
            self._receive(deltas)
            return
        self._deltas.extend(deltas)
        with contextlib.suppress(RuntimeError):  # its reader waited on a loop that was closed
            self._arrived.set()


class AsyncEngine(ABC):
    """Requests in, streams out, on one event loop; a subclass has them computed.

    Attributes that are None or 0 until the engine can serve are set by then.

    Attributes:
      news_interval_s: how long the news of a step may wait for those of later ones, in seconds, so
        that the event loop is woken less often: for those who want whole answers. An engine in a
        process of its own hands them over at once.

    Args:
      rng: draws the seeds of requests that have none.
      clock: seconds, for arrivals.
      queue_limits: how much may wait for its first token before `submit` refuses more.
    """

    def __init__(
        self,
        *,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
        queue_limits: QueueLimits | None = None,
    ):
        self.name = ""
        self.max_model_len = 0
        self.vocab_size = 0
        self.system_fingerprint: str | None = None
        self.architecture: str | None = None
        self.pooling: Pooling = "last"  # what `--pooling` says
        self.news_interval_s = 0.0
        self.tokenizer: Tokenizer | None = None
        self.chat_template: ChatTemplate | None = None
        self.grammars: GrammarCompiler | None = None
        self.adapters: Adapters | None = None  # None: there can be none
        self._rng = rng
        self._clock = clock
        self._state: State = "starting"
        self._streams: dict[str, Stream] = {}
        self._queue = _Queue(queue_limits or QueueLimits(), clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._updates: deque[Outputs] = deque()  # of the steps that the loop has not seen
        self._fan_out_due = False
        self._num_completed = 0
        self._idle = asyncio.Event()

    # ---- what a subclass does ------------------------------------------------------------------

    @property
    @abstractmethod
    def limits(self) -> Limits:
        """What a request must keep to."""

    @abstractmethod
    def start(self) -> None:
        """The engine takes requests from now on."""

    @abstractmethod
    async def stop(self, drain_s: float = 0.0) -> None:
        """Takes no more requests, waits up to `drain_s` for the running ones, aborts the rest."""

    @abstractmethod
    def stats(self) -> EngineStats: ...

    @abstractmethod
    async def look(self) -> EngineState:
        """What the engine holds between two steps, and the steps that it has made since a look.

        Raises:
          EngineError: the engine is not there.
        """

    @abstractmethod
    async def start_profile(self, folder: Path) -> None:
        """Begins to trace what the engine does; `stop_profile` will write it into the folder.

        Raises:
          RequestError: a profile is being taken, or the folder cannot be written to.
          EngineError: the engine is not there.
        """

    @abstractmethod
    async def stop_profile(self) -> None:
        """Ends the trace and writes it.

        Raises:
          RequestError: none is being taken, or it could not be written.
          EngineError: the engine is not there.
        """

    @abstractmethod
    def _add(self, request: Request) -> None:
        """Has a request computed that `check` has accepted."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Gives a request up; its stream ends with finish reason "abort"."""

    @abstractmethod
    def _check_alive(self) -> None:
        """Raises EngineError if nothing could compute a request, whatever the state says."""

    @abstractmethod
    def _between_steps(self, call: Callable[[], None]) -> None:
        """Has something done between two steps, and waits for it; not on the event loop."""

    # ---- LoRA adapters -------------------------------------------------------------------------

    @property
    def loras(self) -> list[LoadedAdapter]:
        """The adapters that requests may name."""
        return [] if self.adapters is None else self.adapters.all()

    async def load_lora(self, name: str, path: str) -> None:
        """Loads a LoRA adapter in PEFT's form. Requests go on meanwhile, and nothing is compiled.

        Raises:
          RequestError: the name is in use, there is no room, or the adapter does not fit the model.
          OverloadedError: its process died meanwhile, and is started again without the adapter.
          EngineError: the engine failed or was stopped meanwhile.
        """
        await asyncio.to_thread(self._adapters().load, name, path, self._between_steps)

    async def unload_lora(self, name: str) -> None:
        """Forgets a LoRA adapter.

        Raises:
          RequestError: there is none of the name, or a request that has not ended takes it.
        """
        self._adapters().unload(name, self._num_requests_with)

    def loras_in_use(self) -> tuple[set[str], set[str]]:
        """The names of the adapters that requests take: of those that wait for their first token,
        and of the others.
        """
        waiting: set[str] = set()
        running: set[str] = set()
        for stream in self._streams.values():
            if stream.lora is not None:
                waits = stream.request_id in self._queue.waiting
                (waiting if waits else running).add(stream.lora.name)
        return waiting, running

    @property
    def num_lora_places(self) -> int:
        """How many adapters there may be."""
        return 0 if self.adapters is None else self.adapters.places

    def _num_requests_with(self, lora: LoraRef) -> int:
        return sum(stream.lora == lora for stream in self._streams.values())

    def _adapters(self) -> Adapters:
        if self.adapters is None:
            raise RequestError("this engine has no LoRA adapters: set --max-loras", param="lora")
        return self.adapters

    # ---- requests ------------------------------------------------------------------------------

    @property
    def refusals(self) -> Mapping[QueueLimit, int]:
        """How many requests were refused because too much waited, by the limit."""
        return self._queue.refusals

    def check(self, prompt_token_ids: Iterable[int], params: SamplingParams) -> None:
        """Refuses what `submit` would refuse for what it asks, and queues nothing.

        Raises:
          RequestError: the request can never be served; `param` names the field.
        """
        ids = TokenIds.of(prompt_token_ids)
        request = Request(request_id="", prompt_token_ids=ids, params=params)
        check_request(request, self.limits, self.tokenizer)

    async def prepare(self, params: SamplingParams) -> None:
        """Does what takes long before a `submit`, off the event loop: compiles the grammar.

        Raises:
          RequestError: the grammar cannot be used.
          OverloadedError: it could not be tried now.
        """
        if params.structured_outputs is not None and self.grammars is not None:
            await self._prepare(self.grammars, params.structured_outputs)

    async def _prepare(self, grammars: GrammarCompiler, spec: GrammarSpec) -> None:
        await grammars.check_soon(spec)

    def submit(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        pooling: Pooling | None = None,
        lora: str | None = None,
    ) -> Stream:
        """Queues a request. To be called on the event loop that will read the stream.

        Args:
          pooling: asks for the prompt's hidden states, pooled so, in the last delta's `pooled`,
            instead of an output; `max_tokens` must be 0.
          lora: the name of a LoRA adapter; None: the model as it is.

        Raises:
          RequestError: the request can never be served; `param` names the field.
          OverloadedError: too much waits already.
          EngineError: the engine has failed or is stopping, or streams of another event loop
            are being read.
        """
        seed = params.seed if params.seed is not None else self._rng.getrandbits(64)
        request = Request(
            request_id=request_id,
            prompt_token_ids=TokenIds.of(prompt_token_ids),
            params=params,
            arrival_s=self._clock(),
            priority=priority,
            cache_salt=cache_salt,
            seed=seed % 2**64,
            pooling=pooling,
            lora=None if lora is None else self._adapters().find(lora),
        )
        return self.submit_request(request)

    def submit_request(self, request: Request) -> Stream:
        """The same for a request that has been made; what its `outputs` hold does not come again.

        Raises:
          as `submit`.
        """
        if self._state not in TAKES_REQUESTS:
            raise EngineError(f"the engine takes no requests: it is {self._state}")
        self._check_alive()
        request_id = request.request_id
        if request_id in self._streams:
            raise RequestError("the request id is in use: choose another", param="request_id")
        self._attach_loop()
        check_request(request, self.limits, self.tokenizer)
        if request.lora is not None:
            self._adapters().check(request.lora)
        samples = range(request.params.n) if request.outputs is None else request.outputs
        self._queue.push(request_id, len(samples), len(request.prompt_token_ids))
        stream = Stream(self, request_id, samples, request.lora)
        self._streams[request_id] = stream
        self._add(request)
        return stream

    async def generate(
        self, prompt: str | list[int], params: SamplingParams | None = None, **kwargs: Any
    ) -> AsyncIterator[Delta]:
        """Streams the deltas of one prompt: text or token ids. Leaving the loop early aborts it."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer: pass token ids", param="prompt")
            self.tokenizer.check_fits([prompt], self.max_model_len, "prompt")
            prompt = self.tokenizer.encode(prompt)
        kwargs.setdefault("request_id", f"gen-{self._rng.getrandbits(64):016x}")
        stream = self.submit(prompt, params or SamplingParams(), **kwargs)
        try:
            async for deltas in stream:
                for delta in deltas:
                    yield delta
        finally:
            stream.abort()

    def abort_all(self) -> None:
        """Gives every request up."""
        for stream in list(self._streams.values()):
            stream.abort()

    def shed(self) -> bool:
        """Ends the newest request that has had no token, with an OverloadedError; False if none."""
        if not self._queue.waiting:
            return False
        request_id = next(reversed(self._queue.waiting))
        self._queue.pop(request_id)
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            error = OverloadedError("given up to save memory: try again later", retry_after_s=10.0)
            stream._put([Delta(i, finish_reason="error", error=error) for i in stream._open])
        self.abort(request_id)
        return True

    # ---- streams -------------------------------------------------------------------------------

    def _attach_loop(self) -> None:
        """Makes the running loop the one that streams are fed on.

        Streams of a loop that has been closed have no reader any more: they are aborted.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop and self._streams:
            if self._loop is not None and not self._loop.is_closed():
                raise EngineError("the engine is in use on another event loop")
            for request_id in list(self._streams):
                self.abort(request_id)
        if self._loop is not loop:
            self._loop = loop
            # The loop before may have been closed without it.
            loop.call_soon(self._guarded_fan_out)

    async def _drain(self, seconds: float) -> None:
        """Waits so long for the running requests, and aborts the rest."""
        if self._streams and seconds > 0:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)
        self.abort_all()

    def _deliver(self, outputs: Iterable[Outputs]) -> None:
        """Hands the news of steps to the event loop; from any thread."""
        self._updates.extend(outputs)
        if not self._fan_out_due:
            self._fan_out_due = True
            self._call(self._guarded_fan_out)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody listens
                self._loop.call_soon_threadsafe(function, *arguments)

    def _guarded_fan_out(self) -> None:
        supervise.guarded(self._fan_out, "handing out the news", self._broken)()

    def _fan_out(self) -> None:
        """Hands the news on, all steps' of a request at once. It runs on the event loop."""
        self._fan_out_due = False  # before the queue is read: what comes later is called for again
        updates: Outputs = {}
        while self._updates:
            outputs = self._updates.popleft()
            if not updates:
                updates = outputs
                continue
            for request_id, deltas in outputs.items():
                updates.setdefault(request_id, []).extend(deltas)
        waiting = self._queue.waiting
        for request_id, deltas in updates.items():
            if request_id in waiting:
                self._queue.pop(request_id)
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            try:
                stream._put(deltas)
            except Exception:  # costs this request, not the others
                log.exception("request %s: its news could not be received", request_id)
                stream.abort()
            if not stream._open:
                self._streams.pop(request_id, None)
                self._num_completed += stream.completed
        if not self._streams:
            self._idle.set()

    def _broken(self, error: BaseException) -> None:
        """Ends an engine that cannot go on, and every stream with an error; on the event loop."""
        self._state = "failed"
        for request_id in list(self._streams):
            self.abort(request_id)
        self._fail(EngineError(f"the engine failed: {type(error).__name__}"))

    def _fail(self, failure: EngineError) -> None:
        """Ends every stream with an error."""
        for stream in list(self._streams.values()):
            try:
                stream._put([Delta(i, finish_reason="error", error=failure) for i in stream._open])
            except Exception:  # the others have to end, too
                log.exception("request %s: its error could not be received", stream.request_id)
        self._streams.clear()
        self._queue.clear()
        self._idle.set()


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """What may wait for its first token, over all requests; None: any number."""

    samples: int | None = None
    prompt_tokens: int | None = None


class _Queue:
    """Counts what waits for its first token, and how fast that goes."""

    def __init__(self, limits: QueueLimits, clock: Callable[[], float]):
        self.waiting: dict[str, tuple[int, int]] = {}  # samples, tokens
        self.refusals: dict[QueueLimit, int] = {"samples": 0, "prompt_tokens": 0}
        self._limits = limits
        self._clock = clock
        self._samples = 0
        self._tokens = 0
        self._lately: deque[tuple[float, int]] = deque(maxlen=64)  # (when, tokens) of who left

    def push(self, request_id: str, samples: int, prompt_tokens: int) -> None:
        """Raises OverloadedError if there is no room. An empty queue has room for anything."""
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
        self._lately.append((self._clock(), tokens))

    def clear(self) -> None:
        self.waiting.clear()
        self._samples = self._tokens = 0

    def _overloaded(self, what: str) -> OverloadedError:
        return OverloadedError(
            f"{what} are waiting already: try again later", retry_after_s=self._drain_s()
        )

    def _drain_s(self) -> float:
        """How long the queue would take at the pace of those who left last; 1 to 60 s."""
        if len(self._lately) < 2:
            return 1.0
        seconds = self._clock() - self._lately[0][0]
        left = sum(tokens for _, tokens in self._lately)
        return min(max(seconds * self._tokens / max(left, 1), 1.0), 60.0)
