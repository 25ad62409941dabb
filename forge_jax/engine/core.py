"""The engine's loop body, one step ahead of the device, without a thread of its own.

`EngineCore` owns the scheduler, the device and the text side of every live sequence. `LLM` calls
`tick` in the caller's thread, `Engine` in its engine thread. It knows nothing of asyncio or HTTP.
"""

from __future__ import annotations

import copy
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, get_args

from forge_jax.config import EngineConfig, Pooling
from forge_jax.engine.fault_isolation import Bisection
from forge_jax.errors import (
    EngineError,
    ForgeError,
    GrammarError,
    NumericalError,
    RequestError,
    StepError,
)
from forge_jax.grammar.spec import refused
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.plan import (
    Device,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from forge_jax.schedule.request import LoraRef, Request, Sequence, TokenIds, output_room
from forge_jax.schedule.scheduler import Scheduler, SchedulerConfig, SequenceUpdate
from forge_jax.schedule.token_budget import TokenBudget
from forge_jax.speculate.speculator import Speculator
from forge_jax.telemetry.engine_state import Watcher
from forge_jax.telemetry.phases import PhaseTimes, StepTokens
from forge_jax.telemetry.spans import span, step_span
from forge_jax.telemetry.startup import StartupTimes
from forge_jax.text import Detokenizer, StopStrings

if TYPE_CHECKING:
    import jax

    from forge_jax.engine.adapters import Adapters
    from forge_jax.engine.constraints import Constraints
    from forge_jax.grammar import Grammar, GrammarCompiler
    from forge_jax.grammar.token_filter import TokenFilter
    from forge_jax.text import ChatTemplate, Tokenizer

SCORING_ROWS = 64
log = logging.getLogger(__name__)

Outputs = dict[str, list[Delta]]  # by request id


class Late(Protocol):
    """The executables that an engine begins without, while they are being compiled."""

    def adopt(self) -> bool:
        """Takes what has been compiled since; True if that was the last, and the engine is ready.

        To be called between two ticks, by the thread that ticks.
        """
        ...

    def on_compiled(self, call: Callable[[], None]) -> None:
        """Has `call` called, from any thread, whenever `adopt` has something to do."""
        ...

    def wait(self) -> None:
        """Until everything has been compiled; `adopt` takes it all then."""
        ...

    def cancel(self) -> None:
        """Compiles no more than has been begun."""
        ...


class Steps(Protocol):
    """What a profile has to know of the device's steps."""

    def compiled(self) -> Mapping[str, jax.stages.Compiled]:
        """What runs, by name. In any thread."""
        ...

    def settle(self) -> None:
        """Until the device has done all that was dispatched."""
        ...


class Pooler(Protocol):
    """The executables that pool hidden states: compiled when the first request asks for that."""

    @property
    def can_pool(self) -> bool:
        """Whether both has been done."""
        ...

    def compile_pooling(self) -> None:
        """Compiles them, in any thread but the one that ticks; a further call only waits.

        Raises:
          EngineError: there is no room for them.
        """
        ...

    def adopt_pooling(self) -> None:
        """Takes what has been compiled; between two ticks, by the thread that ticks."""
        ...


@dataclass(kw_only=True)
class EngineParts:
    """An engine that has been put together and can run: what `LLM` and `Engine` start from."""

    name: str
    core: EngineCore
    max_model_len: int
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    rng: random.Random
    guard: Callable[[], AbstractContextManager[Any]] = nullcontext  # `tick` runs under it
    compilations: Callable[[], int] = lambda: 0  # since ready
    clock: Callable[[], float] = time.monotonic
    system_fingerprint: str | None = None  # in the deterministic tier
    architecture: str | None = None  # in the words of the model's config.json
    shards: int = 1  # devices that share the model
    pooling: Pooling = "last"  # where a request does not say
    adapters: Adapters | None = None  # None: there can be none
    pooler: Pooler | None = None  # None: the device can pool from its start on
    steps: Steps | None = None  # None: there is no real device
    late: Late | None = None  # what it can begin without, and the rest of its start
    startup: StartupTimes = field(default_factory=StartupTimes)


@dataclass(slots=True)
class _InFlight:
    plan: StepPlan
    pending: Any
    alone: bool  # nothing else was in flight when it was dispatched
    dispatched_s: float


class _SequenceText:
    """Turns the token ids of one sequence into text that is safe to send."""

    __slots__ = ("_detokenizer", "_min_tokens", "_stops", "push_plain")

    def __init__(self, tokenizer: Tokenizer, request: Request, stops: StopStrings | None):
        self._detokenizer = Detokenizer(
            tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=request.params.skip_special_tokens,
        )
        self._stops = stops
        self._min_tokens = request.params.min_tokens
        # The text of tokens; None if there are stop strings to look for.
        self.push_plain = self._detokenizer.push if stops is None else None

    def push(self, token_ids: tuple[int, ...], num_before: int) -> tuple[str, str | None, int]:
        """Takes the output tokens that follow the first `num_before`.

        Returns the text to send, the stop string that matched, and the tokens it took.
        """
        if self._stops is None:
            return self._detokenizer.push(token_ids), None, len(token_ids)
        text = ""
        for taken, token in enumerate(token_ids, start=1):
            piece = self._detokenizer.push((token,))
            may_stop = num_before + taken > self._min_tokens
            safe, matched = self._stops.push(piece, may_stop=may_stop)
            text += safe
            if matched is not None:
                return text, matched, taken
        return text, None, len(token_ids)

    def flush(self) -> tuple[str, str | None]:
        tail = self._detokenizer.flush()
        if self._stops is None:
            return tail, None
        safe, matched = self._stops.push(tail)
        return (safe, matched) if matched is not None else (safe + self._stops.flush(), None)


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
) -> Scheduler:
    """The scheduler and block pool of a configuration whose sizes have been resolved."""
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
    return Scheduler(limits, pool, clock=time.monotonic, rng=rng, budget=budget)


