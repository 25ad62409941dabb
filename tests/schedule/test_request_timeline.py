"""The timelines of sequences: exact spans on a fake device whose steps take one second."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from loop import Loop

from forge_jax.schedule.lifecycle import Status
from forge_jax.schedule.plan import StepPlan
from forge_jax.telemetry import engine_state, request_timeline
from forge_jax.telemetry.engine_state import EngineState, SequenceState
from forge_jax.telemetry.request_timeline import Span, Timeline, Timelines


def watched(**limits: Any) -> Loop:
    """Return a loop whose steps take one second and are recorded."""
    loop = Loop(step_s=lambda plan: 1.0, **limits)
    loop.watcher.capture()
    return loop


def state(loop: Loop) -> EngineState:
    return loop.watcher.capture().state()


def timeline(loop: Loop, request_id: str) -> SequenceState:
    found = state(loop)
    (seq,) = [each for each in found.sequences + found.finished if each.request_id == request_id]
    return seq


def spans(loop: Loop, request_id: str) -> list[tuple[str, float, float, int]]:
    """Return kind, begin, end and tokens of each span."""
    seq = timeline(loop, request_id)
    check(seq)
    return [(each.kind, each.begin_s, each.end_s, each.tokens) for each in seq.spans]


def check(seq: SequenceState) -> None:
    """Check that the spans are in order and have all tokens of a sequence seen from its arrival."""
    assert seq.spans[0].begin_s == seq.arrival_s
    for one, other in itertools.pairwise(seq.spans):
        assert one.begin_s <= one.end_s <= other.begin_s
    decoded = sum(each.tokens for each in seq.spans if each.kind in ("decode", "draft"))
    # The last chunk after each admission samples a token that no other span has.
    admissions = sum(
        one.kind != "prefill" and other.kind == "prefill"
        for one, other in itertools.pairwise(seq.spans)
    )
    assert decoded <= seq.output_tokens <= decoded + admissions
    assert seq.draft_tokens == sum(each.draft_tokens for each in seq.spans)
    assert seq.accepted_tokens == sum(each.accepted_tokens for each in seq.spans)


def test_request_waits_then_prefills_in_chunks_then_decodes():
    loop = watched(max_num_seqs=1, prefill_chunk_size=4)
    loop.add(range(2), request_id="first", max_tokens=3)
    loop.add(range(50, 60), request_id="second", max_tokens=4)
    assert spans(loop, "second") == [("queued", 0, 0, 0)]
    loop.step()
    loop.step()
    assert spans(loop, "second") == [("queued", 0, 1, 0)]  # it still waits
    loop.run()
    assert spans(loop, "first") == [("queued", 0, 0, 0), ("prefill", 0, 1, 2), ("decode", 1, 3, 2)]
    assert spans(loop, "second") == [
        ("queued", 0, 3, 0),
        *(("prefill", 3, 4, 4), ("prefill", 4, 5, 4), ("prefill", 5, 6, 2)),
        ("decode", 6, 9, 3),
    ]
    second = timeline(loop, "second")
    assert (second.status, second.finish_reason) == ("finished", "length")
    assert (second.arrival_s, second.ttft_s) == (0, 6)


def preempted() -> Loop:
    """Return a loop in which "second" is preempted and resumed."""
    loop = watched(num_blocks=8, prefix_cache=False)
    loop.add(range(8), request_id="first", max_tokens=20)
    loop.add(range(50, 58), request_id="second", max_tokens=12)
    loop.run()
    return loop


def test_preemption_is_a_span_until_the_resumption():
    loop = preempted()
    first, second = timeline(loop, "first"), timeline(loop, "second")
    assert (first.preemptions, second.preemptions) == (0, 1)
    kinds = [span.kind for span in second.spans]
    assert kinds == ["queued", "prefill", "decode", "preempted", "prefill", "decode"]
    _, _, decode, gap, again, rest = spans(loop, "second")
    assert gap[1] == decode[2] and gap[2] == again[1] > gap[1] + 5
    assert again[3] == 8 + 1 + decode[3]  # the prompt and all output tokens are computed again
    assert 1 + decode[3] + 1 + rest[3] == second.output_tokens == 12
    assert second.ttft_s == 1  # from the first prefill


def test_wait_after_a_preemption_is_shown_while_it_lasts():
    loop = watched(num_blocks=8, prefix_cache=False)
    loop.add(range(8), request_id="first", max_tokens=20)
    loop.add(range(50, 58), request_id="second", max_tokens=12)
    while not loop.scheduler.num_preemptions:
        loop.step()
    loop.step()
    kind, begin_s, end_s, _ = spans(loop, "second")[-1]
    assert (kind, end_s) == ("preempted", loop.now_s) and begin_s < end_s
    loop.scheduler.abort("second")
    seq = timeline(loop, "second")
    assert (seq.status, seq.finish_reason) == ("finished", "abort")
    assert seq.spans[-1].kind == "preempted" and seq.spans[-1].end_s == loop.now_s


def test_verified_drafts_are_counted_with_those_accepted():
    loop = watched()
    seq = loop.add_one([1, 2], request_id="a", max_tokens=10)
    loop.step()
    loop.step({seq: (4, 5)})  # tokens count up: both are right
    loop.step({seq: (7, 0, 0)})  # one is right
    loop.run()
    seen = timeline(loop, "a")
    check(seen)
    _, prefill, draft, decode = seen.spans
    assert (prefill.kind, draft.kind, decode.kind) == ("prefill", "draft", "decode")
    assert (draft.begin_s, draft.end_s, draft.steps) == (1, 3, 2)
    assert (draft.tokens, draft.draft_tokens, draft.accepted_tokens) == (5, 5, 3)
    assert decode.tokens == 4


def test_aborted_request_ends_without_its_row_in_flight():
    loop = watched()
    loop.add([1], request_id="a", max_tokens=50)
    for _ in range(3):
        loop.step()
    loop.scheduler.abort("a")
    loop.step()
    seq = timeline(loop, "a")
    assert (seq.status, seq.finish_reason) == ("finished", "abort")
    assert spans(loop, "a") == [("queued", 0, 0, 0), ("prefill", 0, 1, 1), ("decode", 1, 2, 1)]
    assert not state(loop).sequences


def test_aborted_wait_ends_with_the_abort():
    loop = watched(max_num_seqs=1)
    loop.add([1], request_id="running", max_tokens=50)
    loop.add([2], request_id="waiting", max_tokens=50)
    loop.step()
    loop.step()
    assert spans(loop, "waiting") == [("queued", 0, 1, 0)]
    loop.scheduler.abort("waiting")
    loop.step()
    assert spans(loop, "waiting") == [("queued", 0, 1, 0)]
    assert timeline(loop, "waiting").queue_s is None


def test_request_recorded_late_has_its_queue_time_and_no_guesses():
    loop = Loop(step_s=lambda plan: 1.0)
    loop.add([1, 2], request_id="a", max_tokens=9)
    for _ in range(4):
        loop.step()
    assert [span.kind for span in timeline(loop, "a").spans] == ["queued"]
    loop.step()
    loop.step()
    seq = timeline(loop, "a")
    kinds = [(each.kind, each.begin_s, each.end_s) for each in seq.spans]
    assert kinds == [("queued", 0, 0), ("decode", 3, 5)]
    assert seq.ttft_s is None and seq.output_tokens == 5


def test_failed_step_is_a_wait_for_the_next_admission():
    loop = watched()
    loop.add([1, 2], request_id="a", max_tokens=4)
    loop.step()
    loop.step()
    loop._in_flight = None  # the step raised
    loop.now_s += 1
    loop.scheduler.recover()
    loop.device.reset()
    loop.run()
    kinds = [span[:3] for span in spans(loop, "a")[1:]]
    assert kinds == [("prefill", 0, 1), ("preempted", 1, 2), ("prefill", 2, 3), ("decode", 3, 5)]


def test_spans_and_finished_requests_are_bounded(monkeypatch):
    monkeypatch.setattr(request_timeline, "MAX_SPANS", 4)
    loop = watched(prefill_chunk_size=1)
    loop.add(range(10), request_id="long", max_tokens=2)
    loop.run()
    kinds = [(span.kind, span.end_s) for span in timeline(loop, "long").spans]
    assert kinds == [("queued", 0), ("prefill", 8), ("prefill", 9), ("decode", 11)]
    for i in range(engine_state.MAX_FINISHED + 5):
        loop.add([i], request_id=f"{i}", max_tokens=1)
    loop.run()
    finished = state(loop).finished
    assert [each.request_id for each in finished] == [f"{i}" for i in range(5, 37)]
    assert not loop.watcher._timelines._by_sequence


def test_unwatched_engine_drops_timelines():
    loop = preempted()
    assert state(loop).finished
    loop.now_s += engine_state.WATCHED_S + 1
    loop.add([1], request_id="late", max_tokens=2)
    loop.run()
    assert not loop.watcher.watches and not loop.watcher._timelines._by_sequence
    assert not state(loop).finished


def test_snapshot_between_admission_and_first_step_changes_nothing():
    loop = watched(prefix_cache=False)
    loop.add([1, 2], request_id="a", max_tokens=3)
    loop.step()  # dispatched, not read
    assert [span.kind for span in timeline(loop, "a").spans] == ["queued"]
    loop.run()
    assert spans(loop, "a") == [("queued", 0, 0, 0), ("prefill", 0, 1, 2), ("decode", 1, 3, 2)]


def test_span_begins_after_the_one_before():
    late = Timeline(0.0)  # it arrived after the step before had ended
    late.add(Span("queued", 5.0, 5.0))
    late.add(Span("prefill", 4.9, 6.0))
    assert late.spans[-1] == Span("prefill", 5.0, 6.0)


def test_snapshot_does_not_change_afterwards():
    loop = watched()
    loop.add([1], request_id="a", max_tokens=9)
    for _ in range(4):
        loop.step()
    before = timeline(loop, "a")
    copied = [dataclasses.replace(span) for span in before.spans]
    loop.run()
    assert before.spans == copied


# ---- planted faults ------------------------------------------------------------------------------


def without_admissions(self: Timelines, plan: StepPlan, *rest: Any) -> None:
    """Record a resumption as if the sequence had kept its slot."""
    record(self, dataclasses.replace(plan, admissions=()), *rest)


def twice(self: Timelines, *step: Any) -> None:
    record(self, *step)
    record(self, *step)


def without_drafts(self: Timelines, plan: StepPlan, result: Any, *times: float) -> None:
    chunks = tuple(dataclasses.replace(row, num_rows=1) for row in plan.chunks)
    record(self, dataclasses.replace(plan, chunks=chunks), result, *times)


def with_finished_rows(self: Timelines, plan: StepPlan, *rest: Any) -> None:
    ended = [seq for seq in self._scheduler.sequences_of(plan) if seq.finished]
    for seq in ended:
        seq.status = Status.DECODING
    record(self, plan, *rest)
    for seq in ended:
        seq.status = Status.FINISHED


record = Timelines.record
FAULTS = [
    (test_request_waits_then_prefills_in_chunks_then_decodes, twice),
    (test_preemption_is_a_span_until_the_resumption, without_admissions),
    (test_failed_step_is_a_wait_for_the_next_admission, without_admissions),
    (test_verified_drafts_are_counted_with_those_accepted, without_drafts),
    (test_aborted_request_ends_without_its_row_in_flight, with_finished_rows),
]


@pytest.mark.parametrize(("test", "fault"), FAULTS)
def test_planted_fault_is_detected(monkeypatch, test, fault):
    monkeypatch.setattr(Timelines, "record", fault)
    with pytest.raises((AssertionError, ValueError)):  # ValueError: a span or request too many
        test()
