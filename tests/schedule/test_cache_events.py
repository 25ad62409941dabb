"""Events of the prefix cache: a reader of the events has exactly the registered blocks."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from forge_jax import SamplingParams
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.cache_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvents,
    public_hash,
)
from forge_jax.schedule.plan import SequenceResult, StepResult
from forge_jax.schedule.request import LoraRef, Request
from forge_jax.schedule.scheduler import Scheduler, SchedulerConfig

BLOCK = 4
LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, max_rows=64, max_model_len=96)


class Stored(msgspec.Struct, array_like=True, tag="BlockStored"):
    """The fields of vLLM's struct, in its order."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


READER = msgspec.msgpack.Decoder(list[Stored | Removed | Cleared])


class Reader:
    """A router's view: the tokens of each block, by hash."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}

    def read(self, payload: bytes) -> None:
        for event in READER.decode(payload):
            match event:
                case Stored():
                    self._store(event)
                case Removed():
                    for block_hash in event.block_hashes:
                        del self.blocks[block_hash]
                case Cleared():
                    self.blocks.clear()

    def _store(self, event: Stored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        for i, block_hash in enumerate(event.block_hashes):
            self.blocks[block_hash] = parent, event.token_ids[i * size : (i + 1) * size]
            parent = block_hash


def scheduler_with_events() -> tuple[Scheduler, CacheEvents]:
    pool = BlockPool(num_blocks=24, block_size=BLOCK)
    pool.events = events = CacheEvents()
    return Scheduler(LIMITS, pool, clock=lambda: 0.0, rng=random.Random(0)), events


def add(scheduler: Scheduler, name: str, prompt: list[int], **options: Any) -> None:
    params = SamplingParams(max_tokens=6)
    scheduler.add(Request(request_id=name, prompt_token_ids=prompt, params=params, **options))


def step(scheduler: Scheduler, rng: random.Random) -> None:
    plan = scheduler.schedule()
    assert plan is not None
    rows = [SequenceResult((rng.randrange(9),) if row.samples else ()) for row in plan.sequences]
    scheduler.commit(plan, StepResult(plan.step, tuple(rows)))


def run_random(seed: int, scheduler: Scheduler, events: CacheEvents, reader: Reader) -> None:
    """Run requests with shared prefixes, and compare the reader with the pool after each step."""
    rng = random.Random(seed)
    for number in range(40):
        prompt = [rng.randrange(2)] * rng.randrange(1, 40) + [rng.randrange(9)] * rng.randrange(20)
        add(scheduler, f"{number}", prompt, cache_salt=rng.choice(["", "a"]))
        for _ in range(rng.randrange(8)):
            if scheduler.has_work:
                step(scheduler, rng)
            if rng.random() < 0.02:
                scheduler.recover()
            reader.read(msgspec.msgpack.encode(events.take()))
            cached = scheduler.pool.cached_hashes()
            assert reader.blocks.keys() == {public_hash(each) for each in cached}
    assert scheduler.pool.num_evictions > 0


@pytest.mark.parametrize("seed", range(4))
def test_reader_of_events_has_the_blocks_of_the_prefix_cache(seed: int) -> None:
    scheduler, events = scheduler_with_events()
    run_random(seed, scheduler, events, Reader())


def test_reader_of_events_without_evictions_differs_from_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CacheEvents, "removed", lambda *_: None)
    scheduler, events = scheduler_with_events()
    with pytest.raises(AssertionError):
        run_random(0, scheduler, events, Reader())


def test_stored_event_has_the_tokens_and_the_parent_of_its_blocks() -> None:
    rng = random.Random(0)
    scheduler, events = scheduler_with_events()
    adapter = LoraRef(name="poet", place=1, identity="1")
    add(scheduler, "A", list(range(10)), lora=adapter)
    step(scheduler, rng)
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == list(range(8))
    assert (len(stored.block_hashes), stored.block_size) == (2, BLOCK)
    assert (stored.parent_block_hash, stored.lora_name) == (None, "poet")
    for _ in range(2):
        step(scheduler, rng)
    (later,) = events.take()
    assert isinstance(later, BlockStored)
    assert later.parent_block_hash == stored.block_hashes[-1]
    assert later.token_ids[:2] == [8, 9]


def test_block_hashes_are_equal_in_every_process() -> None:
    pool = BlockPool(num_blocks=1, block_size=BLOCK)
    first = pool.hash_block(None, [1, 2, 3, 4], "")
    assert public_hash(first) == 17760515455202596340


def test_recovery_clears_all_blocks() -> None:
    scheduler, events = scheduler_with_events()
    scheduler.recover()
    assert events.take() == [AllBlocksCleared()]


def test_consecutive_evictions_are_one_event() -> None:
    events = CacheEvents()
    events.removed(bytes(31) + b"\1")
    events.removed(bytes(31) + b"\2")
    assert events.take() == [BlockRemoved([1, 2])]
    assert events.take() == []
