"""Copies in host memory: their limit, lookup, loads and events."""

from __future__ import annotations

import random

from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.cache_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvents,
    public_hash,
)
from forge_jax.schedule.host_tier import Finished, HostTier
from forge_jax.schedule.lifecycle import Status
from forge_jax.schedule.request import Request
from forge_jax.schedule.scheduler import Scheduler, SchedulerConfig
from forge_jax.telemetry.engine_state import Watcher
from forge_jax.testing import FakeDevice, FakeHostMemory

SIZE = 4


def stored(tier: HostTier, *names: bytes) -> None:
    """Evict blocks and let their copies arrive."""
    for block, name in enumerate(names):
        tier.evicted(name, block)
    tier.saved([copy for copy, _ in tier.take().saves])


def test_least_recently_used_copies_are_dropped_first():
    tier = HostTier(3, SIZE, 8)
    stored(tier, b"a", b"b", b"c")
    tier.use([b"a"])
    tier.evicted(b"b", 7)  # evicted again: the copy that exists is used
    stored(tier, b"d")
    assert [tier.has(name) for name in (b"a", b"b", b"c", b"d")] == [True, True, False, True]
    tier.check()


def test_end_of_a_prefix_is_dropped_before_its_beginning():
    tier = HostTier(3, SIZE, 8)
    stored(tier, b"1", b"2", b"3")
    tier.use([b"1", b"2", b"3"])
    stored(tier, b"x", b"y")
    assert [tier.has(name) for name in (b"1", b"2", b"3")] == [True, False, False]


def test_copy_can_be_found_after_it_has_arrived():
    tier = HostTier(3, SIZE, 8)
    tier.evicted(b"a", 5)
    [(copy, block)] = tier.take().saves
    assert block == 5 and not tier.has(b"a")
    tier.saved([copy])
    assert tier.has(b"a")


def test_copy_that_was_dropped_before_it_arrived_is_not_found():
    tier = HostTier(1, SIZE, 8)
    tier.evicted(b"a", 0)
    tier.evicted(b"b", 1)
    tier.evicted(b"a", 2)
    transfers = tier.take()
    assert transfers.drops == [0, 1]
    tier.saved([0])  # the first copy of "a": there is a newer one, which has not arrived
    assert not tier.has(b"a")
    tier.saved([1, 2])
    assert tier.has(b"a") and not tier.has(b"b")
    tier.check()


def test_blocks_are_lost_while_too_many_copies_are_in_progress():
    tier = HostTier(9, SIZE, 2)
    for block in range(3):
        tier.evicted(b"%d" % block, block)
    assert (tier.num_lost, len(tier.take().saves)) == (1, 2)


def test_events_name_the_medium():
    tier = HostTier(1, SIZE, 8)
    tier.events = CacheEvents()
    stored(tier, b"a", b"b")
    stored(tier, b"c")
    kept = {"token_ids": [], "parent_block_hash": None, "block_size": SIZE, "medium": "CPU"}
    assert tier.events.take() == [
        BlockStored(block_hashes=[public_hash(b"b")], **kept),
        BlockRemoved([public_hash(b"b")], "CPU"),
        BlockStored(block_hashes=[public_hash(b"c")], **kept),
    ]


# ---- with a scheduler ----------------------------------------------------------------------------


class Engine:
    """A scheduler on a fake device. Transfers finish while `finishes` is True."""

    def __init__(self) -> None:
        self.finishes = True
        self.pool = BlockPool(12, SIZE)
        self.host = self.pool.host = HostTier(100, SIZE, 100)
        self.events = self.pool.events = self.host.events = CacheEvents()
        config = SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=64, max_rows=64, max_model_len=48
        )
        self.scheduler = Scheduler(
            config, self.pool, clock=lambda: self.now_s, rng=random.Random(0)
        )
        self.now_s = 0.0
        self.device = FakeDevice(num_blocks=12, block_size=SIZE, max_num_seqs=4, pool=self.pool)
        self.memory = FakeHostMemory(self.device, lambda: self.finishes)
        self.watcher = Watcher(self.scheduler, lambda: self.now_s)

    def add(self, name: str, tokens: range, max_tokens: int = 1):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        (seq,) = self.scheduler.add(
            Request(request_id=name, prompt_token_ids=list(tokens), params=params)
        )
        return seq

    def step(self) -> list[str]:
        """Run a step, and return the requests in it."""
        self.now_s += 1.0
        self.scheduler.finish_transfers(self.memory.finished())
        plan = self.scheduler.schedule()
        self.memory.start(self.scheduler.transfers())
        if plan is None:
            return []
        result = self.device.read(self.device.dispatch(plan))
        if self.watcher.watches:
            self.watcher.record(plan, result, self.now_s - 1, self.now_s)
        self.scheduler.commit(plan, result)
        self.pool.check()
        return [row.seq_key[0] for row in plan.sequences]

    def serve(self, name: str, tokens: range):
        seq = self.add(name, tokens)
        while not seq.finished:
            self.step()
        self.step()  # lets copies arrive
        return seq


