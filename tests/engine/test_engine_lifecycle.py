"""The states of an engine: exactly the transitions in the table."""

import re
import threading
from itertools import product

import pytest

from forge_jax.engine.lifecycle import TRANSITIONS, Lifecycle, State

# A path into each state.
PATHS: dict[State, list[State]] = {
    "starting": [],
    "serving": ["serving"],
    "ready": ["serving", "ready"],
    "recovering": ["ready", "recovering"],
    "unavailable": ["ready", "recovering", "unavailable"],
    "stopping": ["ready", "stopping"],
    "stopped": ["stopping", "stopped"],
    "failed": ["failed"],
}


def lifecycle_in(state: State) -> Lifecycle:
    lifecycle = Lifecycle()
    for step in PATHS[state]:
        assert lifecycle.enter(step)
    return lifecycle


def test_docstring_lists_exactly_the_transitions():
    assert Lifecycle.__doc__ is not None
    states = "|".join(TRANSITIONS)
    rows = re.findall(rf"^ *({states}) +({states}) +\S", Lifecycle.__doc__, re.MULTILINE)
    listed = {(before, after) for before, after in rows}
    assert len(listed) == len(rows)
    assert listed == {(before, after) for before in TRANSITIONS for after in TRANSITIONS[before]}


@pytest.mark.parametrize(("before", "after"), list(product(PATHS, PATHS)))
def test_only_listed_transitions_change_the_state(before: State, after: State):
    lifecycle = lifecycle_in(before)
    allowed = after in TRANSITIONS[before]
    assert lifecycle.enter(after) is allowed
    assert lifecycle.state == (after if allowed else before)


def test_each_state_has_its_flags():
    found = {
        state: (life.takes_requests, life.healthy, life.ended)
        for state in PATHS
        for life in [lifecycle_in(state)]
    }
    assert found == {
        "starting": (False, False, False),
        "serving": (True, True, False),
        "ready": (True, True, False),
        "recovering": (True, False, False),
        "unavailable": (False, False, False),
        "stopping": (False, True, False),
        "stopped": (False, False, True),
        "failed": (False, False, True),
    }


def test_only_one_of_many_threads_makes_a_transition():
    lifecycle, begin, made = lifecycle_in("ready"), threading.Barrier(8), []

    def enter() -> None:
        begin.wait()
        made.append(lifecycle.enter("failed"))

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False] * 7 + [True]
