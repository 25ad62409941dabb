"""A snapshot of an engine: its sequences, the KV cache blocks they hold, and its last steps.

A snapshot takes two calls. `Watcher.capture` runs between two steps in the engine thread and only
copies. `Capture.state` derives the rest in any thread. Steps are recorded only while snapshots are
taken, and so are the timelines of sequences. Snapshots contain no prompts, outputs or tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from forge_jax.schedule.plan import StepPlan, StepResult
from forge_jax.schedule.request import FinishReason
from forge_jax.schedule.request import Sequence as ScheduledSequence
from forge_jax.schedule.scheduler import Scheduler
from forge_jax.telemetry.request_timeline import Span, Timelines

MAX_RUNNING, MAX_WAITING = 128, 64  # sequences that are listed
MAX_CELLS = 2048  # cells of the block map
MAX_STEPS = 512
MAX_FINISHED = 32  # recently finished sequences
WATCHED_S = 30.0  # steps are recorded for this long after a snapshot

# The state of a block, or the index of the listed sequence that is its only holder.
# "other": held by a sequence that is not listed.
Holder = int | Literal["free", "cached", "shared", "other"]
_STATES = ("free", "cached", "shared", "other")
_FREE, _CACHED, _SHARED, _OTHER = range(len(_STATES))


@dataclass(frozen=True, kw_only=True)
class SequenceState:
    """The state of a sequence. `cache_salt` identifies its owner."""

    request_id: str
    index: int  # the sample's index in its request
    cache_salt: str
    status: Literal["running", "waiting", "finished"]
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int  # tokens with KV written or in flight, without drafts being verified
    cached_tokens: int  # prompt tokens found in the prefix cache
    blocks: int
    shared_blocks: int  # blocks that other sequences also hold
    preemptions: int
    draft_tokens: int  # verified draft tokens
    accepted_tokens: int
    arrival_s: float  # on the clock of `EngineState.time_s`
    queue_s: float | None  # from arrival to first admission; None: not admitted yet
    ttft_s: float | None  # time to first token; None: none yet, or before the recording began
    spans: list[Span]  # at most `MAX_SPANS`, and the current wait, in order of time
    finish_reason: FinishReason | None
    finished_s: float | None  # when the end was seen: at most one step or snapshot later


@dataclass(frozen=True, kw_only=True)
class BlockMap:
    """The KV cache blocks in the order of their numbers, as runs of equal cells.

    A cell covers `blocks_per_cell` consecutive blocks, and the last one may cover fewer. It shows
    the most common state among its held blocks. If no block is held, it shows "cached" if any block
    is cached. The `num_` fields are exact.
    """

    block_size: int  # tokens
    num_blocks: int
    num_free: int
    num_cached: int
    num_shared: int  # held by several sequences
    num_owned: int  # held by one
    blocks_per_cell: int
    runs: list[tuple[int, Holder]]  # (number of cells, their state)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step whose result has been read.

    `seconds` is the time since the previous step was read, or since work arrived.
    """

    step: int
    end_s: float  # on the clock of `EngineState.time_s`
    seconds: float
    sequences: int
    tokens: int
    rows: int  # tokens whose logits were computed
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """A snapshot of an engine.

    It has at most `MAX_RUNNING` + `MAX_WAITING` sequences, `MAX_FINISHED` finished ones,
    `MAX_CELLS` runs and `MAX_STEPS` steps.
    """

    time_s: float  # on a monotonic clock
    cost_s: float  # duration of this snapshot in all threads
    num_running: int
    num_waiting: int
    sequences: list[SequenceState]  # running ones by rank, then waiting ones by arrival
    finished: list[SequenceState]  # since the first of the recent snapshots, oldest first
    blocks: BlockMap
    steps: list[StepRecord]  # recorded since the first of the recent snapshots, oldest first


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Copies of the state that the engine thread owns."""

    time_s: float
    cost_s: float
    num_running: int
    num_waiting: int
    block_size: int
    refs: list[int]  # reference count of each block
    cached: list[int]  # numbers of the cached blocks
    sequences: list[tuple[SequenceState, list[int]]]  # each with the numbers of its blocks
    finished: list[SequenceState]
    steps: list[StepRecord]

    def state(self) -> EngineState:
        """Return the snapshot. Thread-safe; takes milliseconds for 100,000 blocks."""
        begin_s = time.perf_counter()
        refs = np.array(self.refs, np.int32)
        shared = refs > 1
        what = np.full(len(refs), _FREE, np.int32)
        what[np.array(self.cached, np.int32)] = _CACHED
        what[refs > 0] = _OTHER
        sequences = []
        for i, (seq, blocks) in enumerate(self.sequences):
            own = np.array(blocks, np.int32)
            what[own] = len(_STATES) + i
            sequences.append(_with_shared(seq, int(shared[own].sum())))
        what[shared] = _SHARED
        num_free, num_cached, num_shared = (
            int(n) for n in np.bincount(what, minlength=len(_STATES))[:_OTHER]
        )
        per_cell = -(-len(refs) // MAX_CELLS)
        return EngineState(
            time_s=self.time_s,
            cost_s=self.cost_s + time.perf_counter() - begin_s,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            sequences=sequences,
            finished=self.finished,
            blocks=BlockMap(
                block_size=self.block_size,
                num_blocks=len(refs),
                num_free=num_free,
                num_cached=num_cached,
                num_shared=num_shared,
                num_owned=len(refs) - num_free - num_cached - num_shared,
                blocks_per_cell=per_cell,
                runs=_runs(_cells(what, per_cell)),
            ),
            steps=self.steps,
        )


class Watcher:
    """A source of snapshots of a scheduler, which records steps while snapshots are taken.

    All methods run in the engine thread.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]):
        self.watches = False  # True while `record` must be called after each step
        self._scheduler = scheduler
        self._clock = clock
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._timelines = Timelines(scheduler)
        self._finished: deque[SequenceState] = deque(maxlen=MAX_FINISHED)
        self._looked_s = 0.0

    def record(self, plan: StepPlan, result: StepResult, begin_s: float, end_s: float) -> None:
        """Record the step of `plan`, after its result is read and before it is committed."""
        if end_s - self._looked_s > WATCHED_S:
            self.watches = False
            self._steps.clear()
            self._timelines.clear()
            self._finished.clear()
            return
        self._take_finished(begin_s)
        self._timelines.record(plan, result, begin_s, end_s)
        of_chunks = result.sequences[len(plan.decodes) :]
        accepted = sum(
            max(len(got.token_ids) - 1, 0)
            for row, got in zip(plan.chunks, of_chunks, strict=True)
            if row.num_drafts and not got.fault
        )
        record = StepRecord(
            step=plan.step,
            end_s=end_s,
            seconds=end_s - begin_s,
            sequences=plan.num_sequences,
            tokens=plan.num_tokens,
            rows=plan.num_rows,
            draft_tokens=plan.num_drafts,
            accepted_tokens=accepted,
        )
        self._steps.append(record)

    def capture(self) -> Capture:
        """Copy the state of the engine, and start to record steps."""
        begin_s = time.perf_counter()
        scheduler = self._scheduler
        self._looked_s, self.watches = self._clock(), True
        self._take_finished(self._looked_s)
        running = [(self._state(seq), list(seq.blocks)) for seq in scheduler.running[:MAX_RUNNING]]
        waiting = [(self._state(seq), []) for seq in islice(scheduler.waiting(), MAX_WAITING)]
        refs, cached = scheduler.pool.references()
        return Capture(
            time_s=self._looked_s,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            block_size=scheduler.pool.block_size,
            refs=refs,
            cached=cached,
            sequences=running + waiting,
            finished=list(self._finished),
            steps=list(self._steps),
            cost_s=time.perf_counter() - begin_s,
        )

    def _state(self, seq: ScheduledSequence) -> SequenceState:
        spans, ttft_s = self._timelines.of(seq, self._looked_s)
        return _state_of(seq, spans, ttft_s)

    def _take_finished(self, now_s: float) -> None:
        for seq, timeline in self._timelines.take_finished(now_s):
            self._finished.append(_state_of(seq, timeline.spans, timeline.ttft_s, now_s))


