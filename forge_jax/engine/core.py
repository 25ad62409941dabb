"""The engine's loop body, one step ahead of the device, without a thread.

`EngineCore` owns the scheduler, the device and every live sequence. `LLM` calls `tick` in the
caller's thread, `Engine` in its engine thread. The core uses neither asyncio nor HTTP.

A tick runs in one of five modes. They are the functions at the end of this file, each one step from
top to bottom.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forge_jax.config import EngineConfig
from forge_jax.engine.constraints import Constraints
from forge_jax.engine.fault_isolation import Bisection
from forge_jax.engine.text_output import Outputs, TextOutput
from forge_jax.engine.validation import (
    Limits,
    ResearchLimits,
    check_request,
    token_filter,
    without_unknown_stops,
)
from forge_jax.errors import EngineError, ForgeError, GrammarError, StepError
from forge_jax.grammar.spec import refused
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.cache_events import CacheEvent, CacheEvents
from forge_jax.schedule.host_tier import HostKVStats, HostMemory, HostTier
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.plan import Device, StepPlan, StepResult
from forge_jax.schedule.request import LoraRef, Request, Sequence, first_returned
from forge_jax.schedule.scheduler import Scheduler, SchedulerConfig, SequenceUpdate
from forge_jax.schedule.token_budget import TokenBudget
from forge_jax.speculate.speculator import Speculator
from forge_jax.telemetry.engine_state import Watcher
from forge_jax.telemetry.phases import PhaseTimes, StepTokens
from forge_jax.telemetry.spans import span, step_span

if TYPE_CHECKING:
    from forge_jax.engine.validation import InFlightRequests
    from forge_jax.grammar import Grammar, GrammarCompiler
    from forge_jax.grammar.token_filter import TokenFilter
    from forge_jax.text import Tokenizer

SCORING_ROWS = 64
log = logging.getLogger(__name__)


def make_scheduler(
    config: EngineConfig,
    *,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    eos_token_ids: frozenset[int],
    rng: random.Random,
    budget: TokenBudget | None = None,
    host: HostTier | None = None,
) -> Scheduler:
    """Return the scheduler and block pool of a configuration with resolved sizes.

    Args:
      host: keeps evicted blocks. None: they are lost.
    """
    batch, cache = config.batch, config.cache
    limits = SchedulerConfig(
        max_num_seqs=batch.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_rows=max_rows(batch.max_num_seqs),
        max_model_len=max_model_len,
        prefill_chunk_size=batch.prefill_chunk_size,
        chunked_prefill=batch.chunked_prefill,
        batching=batch.batching,
        policy=batch.scheduling_policy,
        pools_apart=config.model.deterministic,
        eos_token_ids=eos_token_ids,
    )
    pool = BlockPool(
        num_blocks,
        block_size,
        prefix_cache=cache.prefix_cache and cache.kv_cache == "paged",
        eviction=cache.eviction,
    )
    pool.host = host
    return Scheduler(limits, pool, clock=time.monotonic, rng=rng, budget=budget)


def max_rows(max_num_seqs: int) -> int:
    """Return the maximum rows per step: one per sequence, and enough to score a prompt."""
    return max(max_num_seqs, SCORING_ROWS)


@dataclass(slots=True)
class _InFlight:
    """A step that has been dispatched and not been read."""

    plan: StepPlan
    pending: Any
    alone: bool  # True if no other step was in flight when it was dispatched
    dispatched_s: float


@dataclass(slots=True)
class _Tick:
    """The progress of a tick, which survives a step that raises halfway."""

    before_wait: Callable[[], None] | None = None
    updates: list[SequenceUpdate] | None = None  # updates of the committed step
    without_mask: Iterable[tuple[Sequence, ForgeError]] = ()


class _StepFailed(Exception):
    """A step raised `error` when it was dispatched or read, or a copy of blocks without a step."""

    def __init__(self, plan: StepPlan | None, error: Exception):
        super().__init__(plan, error)
        self.plan = plan
        self.error = error


class EngineCore:
    """Schedules, dispatches and reads steps, and produces text. One call of `tick` per step.

    One thread owns a core: it is not thread-safe.

    Args:
      one_step_ahead: dispatch a step while the previous one runs. Otherwise a tick waits for the
        step that it has dispatched.
      unrecoverable: exceptions of the device that `tick` raises instead of recovering.
      research: the steering vectors and activations of the device, and whether it supports pooling.
        Default: no vectors, no activations, and pooling.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        device: Device,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        one_step_ahead: bool = True,
        speculator: Speculator | None = None,
        grammars: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
        unrecoverable: tuple[type[Exception], ...] = (),
        research: ResearchLimits | None = None,
    ):
        self.grammars = grammars
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._research = research or ResearchLimits()
        self.speculator = speculator
        self.constraints = Constraints(vocab_size, scheduler.config.eos_token_ids)
        self.num_steps = 0
        self.num_recoveries = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.phases = PhaseTimes()
        self.step_tokens = StepTokens()
        self.step_sequences = 0  # over all steps
        self.max_step_sequences = 0
        self.watcher = Watcher(scheduler, clock)
        self.device = device
        self.host_memory: HostMemory | None = None
        self._one_step_ahead = one_step_ahead
        self.unrecoverable = unrecoverable
        self._texts = TextOutput(tokenizer, scheduler, self.constraints)
        self._immediate: Outputs = {}  # deltas that do not wait for a step
        self._bisection: Bisection[Sequence] = Bisection()
        self._in_flight: _InFlight | None = None
        self._tick = _Tick()
        self._failed = False
        self._paused = False
        self._publish: Callable[[list[CacheEvent]], None] | None = None
        self._clock = clock
        self._progress_s = clock()

    @property
    def has_work(self) -> bool:
        if self._in_flight is not None or self._immediate:
            return True
        return self.scheduler.has_work and not self._paused

    @property
    def paused(self) -> bool:
        """True between `pause` and `resume`."""
        return self._paused

    @property
    def stalled_s(self) -> float:
        """Seconds without a completed step, while there is work. Thread-safe."""
        return self._clock() - self._progress_s if self.has_work else 0.0

    @property
    def limits(self) -> Limits:
        """The limits of every request. Thread-safe."""
        pool = self.scheduler.pool
        return Limits(
            vocab_size=self.vocab_size,
            context=self.scheduler.config.max_model_len,
            kv_tokens=pool.num_blocks * pool.block_size,
            steering=self._research.steering,
            activations=self._research.activations,
            pools=self._research.pools,
        )

    def check(self, request: Request) -> None:
        """Reject a request that can never be served. Thread-safe.

        Raises:
          RequestError: `param` names the field.
        """
        check_request(request, self.limits, self.tokenizer)

    def add(self, request: Request) -> None:
        """Queue a request that `check` has accepted."""
        request = without_unknown_stops(request, self.vocab_size)
        grammar = self.compile_grammar(request)
        tokens = token_filter(request.params, self.tokenizer, self.vocab_size)
        self._queue(request, grammar, tokens)
        self.prompt_tokens += len(request.prompt_token_ids)

    def _queue(self, request: Request, grammar: Grammar | None, tokens: TokenFilter | None) -> None:
        texts = self._texts.new_texts(request)
        if not self.has_work:
            self._progress_s = self._clock()
        seqs = self.scheduler.add(request)
        self._texts.begin(seqs, texts)
        if grammar is None and tokens is None:
            return
        for seq in seqs:
            try:
                # The output may be complete already if the request comes from another process.
                if not self.constraints.add(seq, grammar, tokens):
                    self.scheduler.finish(seq, "stop")
                    self._end(seq, Delta(seq.index, finish_reason="stop"))
            except GrammarError as error:
                self._give_up(seq, error)

    def num_requests_with(self, lora: LoraRef) -> int:
        return sum(request.lora == lora for request in self.scheduler.requests())

    def compile_grammar(self, request: Request) -> Grammar | None:
        """Return the grammar of a request. Compile it if it is not in the cache.

        Raises:
          RequestError: if it cannot be compiled.
        """
        spec = request.params.structured_outputs
        if spec is None:
            return None
        if self.grammars is None:
            raise refused("this engine does not support grammars")
        return self.grammars.compile(spec)

    def abort(self, request_id: str) -> None:
        """Free the request's slots and blocks at once. The next tick returns its last deltas."""
        aborted = self.scheduler.abort(request_id)
        for seq in aborted:
            self._end(seq, Delta(seq.index, finish_reason="abort"))
        if self._bisection.drop(aborted):
            self.scheduler.restrict(self._bisection.only)

    def drain(self) -> Outputs:
        """Abort everything and wait for the device. Return the last deltas."""
        self.abort_all()
        outputs = self.tick()
        assert self._in_flight is None and not self.scheduler.has_work
        return outputs

    def tick(self, before_wait: Callable[[], None] | None = None) -> Outputs:
        """Dispatch the next step and read one: the previous step, or the same one.

        A tick waits for the device at most once, and returns the deltas of the step that it has
        read. A step that raises does not fail the tick. The device is reset, and every sequence is
        recomputed from its tokens. A sequence that keeps failing is isolated and ended.

        Args:
          before_wait: called before this thread waits for the device, for work that would delay a
            step at any other time. A tick that reads no step does not call it.

        Raises:
          EngineError: if an earlier tick failed. The state of the device is then unknown.
          Exception: if the device could not be reset, or the failure was not the device's.
        """
        if self._failed:
            raise EngineError("an earlier step failed: create a new engine")
        self._failed = True  # until this tick has completed
        self._tick = tick = _Tick(before_wait)
        with step_span(self.num_steps):
            self.phases.begin()
            try:
                _mode_of(self)(self)
            except _StepFailed as failure:
                outputs = self._recover(failure.plan, failure.error)
            else:
                outputs, self._immediate = self._immediate, {}
                if tick.updates is not None:
                    with span("text"):
                        self._add_deltas(tick.updates, outputs)
                    self.phases.end("text")
                for seq, error in tick.without_mask:  # after its last delta; its new row is void
                    if not seq.finished:
                        self._give_up(seq, error)
        self._tick = _Tick()  # drop references to sequences that may have ended
        self._failed = False
        self._publish_events()
        return outputs

    # ---- pauses ----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Read the step in flight, and schedule no other step until `resume`. Requests stay.

        Raises:
          EngineError: if an earlier tick failed.
        """
        self._settle()
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._progress_s = self._clock()

    def drop_kv(self) -> None:
        """Queue all running sequences again, without keys and values. These are recomputed.

        Raises:
          EngineError: if an earlier tick failed.
        """
        self._settle()
        if self.speculator is not None:
            self.speculator.reset()
        self._forget_kv()
        self._publish_events()  # now, because there may be no further tick

    def empty_prefix_cache(self) -> None:
        """Empty the prefix cache, except for blocks of running requests."""
        self.scheduler.empty_prefix_cache()
        if self.host_memory is not None:
            self.host_memory.start(self.scheduler.transfers())  # frees the memory of the copies
        self._publish_events()

    def abort_all(self) -> None:
        for request_id in self.scheduler.request_ids():
            self.abort(request_id)

    def keep_evicted(self, host_memory: HostMemory) -> None:
        """Perform the copies of the pool's `host`. Call this method before the first tick."""
        assert self.scheduler.pool.host is not None
        self.host_memory = host_memory

    @property
    def host_kv(self) -> HostKVStats | None:
        """Statistics of the blocks in host memory; None if it is off. Thread-safe."""
        host, memory = self.scheduler.pool.host, self.host_memory
        return None if host is None or memory is None else host.stats(memory.block_bytes)

    # ---- events of the prefix cache --------------------------------------------------------------

    def publish_events(self, publish: Callable[[list[CacheEvent]], None]) -> None:
        """Call `publish` with the prefix cache's events after each tick that has any.

        It is called in the thread of `tick`, and must not block. Call this method before the first
        tick.
        """
        pool = self.scheduler.pool
        pool.events = CacheEvents()
        if pool.host is not None:
            pool.host.events = pool.events
        self._publish = publish

    def _publish_events(self) -> None:
        events = self.scheduler.pool.events
        taken = [] if events is None else events.take()
        if taken and self._publish is not None:
            self._publish(taken)

    # ---- new weights -----------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """The version of the weights that the next step uses. It is 0 at first."""
        return self._texts.weight_version

    def update_weights(
        self, install: Callable[[], None], version: int, in_flight: InFlightRequests
    ) -> None:
        """Read the step in flight, call `install`, and continue with the new weights.

        All keys and values are void afterwards, and so is the prefix cache. The next ticks compute
        them again. If `install` raises, nothing has changed.

        Args:
          install: replaces the weights.
          version: the new weights' version.
          in_flight: see `LLM.update_weights`.

        Raises:
          EngineError: if an earlier tick failed.
        """
        self._settle()
        install()
        self._texts.weight_version = version
        # First of all: no error below may leave keys and values of the old weights in use.
        for seq in self.scheduler.unread_prompts():
            # All logprobs and activations of a prompt are of one version.
            seq.num_scored = 0
            seq.num_returned = first_returned(seq.request, seq.index, 0)
            self._texts.forget_prompt(seq)
        self.drop_kv()
        if in_flight == "abort":
            self.abort_all()
        elif in_flight == "restart":
            for request in self.scheduler.requests():
                self._restart(request)

    def _settle(self) -> None:
        """Read and commit the step in flight, if any. The next tick returns its deltas.

        Raises:
          EngineError: if an earlier tick failed.
        """
        if self._failed:
            raise EngineError("an earlier step failed: create a new engine")
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        self._failed = True  # until the step in flight has been read
        self._tick = _Tick()
        self.phases.begin()
        try:
            self._commit(step, self._read(step))
        except _StepFailed as failure:
            self._immediate = self._recover(failure.plan, failure.error)
        else:
            self._add_deltas(self._tick.updates or [], self._immediate)
        self._tick = _Tick()
        self._failed = False

    def _restart(self, request: Request) -> None:
        """Queue the unfinished samples of a request again, without their output.

        If that is not possible, they end with an error.
        """
        dropped = self.scheduler.abort(request.request_id)
        grammar, tokens = self.constraints.of(dropped[0])
        for seq in dropped:
            self._texts.forget(seq)
            if self.speculator is not None:
                self.speculator.end(seq)
            if seq.num_output:
                self._immediate.setdefault(seq.request_id, []).append(
                    Delta(seq.index, weight_version=self.weight_version, restarted=True)
                )
        if self._bisection.drop(dropped):
            self.scheduler.restrict(self._bisection.only)
        try:
            self._queue(
                replace(request, outputs={seq.index: () for seq in dropped}), grammar, tokens
            )
        except Exception as error:  # only this request fails
            for seq in self.scheduler.abort(request.request_id):
                self._texts.forget(seq)
            if not isinstance(error, ForgeError):
                log.exception("request %s could not be restarted", request.request_id)
                error = EngineError("the request could not be restarted with the new weights")
            for seq in dropped:
                self._end(seq, Delta(seq.index, finish_reason="error", error=error))

    # ---- the parts of a step, shared by the modes ------------------------------------------------

    def _schedule(self, *, masks_late: bool = False) -> StepPlan | None:
        """Plan the next step. It may verify drafts if no step is in flight."""
        drafts = None
        if self.speculator is not None and self._in_flight is None:
            with span("draft"):
                drafts = _drafts(self.scheduler, self.speculator, self.constraints)
            self.phases.end("draft")
        with span("schedule"):
            if self.host_memory is not None:
                self._finish_copies(self.host_memory)
            plan = self.scheduler.schedule(drafts, masks_late=masks_late)
            if self.host_memory is not None:
                self._start_copies(self.host_memory, plan)
        self.phases.end("schedule")
        return plan

    def _finish_copies(self, host: HostMemory) -> None:
        """Let the scheduler use the blocks that have arrived."""
        try:
            finished = host.finished()
        except Exception as error:
            raise _StepFailed(None, error) from error
        self.scheduler.finish_transfers(finished)

    def _start_copies(self, host: HostMemory, plan: StepPlan | None) -> None:
        """Start the copies that must precede the step of `plan`. If nothing can run, wait."""
        try:
            host.start(self.scheduler.transfers())
            if plan is None and self._in_flight is None and self.scheduler.loads:
                host.wait()
        except Exception as error:
            raise _StepFailed(plan, error) from error

    def _forget_kv(self) -> None:
        """Queue all running sequences again. Drop all keys and values, also on the host."""
        self.scheduler.recover()
        if self.host_memory is not None:
            self.host_memory.reset()

    def _dispatch(self, plan: StepPlan) -> _InFlight:
        """Fill the masks of a plan and start it on the device."""
        if self.constraints.held:
            with span("mask"):
                seqs = self.scheduler.sequences_of(plan)
                masks, self._tick.without_mask = self.constraints.masks(plan, seqs)
            self.phases.end("mask")
            plan = plan if masks is None else replace(plan, masks=masks)
        dispatched_s = self._clock()
        try:
            with span("dispatch"):
                pending = self.device.dispatch(plan)
        except Exception as error:
            raise _StepFailed(plan, error) from error
        step = _InFlight(plan, pending, self._in_flight is None, dispatched_s)
        self.num_steps += 1
        self.step_tokens.observe(plan.num_tokens)
        self.step_sequences += plan.num_sequences
        self.max_step_sequences = max(self.max_step_sequences, plan.num_sequences)
        self.phases.end("dispatch")
        return step

    def _read(self, step: _InFlight) -> StepResult:
        try:
            if self._tick.before_wait is not None:
                self._tick.before_wait()
            with span("read"):
                result = self.device.read(step.pending)
            self.phases.end("read")
            if self.scheduler.budget is not None:
                self.scheduler.budget.record(step.plan, step.dispatched_s, self._clock())
        except Exception as error:
            raise _StepFailed(step.plan, error) from error
        return result

    def _commit(self, step: _InFlight, result: StepResult) -> None:
        speculator = self.speculator
        with span("commit"):
            now_s = self._clock()
            if self.watcher.watches:
                self.watcher.record(step.plan, result, self._progress_s, now_s)
            self._progress_s = now_s
            if speculator is not None:
                speculator.read(step.plan, alone=step.alone)
            updates = self.scheduler.commit(step.plan, result)
            if speculator is not None:
                speculator.learn(step.plan, updates)
            if self.constraints.held:
                updates = _follow(self, updates)
            if self._bisection.drop(seq for seq, got in updates if got.token_ids or seq.finished):
                self.scheduler.restrict(self._bisection.only)
        self._tick.updates = updates
        self.phases.end("commit")

    def _add_deltas(self, updates: list[SequenceUpdate], outputs: Outputs) -> None:
        self.generation_tokens += self._texts.add_deltas(updates, outputs)
        if self.speculator is not None:
            for seq, _ in updates:
                if seq.finished:
                    self.speculator.end(seq)

    def _recover(self, plan: StepPlan | None, error: Exception) -> Outputs:
        """Reset the device after the step of `plan` has raised, and recompute everything.

        Steps in flight are dropped with their unread tokens, which are sampled again.
        """
        if isinstance(error, self.unrecoverable):
            raise error
        self._add_deltas(self._tick.updates or [], self._immediate)
        log.warning(
            "retrying a failed step of %d sequences: %s: %s",
            0 if plan is None else plan.num_sequences,
            type(error).__name__,
            error,
        )
        self.num_recoveries += 1
        seqs = [] if plan is None else self.scheduler.sequences_of(plan)
        rows = () if plan is None else plan.sequences
        self._in_flight = None
        self.device.reset()
        if self.speculator is not None:
            self.speculator.reset()
        self._forget_kv()
        reached = [
            (seq, row.start + row.num_tokens)
            for seq, row in zip(seqs, rows, strict=True)
            if not seq.finished
        ]
        for seq in self._bisection.failed(reached):
            log.error("request %s: every step that includes it fails", seq.request_id)
            self._give_up(seq, StepError("the model could not compute this request"))
        self.scheduler.restrict(self._bisection.only)
        outputs, self._immediate = self._immediate, {}
        return outputs

    # ---- the end of a sequence -------------------------------------------------------------------

    def _give_up(self, seq: Sequence, error: ForgeError) -> None:
        """End one sequence with an error, which this tick or the next returns."""
        log.warning("request %s failed: %s", seq.request_id, error)
        self._end(seq, Delta(seq.index, finish_reason="error", error=error))
        self.scheduler.finish(seq, "error")

    def _end(self, seq: Sequence, last: Delta) -> None:
        self._texts.forget(seq)
        if self.speculator is not None:
            self.speculator.end(seq)
        self._immediate.setdefault(seq.request_id, []).append(last)


