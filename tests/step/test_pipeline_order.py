"""The order in which processes run the stages and links of a pipeline."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from forge_jax.schedule.plan import FED_BACK, Decodes, StepPlan
from forge_jax.step.inputs import StepShape
from forge_jax.step.pipeline import Pipeline

SHAPE = StepShape.decode(4)


class Stage:
    """A stage that records what it runs."""

    def __init__(self, index, log):
        self.index, self.log = index, log

    def update_slots(self, name, packed):
        self.log.append((name, self.index, packed))

    def run_stage(self, shape, packed, masks, stream):
        number = packed[2]  # see `packed`
        assert stream == (None if self.index == 0 else (self.index - 1, number))
        self.log.append(("run", self.index, number))
        return self.index, number

    def take_tokens(self, shape, packed, out):
        self.log.append(("take", 0, packed[2]))


class Out:
    """A result on the host."""

    def __init__(self, stream):
        self.stream = stream
        self.packed = self

    def platform(self):
        return "cpu"


class Link:
    """A link that records what this process sends or receives, and from which stage."""

    def __init__(self, index, count, own, log):
        self.index, self.to, self.own, self.log = index, (index + 1) % count, own, log

    def send(self, shape, stream):
        assert (stream is not None) == (self.index in self.own)
        if not {self.index, self.to} & self.own:
            return None
        number = self.numbers.pop(0)
        self.log.append(("link", self.index, number))
        if self.to not in self.own:
            return None
        stream = self.index, number
        return stream if self.to else Out(stream)


def pipeline(count, own):
    """Return a pipeline of a process that has the stages `own`, and the list that it logs to."""
    log = []
    links = [Link(index, count, own, log) for index in range(count)]
    builder = SimpleNamespace(links=links, own={})
    return Pipeline(builder, {index: Stage(index, log) for index in sorted(own)}), log


def packed(number, slots, fed_back):
    """Return the input of a decode step. Its count of rows, which only tests read, is `number`."""
    tokens = [FED_BACK if slot in fed_back else 5 for slot in slots]
    decodes = Decodes(
        slots=slots, starts=[0] * len(slots), tokens=tokens, num_outputs=[0] * len(slots)
    )
    array = SHAPE.pack(StepPlan(0, (), (), decodes), 0, 8)
    array[2] = number
    return array


@st.composite
def uses(draw):
    """Draw the calls of an engine: micro-batches, updates of slots, and reads."""
    calls, count, read = [], 0, 0
    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(["run", "run", "run", "read", "admit"]))
        if kind == "run":
            slots = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True))
            fed_back = [slot for slot in slots if draw(st.booleans())]
            calls.append(("run", slots, fed_back))
            count += 1
        elif kind == "admit":
            calls.append(("admit", len(calls)))
        elif read < count:
            read = draw(st.integers(read + 1, count))
            calls.append(("read", read - 1))
    return [*calls, *([("read", count - 1)] if count else [])]


def perform(calls, count, own):
    """Return what a process runs for these calls."""
    subject, log = pipeline(count, own)
    # A link of this process carries the micro-batches in order.
    for link in subject._builder.links:
        link.numbers = list(range(len(calls)))
    number = 0
    for call in calls:
        if call[0] == "run":
            batch = subject.run(SHAPE, packed(number, *call[1:]), None)
            assert batch.number == number
            number += 1
        elif call[0] == "admit":
            subject.update_slots("admit", call[1])
        else:
            subject.complete(call[1])
    return log


def finish(logs):
    """Run the logs of all processes, in which a link waits for its other end. True if all end."""
    at = dict.fromkeys(logs, 0)
    moved = True
    while moved:
        moved = False
        waiting = {}
        for own, log in logs.items():
            while at[own] < len(log) and log[at[own]][0] != "link":
                at[own] += 1
                moved = True
            if at[own] < len(log):
                waiting.setdefault(log[at[own]], []).append(own)
        for owners in waiting.values():
            if len(owners) == 2:
                moved = True
                for own in owners:
                    at[own] += 1
    return all(at[own] == len(log) for own, log in logs.items())


@given(uses(), st.integers(2, 5))
def test_processes_never_wait_for_each_other_in_a_circle(calls, count):
    logs = {stage: perform(calls, count, {stage}) for stage in range(count)}
    assert finish(logs)


def test_a_process_with_another_order_would_block():
    """The first stage sends two streams before it takes a result, and the last one does not."""
    logs = {
        0: [("run", 0, 0), ("link", 0, 0), ("run", 0, 1), ("link", 0, 1), ("link", 1, 0)],
        1: [("link", 0, 0), ("run", 1, 0), ("link", 1, 0), ("link", 0, 1), ("run", 1, 1)],
    }
    assert not finish(logs)


@given(uses(), st.integers(2, 5))
def test_each_stage_runs_the_micro_batches_in_order(calls, count):
    log = perform(calls, count, set(range(count)))
    runs = [call for call in calls if call[0] == "run"]
    for stage in range(count):
        ran = [number for name, index, number in log if (name, index) == ("run", stage)]
        assert ran == list(range(len(runs)))


@given(uses(), st.integers(2, 5))
def test_slots_are_updated_on_each_stage_before_the_same_micro_batch(calls, count):
    expected, before, number = [], [], 0
    for call in calls:
        if call[0] == "admit":
            before.append(("admit", call[1]))
        elif call[0] == "run":
            expected += [*before, ("run", number)]
            before, number = [], number + 1
    log = perform(calls, count, set(range(count)))
    for stage in range(count):
        own = [(name, value) for name, index, value in log if index == stage]
        assert [each for each in own if each[0] in ("admit", "run")] == expected


@given(uses(), st.integers(2, 5))
def test_tokens_are_fed_back_before_a_step_that_needs_them(calls, count):
    log = perform(calls, count, set(range(count)))
    sampled, number = {}, 0
    for call in calls:
        if call[0] != "run":
            continue
        slots, fed_back = call[1:]
        at = log.index(("run", 0, number))
        for slot in fed_back:
            if slot in sampled:
                assert log.index(("take", 0, sampled[slot])) < at
        sampled |= dict.fromkeys(slots, number)
        number += 1


def test_independent_micro_batches_fill_all_stages():
    count, number = 4, 12
    calls = [("run", [each % 4], []) for each in range(number)]
    log = perform([*calls, ("read", number - 1)], count, set(range(count)))
    in_flight, most = 0, []
    for name, index, _ in log:
        in_flight += {("run", 0): 1, ("take", 0): -1}.get((name, index), 0)
        most.append(in_flight)
    assert max(most) == count