def max_rows(max_num_seqs: int) -> int:
    """Rows with logits in one step: one for each sequence, and enough to score a prompt."""
    return max(max_num_seqs, SCORING_ROWS)


class EngineCore:
    """Schedules, dispatches, reads and turns into text; one call of `tick` per step.

    With `one_step_ahead` a tick dispatches a step and reads the one before, which the device has
    meanwhile been computing; without it, a tick waits for the very step that it has dispatched.
    With a `speculator`, a tick whose step had better begin with drafts reads the one before first.
    Where many sequences are held to a grammar or to bad words, a tick reads the one before just
    before it dispatches, for the masks of the new step, and commits it afterwards.

    Not thread-safe: one thread owns it.
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
    ):
        self.grammars = grammars
        self._constraints: Constraints | None = None  # made with the first
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.num_steps = 0
        self.num_recoveries = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.phases = PhaseTimes()
        self.step_tokens = StepTokens()
        self.step_sequences = 0  # of all steps together
        self.max_step_sequences = 0
        self.watcher = Watcher(scheduler, clock)
        self._device = device
        self._one_step_ahead = one_step_ahead
        self.speculator = speculator
        self._in_flight: _InFlight | None = None
        self._texts: dict[Sequence, _SequenceText] = {}
        self._prompt_logprobs: dict[Sequence, tuple[TokenLogprobs, ...]] = {}
        self._immediate: Outputs = {}
        self._failed = False
        self._before_wait: Callable[[], None] | None = None  # of the tick that runs
        self._bisection: Bisection[Sequence] = Bisection()
        self._clock = clock
        self._progress_s = clock()

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None or bool(self._immediate) or self.scheduler.has_work

    @property
    def stalled_s(self) -> float:
        """For how long there has been work, and no step has come back; any thread may ask."""
        return self._clock() - self._progress_s if self.has_work else 0.0

    @property
    def limits(self) -> Limits:
        """What a request must keep to; any thread may ask."""
        pool = self.scheduler.pool
        return Limits(
            vocab_size=self.vocab_size,
            context=self.scheduler.config.max_model_len,
            kv_tokens=pool.num_blocks * pool.block_size,
        )

    def check(self, request: Request) -> None:
        """Refuses what can never be served; safe to call from any thread.

        Raises:
          RequestError: with `param` named.
        """
        check_request(request, self.limits, self.tokenizer)

    def add(self, request: Request) -> None:
        """Queues a request that `check` has accepted."""
        request = _with_stops_in(request, self.vocab_size)
        grammar = self.compile_grammar(request)
        tokens = token_filter(request.params, self.tokenizer, self.vocab_size)
        texts = self._new_texts(request)
        if not self.has_work:
            self._progress_s = self._clock()
        seqs = self.scheduler.add(request)
        self._texts.update(zip(seqs, texts, strict=False))
        self.prompt_tokens += len(request.prompt_token_ids)
        if grammar is not None or tokens is not None:
            for seq in seqs:
                self._constrain(seq, grammar, tokens)

    def num_requests_with(self, lora: LoraRef) -> int:
        """How many requests that have not ended take an adapter."""
        return sum(request.lora == lora for request in self.scheduler.requests())

    def compile_grammar(self, request: Request) -> Grammar | None:
        """The grammar of a request, compiled here and now if nobody has done it before.

        Raises:
          RequestError: it cannot be compiled.
        """
        spec = request.params.structured_outputs
        if spec is None:
            return None
        if self.grammars is None:
            raise refused("this engine has no grammars")
        return self.grammars.compile(spec)

    def _constrain(
        self, seq: Sequence, grammar: Grammar | None, tokens: TokenFilter | None
    ) -> None:
        if self._constraints is None:
            from forge_jax.engine.constraints import Constraints

            ends = self.scheduler.config.eos_token_ids
            self._constraints = Constraints(self.vocab_size, ends)
        try:
            if not self._constraints.add(seq, grammar, tokens):  # complete when it moved here
                self.scheduler.finish(seq, "stop")
                self._forget(seq)
                self._immediate.setdefault(seq.request_id, []).append(
                    Delta(seq.index, finish_reason="stop")
                )
        except GrammarError as error:
            self._give_up(seq, error)

    def abort(self, request_id: str) -> None:
        """Frees the request's slots and blocks at once; its last deltas come with the next tick."""
        aborted = self.scheduler.abort(request_id)
        for seq in aborted:
            self._forget(seq)
            self._end_drafts(seq)
            self._immediate.setdefault(request_id, []).append(
                Delta(seq.index, finish_reason="abort")
            )
        if self._bisection.drop(aborted):
            self.scheduler.restrict(self._bisection.only)

    def _new_texts(self, request: Request) -> list[_SequenceText]:
        """One for each sample; none where no text is wanted or there is no tokenizer."""
        params = request.params
        if self.tokenizer is None or not params.detokenize:
            return []
        stops = None
        if params.stop and not params.constrained:
            stops = StopStrings(params.stop, params.include_stop_str_in_output)
        if request.outputs is None:
            return [
                _SequenceText(self.tokenizer, request, copy.copy(stops)) for _ in range(params.n)
            ]
        texts = []
        for output in request.outputs.values():
            text = _SequenceText(self.tokenizer, request, copy.copy(stops))
            text.push(tuple(output), 0)  # has been sent
            texts.append(text)
        return texts

    def drain(self) -> Outputs:
        """Aborts everything and waits for the device; returns the last deltas."""
        for request_id in self.scheduler.request_ids():
            self.abort(request_id)
        outputs = self.tick()
        assert self._in_flight is None and not self.scheduler.has_work
        return outputs

    def tick(self, before_wait: Callable[[], None] | None = None) -> Outputs:
        """Dispatches the next step, then reads the one before it (or the same one).

        Waits for the device at most once. Returns the news of the step that it has read. A step
        that raises is no failure of the tick: the device is reset, and all that ran is computed
        anew, from the tokens that the host knows; only who is found to be the cause ends.

        Args:
          before_wait: is called when this thread has nothing to do but to wait for the device: time
            for what would have held up the step. A tick that reads no step does not call it.

        Raises:
          EngineError: an earlier tick failed; what the device holds is not known any more.
          Exception: the device could not be reset, or the failure was not the device's.
        """
        if self._failed:
            raise EngineError("an earlier step failed: make a new engine")
        self._failed = True  # until this tick has come to its end
        self._before_wait = before_wait
        with step_span(self.num_steps):
            outputs = self._tick()
        self._failed = False
        return outputs

    def _tick(self) -> Outputs:  # noqa: C901, PLR0915
        phases, speculator = self.phases, self.speculator
        phases.begin()
        updates: list[SequenceUpdate] | None = None  # of the step that has been read
        late = self._masks_late()
        if self._in_flight is not None and not late and self._waits(self._in_flight.plan):
            step, self._in_flight = self._in_flight, None
            try:
                result = self._read(step)
            except Exception as error:
                return self._recover(step.plan, error)
            updates = self._commit(step, result)
        plan = self._schedule(late)
        dispatched: _InFlight | None = None
        failed: list[tuple[Sequence, ForgeError]] = []
        if plan is not None:
            read: tuple[_InFlight, StepResult] | None = None  # that has not been committed
            if late and self._in_flight is not None:
                step, self._in_flight = self._in_flight, None
                try:
                    read = step, self._read(step)
                except Exception as error:
                    return self._recover(step.plan, error)
                self._foresee(*read)
            plan, failed = self._mask(plan)
            dispatched_s = self._clock()
            try:
                with span("dispatch"):
                    pending = self._device.dispatch(plan)
            except Exception as error:
                if read is not None:
                    updates = self._commit(*read)
                self._add_deltas(updates or [], self._immediate)
                return self._recover(plan, error)
            dispatched = _InFlight(plan, pending, self._in_flight is None, dispatched_s)
            self.num_steps += 1
            self.step_tokens.observe(plan.num_tokens)
            self.step_sequences += plan.num_sequences
            self.max_step_sequences = max(self.max_step_sequences, plan.num_sequences)
            phases.end("dispatch")
            if read is not None:
                updates = self._commit(*read)
        if self._one_step_ahead:
            step, self._in_flight = self._in_flight, dispatched
        else:
            step = dispatched
        if step is not None:
            try:
                result = self._read(step)
            except Exception as error:
                return self._recover(step.plan, error)
            updates = self._commit(step, result)
        elif dispatched is None and speculator is not None:
            speculator.idle()
        outputs = self._take_immediate()
        if updates is not None:
            with span("text"):
                self._add_deltas(updates, outputs)
            phases.end("text")
        for seq, error in failed:  # after its last news; its row of the new step is burnt
            if not seq.finished:
                self._give_up(seq, error)
        return outputs

    def _read(self, step: _InFlight) -> StepResult:
        if self._before_wait is not None:
            self._before_wait()
        with span("read"):
            result = self._device.read(step.pending)
        self.phases.end("read")
        if self.scheduler.budget is not None:
            self.scheduler.budget.record(step.plan, step.dispatched_s, self._clock())
        return result

    def _masks_late(self) -> bool:
        """Whether the next step is made before the one in flight is read, and its masks after.

        So the device waits for no more than the masks. Not with drafts, which need every token.
        """
        if self._in_flight is None or not self._constraints or self.speculator is not None:
            return False
        return self._constraints.waits(self.scheduler.sequences_of(self._in_flight.plan))

    def _foresee(self, step: _InFlight, result: StepResult) -> None:
        """Lets the constraints have the tokens of a step that is committed behind the next."""
        assert self._constraints is not None
        seqs = self.scheduler.sequences_of(step.plan)
        self._constraints.foresee(zip(seqs, result.sequences, strict=True))

    def _waits(self, plan: StepPlan) -> bool:
        """Whether the step in flight, that of `plan`, should be read before the next is made."""
        if self.speculator is None:
            return False
        if self._constraints and self._constraints.waits(self.scheduler.sequences_of(plan)):
            return True
        with span("draft"):
            waits = self.speculator.waits(plan, self.scheduler)
        self.phases.end("draft")
        return waits

    def _mask(self, plan: StepPlan) -> tuple[StepPlan, list[tuple[Sequence, ForgeError]]]:
        """The plan with the masks of its rows, and who has to be given up for what."""
        if not self._constraints:
            return plan, []
        with span("mask"):
            masks, failed = self._constraints.masks(plan, self.scheduler.sequences_of(plan))
        self.phases.end("mask")
        return (plan if masks is None else replace(plan, masks=masks)), failed

    def _schedule(self, masks_late: bool) -> StepPlan | None:
        drafts = None
        if self.speculator is not None and self._in_flight is None:  # else tokens are not known
            with span("draft"):
                drafts = self._drafts(self.speculator)
            self.phases.end("draft")
        with span("schedule"):
            plan = self.scheduler.schedule(drafts, masks_late=masks_late)
        self.phases.end("schedule")
        return plan

    def _drafts(self, speculator: Speculator) -> dict[Sequence, tuple[int, ...]]:
        ahead = not self._constraints or not self._constraints.hold_up(self.scheduler.running)
        drafts = speculator.drafts(self.scheduler, runs_ahead=ahead)
        return self._constraints.cut(drafts) if self._constraints else drafts

    def _commit(self, step: _InFlight, result: StepResult) -> list[SequenceUpdate]:
        """Takes the result of a step that has just been read: what its sequences gained."""
        with span("commit"):
            updates = self._take_result(step, result)
        self.phases.end("commit")
        return updates

    def _take_result(self, step: _InFlight, result: StepResult) -> list[SequenceUpdate]:
        now_s = self._clock()
        if self.watcher.watches:
            self.watcher.record(step.plan, result, self._progress_s, now_s)
        self._progress_s = now_s
        if self.speculator is not None:
            self.speculator.read(step.plan, alone=step.alone)
        updates = self.scheduler.commit(step.plan, result)
        if self.speculator is not None:
            self.speculator.learn(step.plan, updates)
        if self._constraints:
            updates = self._follow(self._constraints, updates)
        if self._bisection.drop(seq for seq, got in updates if got.token_ids or seq.finished):
            self.scheduler.restrict(self._bisection.only)
        return updates

    def _follow(
        self, constraints: Constraints, updates: list[SequenceUpdate]
    ) -> list[SequenceUpdate]:
        """Ends the outputs that their constraints end. What is left of the gains."""
        broken = set()
        for seq, error in constraints.follow(updates):
            if error is None:
                self.scheduler.finish(seq, "stop")
            else:
                self._give_up(seq, error)
                broken.add(seq)
        return [gain for gain in updates if gain[0] not in broken] if broken else updates

    def _give_up(self, seq: Sequence, error: ForgeError) -> None:
        """Ends one sequence with an error; the client learns of it with this tick or the next."""
        log.warning("request %s is given up: %s", seq.request_id, error)
        self._forget(seq)
        self._end_drafts(seq)
        self.scheduler.finish(seq, "error")
        self._immediate.setdefault(seq.request_id, []).append(
            Delta(seq.index, finish_reason="error", error=error)
        )

    def _take_immediate(self) -> Outputs:
        outputs, self._immediate = self._immediate, {}
        return outputs

    def _recover(self, plan: StepPlan, error: Exception) -> Outputs:
        """After the step of `plan` has raised: everything is computed anew, but its cause.

        Steps in flight are given up, with the tokens that nobody has read: they are sampled again.
        """
        log.warning(
            "a step of %d sequences failed and is computed anew: %s: %s",
            plan.num_sequences,
            type(error).__name__,
            error,
        )
        self.num_recoveries += 1
        seqs = self.scheduler.sequences_of(plan)
        self._in_flight = None
        self._device.reset()
        if self.speculator is not None:
            self.speculator.reset()
        self.scheduler.recover()
        reached = [
            (seq, row.start + row.num_tokens)
            for seq, row in zip(seqs, plan.sequences, strict=True)
            if not seq.finished
        ]
        for seq in self._bisection.failed(reached):
            log.error("request %s made its step fail each time", seq.request_id)
            self._give_up(seq, StepError("the model could not compute this request"))
        self.scheduler.restrict(self._bisection.only)
        return self._take_immediate()

    def _add_deltas(self, updates: list[SequenceUpdate], outputs: Outputs) -> None:
        """Adds what each sequence gained; if that fails, it costs this request and no other."""
        texts, prompt_logprobs = self._texts, self._prompt_logprobs
        num_plain = 0
        for seq, got in updates:
            try:
                state = texts.get(seq)
                if (  # a token in the middle of an output, and nothing else: nearly every row
                    state is not None
                    and seq.finish_reason is None
                    and got.logprobs is None
                    and got.prompt_logprobs is None
                    and not prompt_logprobs
                    and (push := state.push_plain) is not None
                ):
                    token_ids = got.token_ids
                    num_plain += len(token_ids)
                    delta = Delta(seq.index, push(token_ids), token_ids)
                    if not seq.told:
                        seq.told = True
                        delta.num_cached_tokens, delta.queue_s = seq.num_cached, seq.queue_s
                else:
                    delta = self._delta(seq, got)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # a panic inside tokenizers is no Exception
                delta = self._without_text(seq)
            if delta is None:
                continue
            request_id = seq.key[0]
            if request_id in outputs:
                outputs[request_id].append(delta)
            else:
                outputs[request_id] = [delta]
        self.generation_tokens += num_plain
        if self.speculator is not None:
            for seq, _ in updates:
                if seq.finished:
                    self._end_drafts(seq)

    def _without_text(self, seq: Sequence) -> Delta:
        log.exception("request %s: its tokens could not be turned into text", seq.request_id)
        self._forget(seq)
        self.scheduler.finish(seq, "error")
        error = EngineError("the output could not be turned into text")
        return Delta(seq.index, finish_reason="error", error=error)

    def _delta(self, seq: Sequence, got: SequenceResult) -> Delta | None:
        token_ids = got.token_ids
        self.generation_tokens += len(token_ids)
        prompt_logprobs = got.prompt_logprobs
        if self._prompt_logprobs and seq in self._prompt_logprobs:
            prompt_logprobs = self._prompt_logprobs.pop(seq) + (prompt_logprobs or ())
        if not token_ids and seq.finish_reason is None:  # more of the prompt is to come
            if prompt_logprobs is not None:
                self._prompt_logprobs[seq] = prompt_logprobs
            return None
        if got.fault:
            self._forget(seq)
            error = NumericalError("the model gave logits that are not finite for this request")
            return Delta(seq.index, finish_reason="error", error=error)
        text, logprobs = "", got.logprobs
        state = self._texts.get(seq)
        if state is not None:
            if state.push_plain is not None and seq.finish_reason is None:
                text = state.push_plain(token_ids)
            else:
                text, num_taken = self._text_to_an_end(seq, token_ids, state)
                token_ids = token_ids[:num_taken]
                logprobs = None if logprobs is None else logprobs[:num_taken]
        return Delta(
            seq.index,
            text,
            token_ids,
            logprobs,
            prompt_logprobs,
            seq.finish_reason,
            seq.stop_reason,
            None,
            seq.num_cached,
            seq.num_drafted,
            seq.num_accepted,
            got.pooled,
            seq.queue_s,
            seq.num_preemptions,
        )

    def _text_to_an_end(
        self, seq: Sequence, token_ids: tuple[int, ...], state: _SequenceText
    ) -> tuple[str, int]:
        """The text of tokens that may end the sequence, and how many of them it takes.

        Ends it where a stop string is found; writes out what was held back where it has ended.
        """
        # The token that ended the output is not part of its text.
        ended = seq.finish_reason == "stop" and token_ids and token_ids[-1] in seq.stop_ids
        visible = token_ids[:-1] if ended else token_ids
        text, matched, num_taken = state.push(visible, seq.num_output - len(token_ids))
        if matched is None:
            num_taken = len(token_ids)
            if seq.finish_reason is not None:
                tail, matched = state.flush()
                text += tail
        if matched is not None:
            self.scheduler.finish(seq, "stop", matched)
        if seq.finish_reason is not None:
            del self._texts[seq]
            if self._constraints is not None:  # by a stop string it does not learn of
                self._constraints.end(seq)
        return text, num_taken

    def _end_drafts(self, seq: Sequence) -> None:
        if self.speculator is not None:
            self.speculator.end(seq)

    def _forget(self, seq: Sequence) -> None:
        if self._constraints is not None:
            self._constraints.end(seq)
        self._texts.pop(seq, None)
        self._prompt_logprobs.pop(seq, None)