def _state_of(
    seq: ScheduledSequence,
    spans: list[Span],
    ttft_s: float | None,
    finished_s: float | None = None,
) -> SequenceState:
    status = "waiting" if seq.slot is None else "running"
    admitted = seq.slot is not None or seq.epoch > 0
    return SequenceState(
        request_id=seq.request_id,
        index=seq.index,
        cache_salt=seq.request.cache_salt,
        status=status if finished_s is None else "finished",
        prompt_tokens=seq.prompt_len,
        output_tokens=seq.num_output,
        computed_tokens=seq.num_computed,
        cached_tokens=seq.num_cached,
        blocks=len(seq.blocks),
        shared_blocks=0,  # `Capture.state` counts them
        preemptions=seq.num_preemptions,
        draft_tokens=seq.num_drafted,
        accepted_tokens=seq.num_accepted,
        arrival_s=seq.queued_s,
        queue_s=seq.queue_s if admitted else None,
        ttft_s=ttft_s,
        spans=spans,
        finish_reason=seq.finish_reason,
        finished_s=finished_s,
    )


def _with_shared(seq: SequenceState, shared_blocks: int) -> SequenceState:
    """Return a copy with `shared_blocks`; `dataclasses.replace` takes three times as long."""
    return SequenceState(**{**vars(seq), "shared_blocks": shared_blocks})


def _cells(what: np.ndarray, per_cell: int) -> np.ndarray:
    """Return the state of each cell, i32[cells], from the states of the blocks, i32[blocks].

    A cell has the most common state of its held blocks, else "cached", else "free".
    """
    if per_cell == 1:
        return what
    num_cells, kinds = -(-len(what) // per_cell), int(what.max()) + 1
    places = np.arange(len(what), dtype=np.int32) // per_cell * kinds + what
    counts = 4 * np.bincount(places, minlength=num_cells * kinds).reshape(num_cells, kinds)
    counts[:, _FREE] = counts[:, _FREE] > 0
    counts[:, _CACHED : _CACHED + 1] = 2 * (counts[:, _CACHED : _CACHED + 1] > 0)
    return counts.argmax(1)


def _runs(cells: np.ndarray) -> list[tuple[int, Holder]]:
    starts = np.flatnonzero(np.diff(cells, prepend=-1))
    lengths = np.diff(starts, append=len(cells))
    return [
        (length, _STATES[kind] if kind < len(_STATES) else kind - len(_STATES))
        for length, kind in zip(lengths.tolist(), cells[starts].tolist(), strict=True)
    ]