A, B = range(100, 133), range(200, 233)  # 8 full blocks, and a token


def evicted_a() -> Engine:
    """Return an engine that has A in host memory, and B on the device."""
    engine = Engine()
    engine.serve("A", A)
    engine.serve("B", B)
    engine.events.take()
    return engine


def test_prefix_in_host_memory_is_loaded_and_counted():
    engine = evicted_a()
    seq = engine.serve("again", A)
    assert seq.num_cached == 32
    assert (engine.host.num_loaded, engine.host.hit_tokens) == (5, 20)  # B has taken 5 blocks
    assert engine.pool.hit_tokens == 12  # the device still had the beginning
    assert engine.host.waited_s == 1.0
    assert engine.pool.num_used == 0


def test_others_run_while_a_sequence_waits_for_its_blocks():
    engine = evicted_a()
    engine.finishes = False
    waiting = engine.add("A again", A)
    other = engine.add("other", range(300, 310), max_tokens=3)
    assert [engine.step() for _ in range(3)] == [["other"]] * 3
    assert other.finished and waiting.status is Status.LOADING
    assert (engine.scheduler.num_waiting, engine.scheduler.num_deferred) == (1, 1)
    assert engine.step() == [] and engine.scheduler.loads
    engine.finishes = True
    assert engine.step() == ["A again"]
    assert waiting.num_cached == 32


def test_timeline_shows_the_load():
    engine = evicted_a()
    arrival_s = engine.now_s
    engine.add("A again", A)
    engine.finishes = False
    engine.step()
    (seq,) = engine.watcher.capture().state().sequences
    assert [span.kind for span in seq.spans] == ["queued", "loading"]
    engine.step()
    engine.finishes = True
    engine.step()
    (seq,) = engine.watcher.capture().state().finished
    spans = [(span.kind, span.begin_s - arrival_s, span.end_s - arrival_s) for span in seq.spans]
    assert spans == [("queued", 0, 1), ("loading", 1, 2), ("prefill", 2, 3)]
    assert seq.cached_tokens == 32


def test_sequences_with_the_same_prefix_share_a_load():
    engine, short = Engine(), range(400, 417)
    engine.serve("first", short)
    engine.serve("A", A)
    engine.serve("B", B)
    engine.finishes = False
    seqs = [engine.add(str(i), short) for i in range(2)]
    engine.step()
    assert [seq.status for seq in seqs] == [Status.LOADING] * 2
    engine.finishes = True
    engine.step()
    engine.step()
    assert [seq.num_cached for seq in seqs] == [16, 16]
    assert engine.host.num_loaded == 4


def test_aborted_load_enters_the_prefix_cache():
    engine = evicted_a()
    engine.finishes = False
    engine.add("A again", A)
    engine.step()
    engine.scheduler.abort("A again")
    assert not engine.scheduler.has_work and engine.pool.num_used == 8
    engine.finishes = True
    engine.step()
    assert engine.pool.num_used == 0 and not engine.scheduler.loads
    assert engine.serve("later", A).num_cached == 32
    assert engine.host.num_loaded == 5  # not again


def test_emptied_cache_keeps_a_load_in_progress_out():
    engine = evicted_a()
    engine.finishes = False
    seq = engine.add("A again", A)
    engine.step()
    engine.scheduler.empty_prefix_cache()
    assert engine.host.num_blocks == 0
    engine.finishes = True
    while not seq.finished:
        engine.step()
    assert engine.host.num_loaded == 5
    assert seq.num_cached == 12  # the load had held these blocks on the device


def test_recovery_drops_copies_and_loads():
    engine = evicted_a()
    engine.finishes = False
    seq = engine.add("A again", A)
    engine.step()
    engine.scheduler.recover()
    engine.device.reset()
    engine.memory.reset()
    assert (engine.host.num_blocks, engine.pool.num_used) == (0, 0)
    assert seq.status is Status.QUEUED and not engine.scheduler.loads
    engine.finishes = True
    while not seq.finished:
        engine.step()
    assert seq.num_cached == 0


def test_loaded_blocks_are_events_of_the_device_again():
    engine = evicted_a()
    engine.serve("again", A)
    events = engine.events.take()
    gpu = [e for e in events if isinstance(e, BlockStored) and e.medium == "GPU"]
    assert gpu[0].token_ids == list(A)[12:32] and gpu[0].parent_block_hash is not None
    assert not any(isinstance(event, AllBlocksCleared) for event in events)


def test_nothing_finished_changes_nothing():
    engine = evicted_a()
    engine.scheduler.finish_transfers(Finished())
    assert engine.host.num_loaded == 0