class Limits(NamedTuple):
    """What a request must keep to, in tokens and ids."""

    vocab_size: int  # the model's output width
    context: int  # prompt and output of a sequence
    kv_tokens: int  # the KV cache of the engine


def check_request(request: Request, limits: Limits, tokenizer: Tokenizer | None) -> None:
    """Refuses what an engine of these limits can never serve.

    Raises:
      RequestError: with `param` named.
    """
    check_token_ids(request, limits.vocab_size)
    check_salt(request.cache_salt)
    _check_pooling(request)
    if request.params.constrained and tokenizer is None:
        raise refused("the model has no tokenizer")
    if request.params.stop and tokenizer is None:
        raise RequestError(
            "stop strings need a tokenizer, which this model does not have: use stop_token_ids",
            param="stop",
        )
    token_filter(request.params, tokenizer, limits.vocab_size)
    output_room(request, limits.context, limits.kv_tokens)


def token_filter(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int
) -> TokenFilter | None:
    """What `allowed_token_ids` and `bad_words` leave, if they exclude anything.

    Raises:
      RequestError: they leave nothing, or a word has no tokens.
    """
    if params.allowed_token_ids is None and not params.bad_words:
        return None
    from forge_jax.grammar.token_filter import TokenFilter

    return TokenFilter.of(params, tokenizer, vocab_size)


