"""The connection of scheduler and drafter: which sequences get drafts, and how many.

A drafter on the host needs all tokens of a sequence, but the engine runs one step ahead of the
tokens that were read. A step that verifies drafts must therefore wait for the previous step, and
loses the overlap of host and device. `waits` decides if that pays, from the confidence that the
drafter predicts one token early.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forge_jax.schedule.plan import StepPlan
from forge_jax.schedule.request import Sequence
from forge_jax.schedule.scheduler import Scheduler, SequenceUpdate
from forge_jax.speculate.draft_length import Experience, LengthPolicy
from forge_jax.speculate.drafter import Draft, Drafter

log = logging.getLogger(__name__)

LOOK_AT = 8  # Sequences that a look predicts.
LOOK_PART, LOOK_SAVED_PART = 0.003, 0.25
STUDY = 32  # Tokens of earlier outputs per call of `ingest`.
STUDY_PART, STUDY_SAVED_PART = 0.005, 0.05
STUDY_IDLE = 256  # The same while the engine is idle.
EARN_EACH = 16  # Steps between two increases of the budgets.
# The steps that are timed among those that run ahead, counted from the last step that was waited
# for, was looked at or had prompts. The steps right after it take longer. If drafts do not pay,
# nearly all steps run ahead.
TIMED, TIMED_EACH = range(3, 12), 8


class Budget:
    """The host time that a task may take, in units of a step's time.

    If drafts do not pay, the budget is almost zero, because on a CPU host and device share the
    processor. If they pay, it is a part of the time saved. Each trial of the length policy gets a
    minimum.

    Args:
      part: the part of each step that is added.
      saved_part: the part that is added of the steps that accepted drafts have saved.
    """

    TRIAL, MOST = 4.0, 50.0  # the minimum for a trial, and the maximum

    def __init__(self, part: float, saved_part: float):
        self._part, self._saved_part = part, saved_part
        self._steps = self.TRIAL

    @property
    def left(self) -> bool:
        return self._steps > 0

    def step(self, count: int, saved: float) -> None:
        """Add the income of `count` steps, which saved `saved` others; negative if they lost."""
        earned = self._part * count + self._saved_part * saved
        self._steps = min(self._steps + earned, self.MOST)

    def spend(self, steps: float) -> None:
        self._steps -= steps

    def begin_trial(self) -> None:
        self._steps = max(self._steps, self.TRIAL)


@dataclass(frozen=True, kw_only=True)
class SpeculationStats:
    """Counters of speculative decoding since the engine started."""

    num_drafts: int  # verified drafts, one per sequence and step
    num_draft_tokens: int
    accepted_per_position: tuple[int, ...]  # by position in the draft

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_position)


class Speculator:
    """The source of drafts for the next step, which adapts to their acceptance.

    If the drafter raises, it is disabled. The engine then continues without drafts. Only one thread
    uses a speculator.

    Args:
      max_draft_tokens: the maximum number of draft tokens per sequence and step.
      one_step_ahead: True if the engine dispatches a step before it has read the previous one.
      clock: returns seconds.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        max_draft_tokens: int,
        one_step_ahead: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.policy = LengthPolicy()
        self._drafter: Drafter | None = drafter  # None after it has raised
        self._max_draft_tokens = max_draft_tokens
        self._one_step_ahead = one_step_ahead
        self._clock = clock
        self._experience: dict[Sequence, Experience] = {}
        self._verifying: dict[Sequence, Draft] = {}
        self._num_drafts = self._num_draft_tokens = 0
        self._accepted = [0] * max_draft_tokens  # by position
        self._num_looks = 0
        self._waited = False  # True if the next step may have drafts, because nothing is in flight
        self._num_ahead = 0  # consecutive steps that ran ahead
        self._to_look = Budget(LOOK_PART, LOOK_SAVED_PART)
        self._to_study = Budget(STUDY_PART, STUDY_SAVED_PART)
        self._unread = False  # True if the drafter has outputs to ingest.
        self._num_unpaid = 0  # Steps since the last increase of the budgets.
        self._declined = False  # True if drafts for the latest step were proposed, but not used.
        self._drafted_s: float | None = None  # Duration of the last step, if it had drafts.
        self._read_s: float | None = None  # Time of the last read; None after the engine was idle.

    def stats(self) -> SpeculationStats:
        """Return the counters. Thread-safe."""
        return SpeculationStats(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            accepted_per_position=tuple(self._accepted),
        )

    @property
    def has_failed(self) -> bool:
        """True if the drafter has raised and is disabled."""
        return self._drafter is None

    # ---- before a step -------------------------------------------------------------------------

    def waits(self, plan: StepPlan, scheduler: Scheduler) -> bool:
        """Return True if the step of `plan`, in flight, should be read before the next one."""
        self._waited = bool(plan.num_drafts) or self._is_worth_waiting(plan, scheduler)
        return self._waited

    def _is_worth_waiting(self, plan: StepPlan, scheduler: Scheduler) -> bool:
        num_sequences = len(plan.decodes)
        if plan.chunks or not self._may_look(num_sequences, runs_ahead=True):
            return False
        seqs = [seq for seq in scheduler.running if seq.num_pending == 1 and seq.takes_drafts]
        return bool(seqs) and self._pays(seqs, num_sequences, runs_ahead=True, in_flight=True)

    def drafts(
        self, scheduler: Scheduler, *, runs_ahead: bool = True
    ) -> dict[Sequence, tuple[int, ...]]:
        """Return the drafts that the next step should verify, the most probable first.

        Args:
          runs_ahead: True if steps without drafts run while another one is in flight.
        """
        self._verifying.clear()
        runs_ahead = runs_ahead and self._one_step_ahead
        waited, self._waited = self._waited, False
        self._declined = False
        seqs = scheduler.verifiable()
        num_sequences = scheduler.num_running
        if not seqs or not (waited or self._may_look(num_sequences, runs_ahead)):
            return {}
        if not waited and len(seqs) > LOOK_AT and not self._pays(seqs, num_sequences, runs_ahead):
            return {}
        drafts: dict[Sequence, Draft] = {}
        reach: dict[Sequence, list[float]] = {}
        updates: list[float] = []
        began_s = self._clock()
        proposed = self._ask(lambda drafter: drafter.propose(seqs), [Draft()] * len(seqs))
        if not waited:
            self._spend_look(began_s, num_sequences, runs_ahead)
        for seq, draft in zip(seqs, proposed, strict=True):
            if draft.token_ids:
                drafts[seq] = draft
                reach[seq] = self._reach(seq, draft.confidence)
                updates += reach[seq]
        updates.sort(reverse=True)
        count = self.policy.choose(num_sequences, updates, runs_ahead=runs_ahead)
        if not count:
            self._declined = bool(updates)
            return {}
        self.policy.tried(num_sequences, runs_ahead=runs_ahead)
        least = updates[count - 1]
        chosen: dict[Sequence, tuple[int, ...]] = {}
        for seq in sorted(drafts, key=lambda seq: reach[seq][0], reverse=True):
            length = sum(value >= least for value in reach[seq])
            if length:
                chosen[seq] = drafts[seq].token_ids[:length]
                self._verifying[seq] = drafts[seq]
        return chosen

    # ---- after a step --------------------------------------------------------------------------

    def read(self, plan: StepPlan, *, alone: bool) -> None:
        """Record that the step of `plan` has just been read.

        Args:
          alone: True if nothing else was in flight when it was dispatched.
        """
        now_s, before_s = self._clock(), self._read_s
        self._read_s, self._drafted_s = now_s, None
        drafted = bool(plan.chunks) and plan.num_drafts > 0
        if self.policy.step(drafted):
            self._to_look.begin_trial()
            self._to_study.begin_trial()
        if plan.chunks or alone:
            self._num_ahead = 0
            if before_s is not None:
                self._time(plan, drafted, now_s - before_s)
        else:  # nearly every step, if drafts do not pay
            self._num_ahead += 1
            if before_s is not None and (
                self._num_ahead in TIMED or self._num_ahead % TIMED_EACH == 0
            ):
                self.policy.ahead.record(plan.num_tokens, now_s - before_s)

    def _time(self, plan: StepPlan, drafted: bool, seconds: float) -> None:
        """Record the time between two reads for the step of `plan`, which did not run ahead."""
        if not plan.chunks:
            self.policy.alone.record(plan.num_tokens, seconds)
            if self._declined:  # the cost of drafting without verification
                self.policy.drafted.record(plan.num_tokens, seconds)
        elif drafted and all(row.num_drafts for row in plan.chunks):
            self.policy.drafted.record(plan.num_tokens, seconds)
            self._drafted_s = seconds

    def idle(self) -> None:
        """Record that nothing is in flight, so the time until the next read is not a step's."""
        self._read_s = None
        if self._unread:
            self._unread = self._ask(lambda drafter: drafter.ingest(STUDY_IDLE), False)

    def learn(self, plan: StepPlan, updates: Seq[SequenceUpdate]) -> None:
        """Learn from the acceptance of the drafts of `plan`."""
        self._num_unpaid += 1
        if plan.chunks and plan.num_drafts:
            self._learn(plan, updates)
            self._earn(self._saved(plan, updates))
        elif self._num_unpaid == EARN_EACH:
            self._earn(0.0)
        if self._unread and self._to_study.left:
            self._study(plan.num_sequences)

    def _earn(self, saved: float) -> None:
        self._to_look.step(self._num_unpaid, saved)
        self._to_study.step(self._num_unpaid, saved)
        self._num_unpaid = 0

    def _saved(self, plan: StepPlan, updates: Seq[SequenceUpdate]) -> float:
        """Return the steps without drafts that the step of `plan` has saved."""
        tokens = sum(len(got.token_ids) for _, got in updates) / plan.num_sequences
        plain_s = self.policy.plain_s(plan.num_sequences, runs_ahead=self._one_step_ahead)
        if self._drafted_s is None or plain_s is None:
            return 0.0
        return tokens - self._drafted_s / plain_s

    def _learn(self, plan: StepPlan, updates: Seq[SequenceUpdate]) -> None:
        lengths = {row.seq_key: row.num_drafts for row in plan.chunks if row.num_drafts}
        for seq, got in updates:
            draft = self._verifying.pop(seq, None)
            length = lengths.get(seq.key)
            if draft is None or length is None or got.fault:
                continue
            num_right = max(len(got.token_ids) - 1, 0)
            self._num_drafts += 1
            self._num_draft_tokens += length
            for position in range(num_right):
                self._accepted[position] += 1
            if not seq.finished:
                experience = self._of(seq)
                self.policy.acceptance.learn(draft.confidence[:length], num_right, experience)

    def end(self, seq: Sequence) -> None:
        """Release the state of a sequence that has ended."""
        self._experience.pop(seq, None)
        self._verifying.pop(seq, None)
        self._ask(lambda drafter: drafter.end(seq), None)
        self._unread = True

    def reset(self) -> None:
        """Drop the drafts and the drafter's device state, after a step has raised."""
        self._verifying.clear()
        self._ask(lambda drafter: drafter.reset(), None)

    # ---- helpers -------------------------------------------------------------------------------

    def _ask[T](self, ask: Callable[[Drafter], T], otherwise: T) -> T:
        if self._drafter is None:
            return otherwise
        try:
            return ask(self._drafter)
        except Exception:
            log.exception("the drafter failed: speculation is off from now on")
            self._drafter = None
            return otherwise

    def _reach(self, seq: Sequence, confidence: Seq[float]) -> list[float]:
        """Return the acceptance probability of each token, up to the longest draft."""
        confidence = confidence[: self._max_draft_tokens]
        return self.policy.acceptance.reach(confidence, self._of(seq))

    def _of(self, seq: Sequence) -> Experience:
        experience = self._experience.get(seq)
        if experience is None:
            experience = self._experience[seq] = Experience()
        experience.fade()
        return experience

    def _study(self, num_sequences: int) -> None:
        step_s, began_s = (
            self.policy.plain_s(num_sequences, runs_ahead=self._one_step_ahead),
            self._clock(),
        )
        if step_s:
            self._unread = self._ask(lambda drafter: drafter.ingest(STUDY), False)
            self._to_study.spend((self._clock() - began_s) / step_s)

    def _may_look(self, num_sequences: int, runs_ahead: bool) -> bool:
        return (
            self._drafter is not None
            and self._to_look.left
            and self.policy.knows(num_sequences, runs_ahead=runs_ahead)
        )

    def _pays(
        self,
        seqs: Seq[Sequence],
        num_sequences: int,
        runs_ahead: bool,
        in_flight: bool = False,
    ) -> bool:
        """Return True if drafts for `seqs` would probably pay.

        The prediction uses a sample of the sequences, which take turns.
        """
        began_s = self._clock()
        if len(seqs) > LOOK_AT:
            first = self._num_looks * LOOK_AT % len(seqs)
            seqs = [*seqs[first:], *seqs[:first]][:LOOK_AT]
        updates: list[float] = []
        foreseen = self._ask(lambda drafter: drafter.predict_confidence(seqs), [()] * len(seqs))
        for seq, confidence in zip(seqs, foreseen, strict=True):
            updates += self._reach(seq, confidence)
        updates *= num_sequences // len(seqs)
        updates.sort(reverse=True)
        chosen = self.policy.choose(
            num_sequences, updates, runs_ahead=runs_ahead, in_flight=in_flight
        )
        self._spend_look(began_s, num_sequences, runs_ahead)
        return chosen > 0

    def _spend_look(self, began_s: float, num_sequences: int, runs_ahead: bool) -> None:
        self._num_looks += 1
        self._num_ahead = 0
        step_s = self.policy.plain_s(num_sequences, runs_ahead=runs_ahead)
        assert step_s is not None  # `_may_look` requires step times
        self._to_look.spend((self._clock() - began_s) / step_s)
