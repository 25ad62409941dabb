import random
from types import SimpleNamespace
from typing import Any

from loop import Loop

from forge_jax.schedule.lifecycle import Status
from forge_jax.schedule.policy import RankedQueue


def admitted_order(loop: Loop) -> list[str]:
    return [a.seq_key[0] for plan in loop.run() for a in plan.admissions]


def test_fcfs_ignores_priority():
    loop = Loop(max_num_seqs=1)
    for priority in (3, 1, 2):
        loop.add_one([1], max_tokens=2, priority=priority)
    assert admitted_order(loop) == ["r1", "r2", "r3"]


def test_priority_serves_the_lower_number_first_then_by_arrival():
    loop = Loop(max_num_seqs=1, policy="priority")
    for priority in (3, 1, 2, 1):
        loop.add_one([1], max_tokens=2, priority=priority)
    assert admitted_order(loop) == ["r2", "r4", "r3", "r1"]


def popular(loop: Loop, number: int) -> None:
    loop.add_one([*range(8), 100 + number], max_tokens=2, request_id=f"popular{number}")


def test_prefix_serves_the_longest_cached_prefix_first():
    loop = Loop(max_num_seqs=1, policy="prefix")
    popular(loop, 0)
    loop.run()
    loop.add_one([50] * 9, max_tokens=2, request_id="cold")
    loop.add_one([*range(4), *[60] * 5], max_tokens=2, request_id="warm")
    popular(loop, 1)
    assert admitted_order(loop) == ["popular1", "warm", "cold"]


def test_popular_prefix_starves_no_request():
    loop = Loop(max_num_seqs=1, policy="prefix", aging_s=10.0)
    popular(loop, 0)
    loop.run()
    cold = loop.add_one([50] * 9, max_tokens=2)
    for number in range(1, 30):
        popular(loop, number)
        popular(loop, 100 + number)
        loop.now_s += 1.0
        loop.step()
        loop.step()
        if cold.slot is not None:
            break
    assert 10.0 < loop.now_s < 15.0


def test_prefix_considers_only_the_longest_waiting():
    loop = Loop(max_num_seqs=1, policy="prefix", aging_s=1e9, num_blocks=1000)
    popular(loop, 0)
    loop.run()
    for number in range(64):
        loop.add_one([200 + number] * 9, max_tokens=1, request_id=f"cold{number}")
    popular(loop, 1)
    order = admitted_order(loop)
    assert order.index("popular1") == 1  # it entered the window when the first left


def test_prefix_serves_each_request_of_a_long_queue_once():
    loop = Loop(max_num_seqs=3, policy="prefix", aging_s=5.0, num_blocks=12)
    rng = random.Random(0)
    seqs = []
    for number in range(300):
        seqs.append(loop.add_one([rng.randrange(3)] * rng.randint(1, 20), max_tokens=3))
        if rng.random() < 0.2:
            loop.scheduler.abort(rng.choice(seqs).request_id)
        if number % 4 == 0:
            loop.now_s += 1.0
            loop.step()
    loop.run(3000)
    assert all(seq.finished for seq in seqs)


def test_queue_can_be_counted_from_another_thread():
    """Metrics are read in another thread: here, whenever the heap compares two sequences."""
    counts = []

    class Order(int):
        def __lt__(self, other: int) -> bool:
            counts.append(len(queue))
            return int(self) < int(other)

    def sequence(order: int) -> Any:
        return SimpleNamespace(status=Status.QUEUED, order=Order(order))

    queue = RankedQueue(by_priority=False)
    waiting = [sequence(order) for order in range(200)]
    for seq in waiting:
        queue.push(seq)
    counts.clear()
    for left, seq in enumerate(reversed(waiting)):
        seq.status = Status.FINISHED
        queue.forget(seq)
        assert len(queue) == 199 - left
    assert counts, "the heap was not made anew"
    assert min(counts) >= 0
