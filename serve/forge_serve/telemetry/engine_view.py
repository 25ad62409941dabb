"""`GET /engine_state`: the sequences, KV cache blocks and recent steps of a running engine.

One snapshot serves all requests within `LEAST_S`, or longer if it was expensive. The cost for the
engine is therefore bounded, whatever the number of clients. A client sees the sizes of other
tenants' sequences, but not their request ids.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import UNSET, UnsetType

from forge_jax.errors import ForgeError
from forge_jax.host import supervise
from forge_serve.errors import NotReadyError
from forge_serve.openapi.payload import Payload
from forge_serve.telemetry.gpus import GpuAnswer, Gpus

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_jax.telemetry.engine_state import EngineState, SequenceState, StepRecord
    from forge_jax.telemetry.request_timeline import Span

LEAST_S = 0.1  # minimum time between two snapshots
PART = 0.02  # maximum fraction of the time spent on snapshots
LONGEST_S = 5.0  # maximum wait of a snapshot for the end of a step

# A response's id grants access to it, so clients get only its first characters.
SECRET_ID, SHOWN_CHARS = "resp_", 13


SpanKind = Literal["queued", "preempted", "loading", "prefill", "decode", "draft"]
# Kind, start since the arrival, duration, steps, tokens, verified and accepted draft tokens. Times
# are in seconds, with a resolution of 0.1 ms.
SpanAnswer = tuple[SpanKind, float, float, int, int, int, int]


class SequenceAnswer(Payload, kw_only=True):
    """Sample of a request. `request_id` is null if it belongs to another tenant.

    `arrival_s`, `prompt` and `sample` identify it. `queue_s` is the time from arrival to the first
    slot, `ttft_s` to the first token. They are absent before they are known, if they were known at
    `after_step`, or if the recording began later.
    """

    request_id: str | None
    prompt: int
    sample: int
    status: Literal["running", "waiting", "finished"]
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    cached_tokens: int
    blocks: int
    shared_blocks: int
    preemptions: int
    draft_tokens: int
    accepted_tokens: int
    arrival_s: float
    queue_s: float | UnsetType = UNSET
    ttft_s: float | UnsetType = UNSET
    finish_reason: Literal["stop", "length", "abort", "error"] | UnsetType = UNSET
    spans: list[SpanAnswer]


class BlocksAnswer(Payload):
    """KV cache blocks: the number of each kind, and a map of them in runs of cells.

    A run has the number of its cells and their kind, or the index of their owner in `sequences`.
    """

    block_size: int
    num_blocks: int
    num_free: int
    num_cached: int
    num_shared: int
    num_owned: int
    blocks_per_cell: int
    runs: list[tuple[int, int | Literal["free", "cached", "shared", "other"]]]


class StepAnswer(Payload):
    """Step whose result has been read."""

    step: int
    end_s: float
    seconds: float
    sequences: int
    tokens: int
    rows: int
    draft_tokens: int
    accepted_tokens: int


class SpeculationAnswer(Payload):
    """Speculation counters since the start."""

    num_drafts: int
    num_draft_tokens: int
    accepted_per_position: list[int]


class EngineStateAnswer(Payload, kw_only=True):
    """Snapshot of the engine. Times are from a monotonic clock."""

    time_s: float
    num_running: int
    num_waiting: int
    num_slots: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    speculation: SpeculationAnswer | None
    gpus: list[GpuAnswer]
    sequences: list[SequenceAnswer]
    finished: list[SequenceAnswer]
    blocks: BlocksAnswer
    steps: list[StepAnswer]


class EngineView:
    """Source of an engine's snapshots, shared by all clients."""

    def __init__(self, gpus: Gpus | None) -> None:
        self._gpus = gpus
        self._look: asyncio.Task[EngineState] | None = None  # the current or the latest snapshot
        self._next_s = 0.0  # time from which the latest snapshot is too old

    async def answer(self, engine: AsyncEngine, tenant: str, after_step: int) -> EngineStateAnswer:
        """Return the state for a tenant, with the steps, spans and ends after `after_step`.

        Args:
          engine: the engine to take a snapshot of.
          tenant: the client's tenant; "" without API keys.
          after_step: the number of a step; -1: return all recorded steps.

        Raises:
          NotReadyError: the engine did not finish a step within `LONGEST_S`.
          EngineError: the engine is not available.
        """
        state, stats = await self._state(engine), engine.stats()
        gpus = [] if self._gpus is None else await asyncio.to_thread(self._gpus.read)
        speculation = stats.speculation
        after_s = _end_of(after_step, state.steps)
        return EngineStateAnswer(
            time_s=state.time_s,
            num_running=state.num_running,
            num_waiting=state.num_waiting,
            num_slots=stats.num_slots,
            prompt_tokens=stats.prompt_tokens,
            generation_tokens=stats.generation_tokens,
            preemptions=stats.preemptions,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            speculation=None if speculation is None else _as(SpeculationAnswer, speculation),
            gpus=gpus,
            sequences=[_sequence(seq, tenant, after_s) for seq in state.sequences],
            finished=[
                _sequence(seq, tenant, after_s)
                for seq in state.finished
                if seq.finished_s is None or seq.finished_s > after_s
            ],
            blocks=_as(BlocksAnswer, state.blocks),
            steps=[_as(StepAnswer, record) for record in state.steps if record.step > after_step],
        )

    async def _state(self, engine: AsyncEngine) -> EngineState:
        look = self._look
        if look is None or (look.done() and time.monotonic() >= self._next_s):
            look = self._look = supervise.start_task(
                self._take(engine), "a snapshot of the engine", None, expected=(ForgeError,)
            )
        try:
            async with asyncio.timeout(LONGEST_S):
                return await asyncio.shield(look)
        except TimeoutError as error:
            raise NotReadyError(
                f"the engine has not finished a step for {LONGEST_S:.0f} s"
            ) from error

    async def _take(self, engine: AsyncEngine) -> EngineState:
        cost_s = 0.0
        try:
            state = await engine.look()
            cost_s = state.cost_s
            return state
        finally:
            self._next_s = time.monotonic() + max(LEAST_S, cost_s / PART)


