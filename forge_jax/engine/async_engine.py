"""The engine's event-loop interface: requests in, streams out.

The server uses only this interface. `Engine` computes requests in a thread, `EngineProcess` in
another process, and `EngineGroup` in several processes. Each delivers the outputs of a step
together, by request, and `StreamTable` distributes them to the streams.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_jax.config import Pooling
from forge_jax.engine.adapters import Adapters, LoadedAdapter
from forge_jax.engine.core import Limits, check_request
from forge_jax.engine.lifecycle import Lifecycle, State
from forge_jax.engine.streams import QueueLimits, Stream, StreamTable
from forge_jax.engine.validation import InFlightRequests
from forge_jax.errors import EngineError, ModelError, RequestError
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.host_tier import HostKVStats
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.request import Request, TokenIds
from forge_jax.speculate.speculator import SpeculationStats
from forge_jax.telemetry.engine_state import EngineState
from forge_jax.telemetry.phases import Phase, PhaseTotals, TokenTotals

if TYPE_CHECKING:
    from forge_jax.engine.control import Control
    from forge_jax.engine.weights import NewWeights
    from forge_jax.grammar import GrammarCompiler
    from forge_jax.text import ChatTemplate, Tokenizer


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine's counters.

    The engine keeps running while they are read, so two fields may be from different steps.
    """

    state: State
    healthy: bool
    num_running: int
    num_waiting: int
    num_deferred: int  # waiting for another sequence or host memory, not for room
    num_slots: int  # maximum number of running sequences
    policy: str
    tensor_parallel: int  # devices that share the model
    completed_requests: int  # neither aborted nor failed
    block_size: int
    num_blocks: int
    num_free_blocks: int  # free, or cached and evictable
    num_used_blocks: int  # held by live sequences
    num_cached_blocks: int  # free blocks that stay in the prefix cache until they are evicted
    evictions: int  # cached blocks that were evicted
    steps: int
    step_tokens: TokenTotals
    step_sequences: int  # over all steps
    max_step_sequences: int  # sequences of the largest step
    prompt_tokens: int
    cached_prompt_tokens: int  # only admitted requests; the rest of their prompts was computed
    computed_prompt_tokens: int
    generation_tokens: int
    preemptions: int
    recoveries: int  # after steps that raised
    restarts: int  # restarts of an engine in its own process
    stalled_s: float  # seconds without a completed step, while there is work
    prefix_cache_queries: int  # in tokens
    prefix_cache_hits: int  # without those of `host_kv`
    compilations_after_ready: int
    step_phases: dict[Phase, PhaseTotals]
    startup_seconds: dict[str, float]  # by phase, "serving" and "ready" since the start
    step_token_budget: int  # limit of the latest step with room for prompts
    expected_step_s: float | None  # duration of such a step; None: unknown
    paused: bool = False  # no step is computed until it is resumed
    sleeping: bool = False  # also, weights or KV cache are not on the device
    weight_version: int = 0  # version of the current weights
    speculation: SpeculationStats | None = None  # None: off
    host_kv: HostKVStats | None = None  # None: off
    dropped_kv_event_batches: int | None = None  # None: KV events are off


@dataclass(frozen=True, kw_only=True)
class GroupStats(EngineStats):
    """The totals of a group of engines, and the statistics of each. A single engine has none."""

    engines: list[EngineStats]


