"""`Journal`: the requests and tokens that a process receives after any crash."""

import pytest

from forge_jax.engine.fault_isolation import MAX_FAILURES
from forge_jax.engine.process.journal import Journal
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.request import LoraRef, Request


def request(name: str, **fields) -> Request:
    fields = {"params": SamplingParams(max_tokens=9), **fields}
    return Request(request_id=name, prompt_token_ids=(1, 2), **fields)


@pytest.fixture
def journal() -> Journal:
    journal = Journal()
    for name in "abcd":
        journal.accept(request(name), sent=True)
    return journal


def sent_again(journal: Journal) -> list[str]:
    return [request.request_id for request in journal.unsent()]


def test_successor_receives_each_request_with_its_tokens_so_far(journal):
    journal.take({"a": [Delta(0, token_ids=(5, 6))], "b": [Delta(0, finish_reason="stop")]})
    journal.take({"a": [Delta(0, token_ids=(7,))], "unknown": [Delta(0)]})
    assert not list(journal.unsent()), "they are in the process"
    assert journal.crashed() == ([], [])
    found = {request.request_id: request.outputs for request in journal.unsent()}
    assert found == {"a": {0: (5, 6, 7)}, "c": {0: ()}, "d": {0: ()}}
    assert journal.num_tokens == 3 and not list(journal.unsent())


def test_initial_output_tokens_of_a_request_are_kept():
    journal = Journal()
    params = SamplingParams(max_tokens=9, n=2)
    journal.accept(request("a", params=params, outputs={1: (3, 4)}), sent=True)
    journal.take({"a": [Delta(1, token_ids=(5,))]})
    journal.crashed()
    [again] = journal.unsent()
    assert again.outputs == {1: (3, 4, 5)}


def test_request_aborted_before_a_crash_is_not_resent(journal):
    entry = journal.find("c")
    assert entry is not None
    entry.aborted = True
    assert journal.crashed() == (["c"], [])
    outputs, _ = journal.end("c", "abort")
    assert [delta.finish_reason for delta in outputs["c"]] == ["abort"]
    assert sent_again(journal) == ["a", "b", "d"]


def test_request_that_crashes_every_process_is_isolated(journal):
    """Only "c" kills each process that receives it."""
    running, crashes, culprits = set("abcd"), 0, []
    while not culprits:
        while "c" not in running:  # a half without "c" gets tokens
            tokens = {name: [Delta(0, token_ids=(1,))] for name in running}
            assert journal.take(tokens), "others may run now"
            running |= set(sent_again(journal))
        assert journal.searching is (crashes >= MAX_FAILURES)
        crashes += 1
        _, culprits = journal.crashed()
        running = set(sent_again(journal)) if not culprits else set()
    assert culprits == ["c"] and crashes <= MAX_FAILURES + 3
    journal.end("c", "error")
    assert sent_again(journal) == ["d"], "the other half has its turn alone"
    assert journal.take({"d": [Delta(0, token_ids=(1,))]})
    assert not journal.searching and sent_again(journal) == ["a", "b"] and len(journal) == 3


def test_requests_are_found_by_their_adapter(journal):
    lora = LoraRef(name="fine", place=1, identity="1")
    journal.accept(request("e", lora=lora), sent=False)
    assert journal.requests_with("fine") == ["e"] and not journal.requests_with("other")
    journal.end("e", "error")
    assert journal.find("e") is None and not journal.requests_with("fine")