def _follow(core: EngineCore, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
    """End the outputs that their constraints end. Return the updates of valid outputs."""
    broken = set()
    for seq, error in core.constraints.follow(updates):
        if error is None:
            core.scheduler.finish(seq, "stop")
        else:
            core._give_up(seq, error)
            broken.add(seq)
    return [update for update in updates if update[0] not in broken] if broken else updates


def _drafts(
    scheduler: Scheduler, speculator: Speculator, constraints: Constraints
) -> dict[Sequence, tuple[int, ...]]:
    ahead = not constraints or not constraints.hold_up(scheduler.running)
    drafts = speculator.drafts(scheduler, runs_ahead=ahead)
    return constraints.cut(drafts) if constraints else drafts


def _drafts_need(core: EngineCore, speculator: Speculator, plan: StepPlan) -> bool:
    """Return True if the step in flight must be read before the next one is planned."""
    constraints = core.constraints
    if constraints and constraints.waits(core.scheduler.sequences_of(plan)):
        return True
    with span("draft"):
        waits = speculator.waits(plan, core.scheduler)
    core.phases.end("draft")
    return waits


# ---- the modes: one step from top to bottom ----------------------------------------------------
#
# Each mode stores its updates in `core._tick`, and a step that is still running in
# `core._in_flight`. A step that raises ends the mode with `_StepFailed`, and `tick` recovers.


def _mode_of(core: EngineCore) -> Callable[[EngineCore], None]:
    if core._paused:
        return _paused
    if not core._one_step_ahead:
        return _synchronous
    if core.speculator is not None:
        return _speculative
    if core._in_flight is not None and core.constraints.held:
        running = core.scheduler.sequences_of(core._in_flight.plan)
        if core.constraints.waits(running):
            return _masks_late
    return _one_step_ahead


def _paused(core: EngineCore) -> None:
    """Compute nothing: the tick only returns deltas that do not wait for a step."""
    assert core._in_flight is None


def _one_step_ahead(core: EngineCore) -> None:
    """Dispatch the next step while the previous one runs, then read the previous one."""
    previous = core._in_flight
    plan = core._schedule()
    core._in_flight = None if plan is None else core._dispatch(plan)
    if previous is not None:
        core._commit(previous, core._read(previous))


def _masks_late(core: EngineCore) -> None:
    """Plan the next step, read the previous one, and dispatch with the resulting masks.

    The device waits only for the masks: the commit runs after the dispatch. Used for steps in which
    many sequences have a grammar or bad words.
    """
    previous = core._in_flight
    assert previous is not None
    plan = core._schedule(masks_late=True)
    core._in_flight = None
    result = core._read(previous)
    if plan is None:
        core._commit(previous, result)
        return
    seqs = core.scheduler.sequences_of(previous.plan)
    core.constraints.follow_early(zip(seqs, result.sequences, strict=True))
    try:
        core._in_flight = core._dispatch(plan)
    finally:  # these tokens are valid even if the step raises
        core._commit(previous, result)


def _synchronous(core: EngineCore) -> None:
    plan = core._schedule()
    if plan is not None:
        step = core._dispatch(plan)
        core._commit(step, core._read(step))
    elif core.speculator is not None:
        core.speculator.idle()


def _speculative(core: EngineCore) -> None:
    """Read the previous step first if drafts pay off, because they continue its tokens.

    Otherwise dispatch the next step while the previous one runs.
    """
    assert core.speculator is not None
    previous = core._in_flight
    if previous is not None and _drafts_need(core, core.speculator, previous.plan):
        core._in_flight = None
        core._commit(previous, core._read(previous))
        previous = None
    plan = core._schedule()  # includes drafts if no step is in flight
    core._in_flight = None if plan is None else core._dispatch(plan)
    if previous is not None:
        core._commit(previous, core._read(previous))
    elif plan is None:
        core.speculator.idle()
