"""Between the scheduler and a drafter: who drafts, how much, and whether to wait for it.

A drafter on the host needs to know all tokens of a sequence, and the engine runs a step ahead of
what it knows. So a step whose sequences could verify drafts has to wait for the one before it,
which costs the time in which host and device would have worked at once. `waits` decides that from
what the drafter would guess already, one token early.
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

LOOK_AT = 8  # sequences
LOOK_PART, LOOK_SAVED_PART = 0.003, 0.25
STUDY = 32  # tokens of earlier outputs at a time
STUDY_PART, STUDY_SAVED_PART = 0.005, 0.05
STUDY_IDLE = 256  # the same, when there is nothing else to do
EARN_EACH = 16  # steps, from which the budgets grow
# Which steps are timed of those that run ahead, counted since one was waited for, was looked at or
# had prompts: what follows takes longer. Nearly all steps are such where drafts bring nothing.
TIMED, TIMED_EACH = range(3, 12), 8


class Budget:
    """How much time the host may spend on something, in steps' worth.

    Next to none where drafts bring nothing: it costs more than its time where host and device share
    the processor. Where they bring tokens, a part of what they save. And enough to find out, for
    each trial of the length policy.

    Args:
      part: of each step.
      saved_part: of the steps that accepted drafts have spared.
    """

    TRIAL, MOST = 4.0, 50.0  # for a trial; and held at most

    def __init__(self, part: float, saved_part: float):
        self._part, self._saved_part = part, saved_part
        self._steps = self.TRIAL

    @property
    def left(self) -> bool:
        return self._steps > 0

    def step(self, count: int, saved: float) -> None:
        """So many steps have been made, which spared so many others; negative if they took more."""
        earned = self._part * count + self._saved_part * saved
        self._steps = min(self._steps + earned, self.MOST)

    def spend(self, steps: float) -> None:
        self._steps -= steps

    def begin_trial(self) -> None:
        self._steps = max(self._steps, self.TRIAL)


@dataclass(frozen=True, kw_only=True)
class SpeculationStats:
    """Counters since the start."""

    num_drafts: int  # sequences that had some verified, over all steps
    num_draft_tokens: int
    accepted_per_position: tuple[int, ...]  # in the draft

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_position)


class Speculator:
    """Proposes drafts for the next step and learns from what became of them.

    A drafter that raises is asked no more: then there are no drafts, and everything else goes on.

    One thread owns it.

    Args:
      max_draft_tokens: of one sequence in one step.
      one_step_ahead: whether the engine dispatches a step before it has read the one before.
      clock: seconds.
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
        self._drafter: Drafter | None = drafter  # None: it has raised
        self._max_draft_tokens = max_draft_tokens
        self._one_step_ahead = one_step_ahead
        self._clock = clock
        self._experience: dict[Sequence, Experience] = {}
        self._verifying: dict[Sequence, Draft] = {}
        self._num_drafts = self._num_draft_tokens = 0
        self._accepted = [0] * max_draft_tokens  # by position
        self._num_looks = 0
        self._waited = False  # for the step before the next, so that the next may have drafts
        self._num_ahead = 0  # steps, one after the other
        self._to_look = Budget(LOOK_PART, LOOK_SAVED_PART)
        self._to_study = Budget(STUDY_PART, STUDY_SAVED_PART)
        self._unread = False  # whether there is something to study
        self._num_unpaid = 0  # steps since the budgets grew
        self._declined = False  # drafts were proposed for the latest step, and none was verified
        self._drafted_s: float | None = None  # that the last step took, if it had drafts
        self._read_s: float | None = None  # when the last step was read, if steps have come since

    def stats(self) -> SpeculationStats:
        """Any thread may ask."""
        return SpeculationStats(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            accepted_per_position=tuple(self._accepted),
        )

    @property
    def has_failed(self) -> bool:
        """Whether the drafter has raised, and is asked no more."""
        return self._drafter is None

    # ---- before a step -------------------------------------------------------------------------

    def waits(self, plan: StepPlan, scheduler: Scheduler) -> bool:
        """Whether the step in flight, that of `plan`, should be read before the next is made."""
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
        """What the next step should verify, the likeliest first.

        `runs_ahead` tells whether steps without drafts would be made with another one in flight.
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
        """The step of `plan` has just been read.

        Args:
          alone: nothing else was in flight when it was dispatched.
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
        else:  # nearly every step where drafts bring nothing
            self._num_ahead += 1
            if before_s is not None and (
                self._num_ahead in TIMED or self._num_ahead % TIMED_EACH == 0
            ):
                self.policy.ahead.record(plan.num_tokens, now_s - before_s)

    def _time(self, plan: StepPlan, drafted: bool, seconds: float) -> None:
        """The step of `plan`, which did not run ahead, came so long after the one before."""
        if not plan.chunks:
            self.policy.alone.record(plan.num_tokens, seconds)
            if self._declined:  # what drafts cost before any is verified
                self.policy.drafted.record(plan.num_tokens, seconds)
        elif drafted and all(row.num_drafts for row in plan.chunks):
            self.policy.drafted.record(plan.num_tokens, seconds)
            self._drafted_s = seconds

    def idle(self) -> None:
        """Nothing is in flight: the time until the next result is not a step's."""
        self._read_s = None
        if self._unread:
            self._unread = self._ask(lambda drafter: drafter.ingest(STUDY_IDLE), False)

    def learn(self, plan: StepPlan, updates: Seq[SequenceUpdate]) -> None:
        """What became of the drafts of `plan`."""
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
        """How many steps without drafts that of `plan` has spared, by its tokens and its time."""
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
        """The sequence has ended."""
        self._experience.pop(seq, None)
        self._verifying.pop(seq, None)
        self._ask(lambda drafter: drafter.end(seq), None)
        self._unread = True

    def reset(self) -> None:
        """A step has raised: its drafts are given up, and what the device holds is lost."""
        self._verifying.clear()
        self._ask(lambda drafter: drafter.reset(), None)

    # ---- helpers -------------------------------------------------------------------------------

    def _ask[T](self, ask: Callable[[Drafter], T], otherwise: T) -> T:
        if self._drafter is None:
            return otherwise
        try:
            return ask(self._drafter)
        except Exception:
            log.exception("the drafter failed: there are no more drafts")
            self._drafter = None
            return otherwise

    def _reach(self, seq: Sequence, confidence: Seq[float]) -> list[float]:
        """How likely each token of a draft brings one, as far as drafts may go."""
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
        """Whether drafts for `seqs` would pay in a step of so many, as far as a look tells.

        A few stand for all.
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
        assert step_s is not None  # or nobody would have looked
        self._to_look.spend((self._clock() - began_s) / step_s)