def _as[Answer: Payload](kind: type[Answer], state: object) -> Answer:
    """Convert an object of the engine to the payload with the same fields."""
    return msgspec.convert(state, kind, from_attributes=True)


def _end_of(step: int, steps: list[StepRecord]) -> float:
    """Return the time up to which a client that has `step` has all spans.

    Snapshots of several engines are up to one step apart, so the longest step is subtracted.
    """
    ends = [record.end_s for record in steps if record.step == step]
    if not ends:
        return -math.inf
    return ends[0] - max(record.seconds for record in steps)


def _sequence(seq: SequenceState, tenant: str, after_s: float) -> SequenceAnswer:
    def new(seconds: float | None) -> float | UnsetType:
        if seconds is None or seq.arrival_s + seconds <= after_s:
            return UNSET
        return round(seconds, 4)

    request_id, prompt = answer_id(seq.request_id)
    if request_id.startswith(SECRET_ID):
        request_id = request_id[:SHOWN_CHARS]
    return SequenceAnswer(
        request_id=request_id if seq.cache_salt.startswith(tenant) else None,
        prompt=prompt,
        sample=seq.index,
        status=seq.status,
        prompt_tokens=seq.prompt_tokens,
        output_tokens=seq.output_tokens,
        computed_tokens=seq.computed_tokens,
        cached_tokens=seq.cached_tokens,
        blocks=seq.blocks,
        shared_blocks=seq.shared_blocks,
        preemptions=seq.preemptions,
        draft_tokens=seq.draft_tokens,
        accepted_tokens=seq.accepted_tokens,
        arrival_s=round(seq.arrival_s, 6),
        queue_s=new(seq.queue_s),
        ttft_s=new(seq.ttft_s),
        finish_reason=seq.finish_reason or UNSET,
        spans=[_span(span, seq.arrival_s) for span in seq.spans if span.end_s > after_s],
    )


def _span(span: Span, arrival_s: float) -> SpanAnswer:
    return (
        span.kind,
        round(span.begin_s - arrival_s, 4),
        round(span.end_s - span.begin_s, 4),
        span.steps,
        span.tokens,
        span.draft_tokens,
        span.accepted_tokens,
    )


def answer_id(engine_id: str) -> tuple[str, int]:
    """Return the response's id and the index of the prompt, from an engine's request id."""
    name, _, prompt = engine_id.rpartition("-")
    return name.rpartition("-")[0], int(prompt)
