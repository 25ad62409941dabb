"""The statuses of a sequence: the table in `lifecycle.py`, and the methods that follow it."""

import re

import pytest

from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule import lifecycle
from forge_jax.schedule.lifecycle import RUNNING, TRANSITIONS, WAITING, Status
from forge_jax.schedule.request import Request, Sequence, decode

PROMPT = list(range(10))

EVENTS = {
    "follow": lambda seq: seq.follow(),
    "hold": lambda seq: seq.hold(),
    "load": lambda seq: seq.load(),
    "release": lambda seq: seq.release(),
    "admit": lambda seq: seq.admit(0, [7], num_shared=0, num_computed=0),
    "prefill": lambda seq: seq.prefill(1),
    "decode": lambda seq: decode([seq]),
    "verify": lambda seq: seq.verify(),
    "settle": lambda seq: seq.settle(1),
    "requeue": lambda seq: seq.requeue(),
    "finish": lambda seq: seq.finish("abort", None),
}
WAY = {  # events that lead from a new sequence to each status
    Status.QUEUED: (),
    Status.FOLLOWING: ("follow",),
    Status.HELD: ("hold",),
    Status.LOADING: ("load",),
    Status.PREFILLING: ("admit",),
    Status.DECODING: ("admit", "whole prompt"),
    Status.VERIFYING: ("admit", "whole prompt", "read", "verify"),
    Status.DRAINING: ("admit", "whole prompt", "decode", "decode", "decode"),
    Status.FINISHED: ("finish",),
}


def read(seq: Sequence) -> None:
    seq.tokens += [1] * seq.num_pending
    seq.num_pending = 0


def sequence(*events: str, max_tokens: int = 4) -> Sequence:
    request = Request(request_id="r", prompt_token_ids=PROMPT, params=SamplingParams())
    seq = Sequence(request, 0, 1, frozenset(), max_tokens, list(PROMPT))
    ways = {"read": read, "whole prompt": lambda seq: seq.prefill(10)}
    for event in events:
        (EVENTS | ways)[event](seq)
    return seq


def table() -> dict[tuple[Status, str], set[Status]]:
    """Return the first table of the module's docstring: next statuses by status and event."""
    assert lifecycle.__doc__ is not None
    rows = re.findall(r"^ {4}(\S[\w ]*?)  +([a-z]+) +([A-Z]+)  ", lifecycle.__doc__, re.MULTILINE)
    found: dict[tuple[Status, str], set[Status]] = {}
    groups = {"any with slot": RUNNING, "any unfinished": WAITING | RUNNING}
    for name, event, following in rows:
        for status in groups.get(name) or {Status[name]}:
            found.setdefault((status, event), set()).add(Status[following])
    return found


def test_table_lists_exactly_the_checked_transitions():
    listed: dict[Status, set[Status]] = {status: set() for status in Status}
    for (status, _), following in table().items():
        listed[status] |= following
    assert listed == TRANSITIONS
    assert {event for _, event in table()} == EVENTS.keys()


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("status", Status, ids=lambda status: status.value)
def test_event_follows_the_table_or_is_rejected(status, event):
    seq = sequence(*WAY[status])
    assert seq.status is status
    if (status, event) in table():
        EVENTS[event](seq)
        assert seq.status in table()[status, event]
    else:
        with pytest.raises(AssertionError):
            EVENTS[event](seq)
        assert seq.status is status


@pytest.mark.parametrize("status", Status, ids=lambda status: status.value)
def test_only_a_running_sequence_holds_a_slot_and_blocks(status):
    seq = sequence(*WAY[status])
    assert seq.running == (status in RUNNING) == (seq.slot is not None) == bool(seq.blocks)
    if not seq.finished:
        seq.finish("abort", None)
    assert (seq.slot, seq.blocks, seq.running, seq.finished) == (None, [], False, True)


def test_prompt_is_prefilled_until_one_token_is_left():
    seq = sequence("admit")
    statuses = []
    for num_tokens in (8, 1):
        assert not seq.prefill(num_tokens)
        statuses.append(seq.status)
    assert statuses == [Status.PREFILLING, Status.DECODING]


def test_prompt_without_output_drains_after_its_last_token():
    seq = sequence("admit", max_tokens=0)
    assert not seq.prefill(9) and seq.status is Status.PREFILLING
    assert not seq.prefill(1) and seq.status is Status.DRAINING


def test_single_output_token_drains_immediately():
    seq = sequence("admit", max_tokens=1)
    assert seq.prefill(10) and seq.status is Status.DRAINING


def test_accepted_drafts_count_as_computed_once_settled():
    seq = sequence("admit", "whole prompt", "read", "verify")
    assert (seq.num_computed, seq.num_tokens) == (11, 12)
    seq.settle(2)
    assert seq.num_computed == 13


def test_requeued_sequence_keeps_its_tokens_and_starts_a_new_epoch():
    seq = sequence("admit", "whole prompt", "read", "decode", "requeue")
    assert (len(seq.tokens), seq.num_pending) == (11, 1)
    assert (seq.num_computed, seq.epoch) == (0, 1)