class AsyncEngine(ABC):
    """Requests in, streams out, on one event loop. Subclasses compute the requests.

    Some attributes are None or 0 until the engine can serve.

    Attributes:
      limits: limits of every request.
      adapters: the LoRA adapters. It has no slots if LoRA is disabled.
      lifecycle: the engine's state.
      streams: the open streams, and the requests that wait for their first token.
      news_interval_s: maximum time in seconds to hold a step's deltas, to deliver them together
        with later ones. Larger values wake the event loop less often. Use it for responses that
        are not streamed. An engine in its own process delivers deltas at once.

    Args:
      rng: draws the seeds of requests that have none.
      clock: seconds, for arrivals.
      queue_limits: limits on requests that wait for their first token; `submit` rejects more.
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
        self.limits = Limits(vocab_size=0, context=0, kv_tokens=0)
        self.system_fingerprint: str | None = None
        self.architecture: str | None = None
        self.pooling: Pooling = "last"  # default of requests
        self.news_interval_s = 0.0
        self.tokenizer: Tokenizer | None = None
        self.chat_template: ChatTemplate | None = None
        self.grammars: GrammarCompiler | None = None
        self.adapters = Adapters.none()
        self.lifecycle = Lifecycle()
        self.streams = StreamTable(
            queue_limits=queue_limits or QueueLimits(),
            clock=clock,
            abort=self.abort,
            on_error=self._fail,
        )
        self._rng = rng
        self._clock = clock

    # ---- implemented by a subclass -------------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Start accepting requests."""

    @abstractmethod
    async def stop(self, drain_s: float = 0.0) -> None:
        """Reject new requests, wait up to `drain_s` seconds for running ones, abort the rest."""

    @abstractmethod
    def stats(self) -> EngineStats: ...

    @abstractmethod
    async def look(self) -> EngineState:
        """Return the engine's state between two steps, and its steps since the last call.

        Raises:
          EngineError: if the engine is not running.
        """

    @abstractmethod
    async def start_profile(self, folder: Path) -> None:
        """Start a trace of the engine. `stop_profile` writes it into the folder.

        Raises:
          RequestError: if a profile is already running, or the folder is not writable.
          EngineError: if the engine is not running.
        """

    @abstractmethod
    async def stop_profile(self) -> None:
        """End the trace and write it.

        Raises:
          RequestError: if no profile is running, or it could not be written.
          EngineError: if the engine is not running.
        """

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Abort a request. Its stream ends with the finish reason "abort"."""

    @abstractmethod
    def _add(self, request: Request) -> None:
        """Compute a request that has been checked. Raise EngineError if that is not possible."""

    @abstractmethod
    def _fail(self, error: BaseException) -> None:
        """Fail the engine, and end every stream with an error. Call it on the event loop."""

    @property
    def engines(self) -> Sequence[AsyncEngine]:
        """The engines that compute the requests: this one, or each engine of a group."""
        return (self,)

    # ---- weights -------------------------------------------------------------------------------

    @property
    def control(self) -> Control | None:
        """Pauses and sleep of the engine. None if it runs in another process."""
        return None

    async def update_weights(
        self,
        weights: NewWeights,
        version: int | None = None,
        *,
        in_flight: InFlightRequests = "keep",
    ) -> None:
        """Replace the weights between two steps, without compiling anything.

        The arguments are those of `LLM.update_weights`. If `in_flight` is "restart", a stream
        continues after a delta with `restarted`, which voids the sample's earlier deltas.

        Raises:
          ModelError: if the weights do not fit the model, or the engine runs in another process.
          RequestError: if `version` or `in_flight` is invalid.
          EngineError: if the engine is not running.
        """
        del weights, version, in_flight
        raise ModelError(
            "update_weights: the weights are in another process, which would load the old ones "
            "after a restart: use Engine or LLM"
        )

    # ---- LoRA adapters -------------------------------------------------------------------------

    @property
    def loras(self) -> list[LoadedAdapter]:
        """The adapters that requests can use."""
        return self.adapters.all()

    async def load_lora(self, name: str, path: str) -> None:
        """Load a LoRA adapter in PEFT format without recompiling. Requests continue to run.

        Raises:
          RequestError: if the name is in use, no adapter slot is free, or the adapter does not fit
            the model.
          OverloadedError: if the engine process dies while loading. It restarts without the
            adapter.
          EngineError: if the engine fails or is stopped while loading.
        """
        await asyncio.to_thread(self.adapters.load, name, path)

    async def unload_lora(self, name: str) -> None:
        """Unload a LoRA adapter.

        Raises:
          RequestError: if no adapter has this name, or an unfinished request uses it.
        """
        self.adapters.unload(name)

    # ---- requests ------------------------------------------------------------------------------

    def check(self, prompt_token_ids: Iterable[int], params: SamplingParams) -> None:
        """Reject a request whose content `submit` would reject, without queueing it.

        Raises:
          RequestError: if the request can never be served. `param` names the field.
        """
        ids = TokenIds.of(prompt_token_ids)
        request = Request(request_id="", prompt_token_ids=ids, params=params)
        check_request(request, self.limits, self.tokenizer)

    async def prepare(self, params: SamplingParams) -> None:
        """Compile the request's grammar off the event loop, so that `submit` does not block.

        Raises:
          RequestError: if the grammar cannot be used.
          OverloadedError: if the grammar cannot be compiled now: retry later.
        """
        if params.structured_outputs is not None and self.grammars is not None:
            await self.grammars.check_soon(params.structured_outputs)

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
        """Queue a request. Call it on the event loop that will read the stream.

        Args:
          prompt_token_ids: the prompt, within the model's vocabulary.
          params: the sampling parameters.
          request_id: unique among unfinished requests.
          priority: lower is served first, if the scheduling policy is "priority".
          cache_salt: only requests with the same salt share prefix cache blocks.
          pooling: return the prompt's pooled hidden states in the last delta's `pooled`, instead of
            an output. `max_tokens` must be 0.
          lora: the name of a LoRA adapter, or None for the base model.

        Raises:
          RequestError: if the request can never be served. `param` names the field.
          OverloadedError: if the queue is full.
          EngineError: if the engine has failed or is stopping, or streams of another event loop are
            being read.
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
            lora=None if lora is None else self.adapters.find(lora),
        )
        return self.submit_request(request)

    def submit_request(self, request: Request) -> Stream:
        """Queue a prepared request. Existing `outputs` are not streamed again.

        Raises:
          ForgeError: as `submit`.
        """
        if not self.lifecycle.takes_requests:
            raise EngineError(f"the engine does not accept requests: it is {self.lifecycle.state}")
        if request.request_id in self.streams:
            raise RequestError("the request ID is in use: choose another", param="request_id")
        self.streams.attach_loop()
        check_request(request, self.limits, self.tokenizer)
        if request.lora is not None:
            self.adapters.check(request.lora)
        stream = self.streams.open(request)
        try:
            self._add(request)
        except BaseException:
            self.streams.discard(request.request_id)
            raise
        return stream

    async def generate(
        self, prompt: str | list[int], params: SamplingParams | None = None, **kwargs: Any
    ) -> AsyncIterator[Delta]:
        """Stream the deltas of one prompt, given as text or token IDs.

        Leaving the loop early aborts the request.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer: pass token IDs", param="prompt")
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
        self.streams.abort_all()

    def shed(self) -> bool:
        """End the newest request that has no tokens yet, with an OverloadedError.

        Return False if there is none.
        """
        return self.streams.shed()