def _check_pooling(request: Request) -> None:
    params = request.params
    if request.pooling is None:
        return
    if request.pooling not in get_args(Pooling):
        raise RequestError("pooling must be last or mean", param="pooling")
    if params.max_tokens != 0 or params.n != 1 or params.constrained:
        raise RequestError(
            "with pooling there is no output: max_tokens must be 0 and n 1", param="max_tokens"
        )


def check_salt(salt: str) -> None:
    """Refuses what cannot be hashed.

    Raises:
      RequestError: naming the field.
    """
    try:
        salt.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise RequestError("cache_salt must be valid text", param="cache_salt") from error


def _with_stops_in(request: Request, vocab_size: int) -> Request:
    """The request without stop token ids beyond the vocabulary, which no token can match."""
    stops = request.params.stop_token_ids
    if not stops or max(stops) < vocab_size:
        return request
    kept = tuple(token for token in stops if token < vocab_size)
    return replace(request, params=replace(request.params, stop_token_ids=kept))


def check_token_ids(request: Request, vocab_size: int) -> None:
    """Refuses token ids outside the model's output width (`vocab_size`).

    Raises:
      RequestError: naming the field.
    """
    ids = TokenIds.of(request.prompt_token_ids)
    if not ids:
        raise RequestError("the prompt is empty", param="prompt")
    if ids.low < 0 or ids.high >= vocab_size:
        raise RequestError(
            f"the prompt has a token id outside the model's vocabulary (0..{vocab_size - 1})",
            param="prompt",
        )
    for name, given in (
        ("logit_bias", request.params.logit_bias),
        ("allowed_token_ids", request.params.allowed_token_ids),
    ):
        if given and (token := max(given)) >= vocab_size:
            raise RequestError(
                f"{name}: token id {token} is outside the model's vocabulary (0..{vocab_size - 1})",
                param=name,
            )
