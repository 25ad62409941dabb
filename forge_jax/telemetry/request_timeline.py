"""Timelines of sequences: spans of waiting, prefill chunks, decodes and drafts.

`Timelines` belongs to the engine thread. It gets each step after its result is read and before it
is committed. Consecutive decodes of a sequence are one span, and so are consecutive verifications
of drafts. Most steps therefore only extend spans. Prefill chunks stay separate.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from forge_jax.schedule.lifecycle import Status
from forge_jax.schedule.plan import ScheduledSequence, SequenceResult, StepPlan, StepResult
from forge_jax.schedule.request import Sequence
from forge_jax.schedule.scheduler import Scheduler

MAX_SPANS = 64  # spans of a sequence

# "preempted": without a slot after its first admission, also because a step failed.
# "loading": waits for blocks from host memory, until its admission.
SpanKind = Literal["queued", "preempted", "loading", "prefill", "decode", "draft"]

_FINISHED = Status.FINISHED


@dataclass(slots=True)
class Span:
    """A part of a sequence's time, on the clock of `EngineState.time_s`.

    A sequence that has a slot but no row in a step has no span for that time.
    """

    kind: SpanKind
    begin_s: float
    end_s: float
    steps: int = 0
    tokens: int = 0  # "prefill": computed tokens; "decode" and "draft": output tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def copy(self) -> Span:
        return Span(
            self.kind,
            self.begin_s,
            self.end_s,
            self.steps,
            self.tokens,
            self.draft_tokens,
            self.accepted_tokens,
        )


@dataclass(slots=True)
class Timeline:
    """The spans of an unfinished sequence. Only the last one may still grow."""

    seen_s: float  # an admitted sequence is known from this time on; 0: from its arrival on
    spans: list[Span] = field(default_factory=list[Span])
    num_loads: int = 0  # loads from host memory that have a span
    waits: bool = False  # True if it had no slot in the latest snapshot
    ttft_s: float | None = None  # None: no output token yet, or it came before `seen_s`

    def add(self, span: Span) -> None:
        if self.spans:
            # A step begins when the one before ends, which may be before a new request arrives.
            span.begin_s = max(span.begin_s, self.spans[-1].end_s)
        self.spans.append(span)
        if len(self.spans) > MAX_SPANS:
            del self.spans[1]  # the first one has the time in the queue

    def wait(self, seq: Sequence, until_s: float) -> list[Span]:
        """Return the spans from the last one, or from the arrival, to the end of a wait.

        There are none if the sequence was first seen after its admission and before its first step.
        """
        kind, since_s = "queued", seq.queued_s
        if self.spans:
            kind, since_s = "preempted", max(self.spans[-1].end_s, self.seen_s)
            if until_s <= since_s:
                return []
        if seq.num_loads == self.num_loads:
            return [Span(kind, since_s, max(since_s, until_s))]
        load_s = min(max(seq.load_began_s, since_s), until_s)
        return [Span(kind, since_s, load_s), Span("loading", load_s, max(load_s, until_s))]


class Timelines:
    """The timelines of the unfinished sequences that have been in a step or a snapshot."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._by_sequence: dict[Sequence, Timeline] = {}

    def clear(self) -> None:
        self._by_sequence.clear()

    def record(self, plan: StepPlan, result: StepResult, begin_s: float, end_s: float) -> None:
        """Add a step to the timelines of its sequences, except those that have been aborted."""
        seqs = self._scheduler.sequences_of(plan)
        if plan.admissions:
            self._admit(plan, seqs, begin_s)
        num_decodes = len(plan.decodes)
        for seq in seqs[:num_decodes]:
            if seq.status is _FINISHED:
                continue
            timeline = self._by_sequence.get(seq) or self._begin(seq, begin_s)
            span = timeline.spans[-1]
            if span.kind == "decode":  # even if it had no row in some steps since
                span.end_s = end_s
                span.steps += 1
                span.tokens += 1
                continue
            timeline.add(Span("decode", begin_s, end_s, 1, 1))
            if not seq.num_output:
                timeline.ttft_s = end_s - seq.queued_s
        rows = zip(seqs[num_decodes:], plan.chunks, result.sequences[num_decodes:], strict=True)
        for seq, row, got in rows:
            if seq.status is not _FINISHED:
                self._add_row(seq, row, got, begin_s, end_s)

    def take_finished(self, now_s: float) -> Iterator[tuple[Sequence, Timeline]]:
        """Remove the finished sequences, and yield them with their timelines."""
        ended = [seq for seq in self._by_sequence if seq.status is _FINISHED]
        for seq in ended:
            timeline = self._by_sequence.pop(seq)
            if timeline.waits or not timeline.spans:
                for span in timeline.wait(seq, now_s):
                    timeline.add(span)
            yield seq, timeline

    def of(self, seq: Sequence, now_s: float) -> tuple[list[Span], float | None]:
        """Return copies of an unfinished sequence's spans until now, and the time to first token.

        The last span of a waiting sequence is the current wait.
        """
        timeline = self._by_sequence.get(seq)
        if timeline is None:
            admitted = seq.slot is not None or seq.epoch > 0
            timeline = self._begin(seq, now_s) if admitted else self._follow(seq)
        spans = timeline.spans.copy()
        if spans:
            spans[-1] = spans[-1].copy()
        timeline.waits = seq.slot is None
        if timeline.waits:
            spans += timeline.wait(seq, now_s)
        return spans, timeline.ttft_s

    def _follow(self, seq: Sequence) -> Timeline:
        """Begin the timeline of a sequence before its first admission."""
        timeline = self._by_sequence[seq] = Timeline(0.0)
        return timeline

    def _begin(self, seq: Sequence, now_s: float) -> Timeline:
        """Begin the timeline of a sequence that was admitted before it was recorded."""
        timeline = self._by_sequence[seq] = Timeline(now_s, num_loads=seq.num_loads)
        timeline.add(Span("queued", seq.queued_s, seq.queued_s + seq.queue_s))
        return timeline

    def _admit(self, plan: StepPlan, seqs: Seq[Sequence], begin_s: float) -> None:
        """End the waits of the sequences that got a slot in this step."""
        keys = {admission.seq_key for admission in plan.admissions}
        for seq in seqs:
            if seq.key in keys and seq.status is not _FINISHED:
                timeline = self._by_sequence.get(seq) or self._follow(seq)
                for span in timeline.wait(seq, begin_s):
                    timeline.add(span)
                timeline.num_loads, timeline.waits = seq.num_loads, False

    def _add_row(
        self,
        seq: Sequence,
        row: ScheduledSequence,
        got: SequenceResult,
        begin_s: float,
        end_s: float,
    ) -> None:
        timeline = self._by_sequence.get(seq) or self._begin(seq, begin_s)
        if got.token_ids and not seq.num_output and not got.fault:
            timeline.ttft_s = end_s - seq.queued_s
        if not row.num_drafts:
            timeline.add(Span("prefill", begin_s, end_s, 1, row.num_tokens))
            return
        span = timeline.spans[-1]
        if span.kind != "draft":
            span = Span("draft", begin_s, end_s)
            timeline.add(span)
        tokens = 0 if got.fault else len(got.token_ids)
        span.end_s = end_s
        span.steps += 1
        span.tokens += tokens
        span.draft_tokens += row.num_drafts
        span.accepted_tokens += max(tokens - 1, 0)
