"""KV events over ZeroMQ: batches, replay, overload, and crashes of the engine process."""

from __future__ import annotations

import os
import signal
import sys

import msgspec
import pytest
import zmq

from forge_jax import SamplingParams
from forge_jax.config import EngineConfig
from forge_jax.config.kv_events import KVEvents
from forge_jax.engine.kv_events import END, Publisher
from forge_jax.engine.process.client import EngineProcess
from forge_jax.engine.thread import Engine
from forge_jax.errors import ConfigError, ModelError
from forge_jax.schedule.cache_events import AllBlocksCleared, BlockRemoved, public_hash

LOCAL = "tcp://127.0.0.1:*"
JSON = f'{{"enable_kv_cache_events": true, "endpoint": "{LOCAL}", "replay_endpoint": "{LOCAL}"}}'


def replayed(publisher: Publisher, first: int = 0, rank: int = 0) -> list[tuple[int, list]]:
    """Return the number and the events of each buffered batch from `first`."""
    batches: list[tuple[int, list]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(publisher.replay_endpoint or "")
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            _, number, payload = socket.recv_multipart()
            if number == END:
                return batches
            _, events, found = msgspec.msgpack.decode(payload)
            assert found == rank
            batches.append((int.from_bytes(number, "big"), events))


def hashes(batches: list[tuple[int, list]]) -> set[int]:
    """Return the blocks that remain after the events of all batches."""
    held: set[int] = set()
    for _, events in batches:
        for kind, *fields in events:
            match kind:
                case "BlockStored":
                    held |= set(fields[0])
                case "BlockRemoved":
                    held -= set(fields[0])
                case _:
                    held.clear()
    return held


@pytest.mark.parametrize(("endpoint", "expected"), [
    ("tcp://*:5557", "tcp://*:5559"),
    (LOCAL, LOCAL),
    ("ipc:///tmp/events", "ipc:///tmp/events_dp2"),
])  # fmt: skip
def test_each_engine_of_a_group_has_its_own_addresses(endpoint, expected):
    settings = KVEvents(endpoint=endpoint, replay_endpoint=endpoint)
    assert settings.of_rank(0) == settings
    moved = settings.of_rank(2)
    assert (moved.endpoint, moved.replay_endpoint) == (expected, expected)


def test_batches_have_the_rank_of_their_engine():
    publisher = Publisher(KVEvents(endpoint=LOCAL, replay_endpoint=LOCAL), rank=3)
    try:
        assert replayed(publisher, rank=3) == [(0, [["AllBlocksCleared"]])]
    finally:
        publisher.close()


async def generate(engine: Engine | EngineProcess, prompt: list[int]) -> None:
    async for _ in engine.submit(prompt, SamplingParams(max_tokens=8), request_id=f"{prompt[0]}"):
        pass


def test_replay_starts_at_the_requested_number() -> None:
    publisher = Publisher(KVEvents(endpoint=LOCAL, replay_endpoint=LOCAL, buffer_steps=2))
    publisher.publish([BlockRemoved([1])])
    publisher.publish([BlockRemoved([2]), AllBlocksCleared()])
    removed = [["BlockRemoved", [1], "GPU"]]
    latest = [["BlockRemoved", [2], "GPU"], ["AllBlocksCleared"]]
    assert replayed(publisher) == [(1, removed), (2, latest)]
    assert replayed(publisher, 2) == [(2, latest)]
    publisher.close()


def test_subscriber_fills_a_gap_by_replay() -> None:
    publisher = Publisher(KVEvents(endpoint=LOCAL, replay_endpoint=LOCAL, topic="kv"))
    assert len(replayed(publisher)) == 1  # the first batch has been sent, without a subscriber
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe("kv")
        socket.connect(publisher.endpoint)
        number = 0
        while not socket.poll(20):  # messages before the connection are lost
            number += 1
            publisher.publish([BlockRemoved([number])])
        topic, first, payload = socket.recv_multipart()
    missed = int.from_bytes(first, "big")
    assert topic == b"kv" and missed > 0
    batches = replayed(publisher)
    assert [each for each, _ in batches] == list(range(number + 1))
    assert batches[missed][1] == msgspec.msgpack.decode(payload)[1]
    publisher.close()


def test_full_queue_drops_batches_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Publisher, "_run", lambda self: None)  # the queue is never emptied
    publisher = Publisher(KVEvents(endpoint=LOCAL, max_queue_size=2))
    for _ in range(4):
        publisher.publish([AllBlocksCleared()])
    assert publisher.num_dropped == 3  # the publisher itself has sent one
    publisher._context.destroy(linger=0)


async def test_replayed_events_give_the_blocks_of_the_prefix_cache() -> None:
    config = EngineConfig.from_options(kv_events_config=JSON, num_blocks=12, block_size=8)
    engine = Engine.fake(config=config, max_model_len=64)
    engine.start()
    for first in range(8):
        await generate(engine, [first + 1] * 30)
    pool, publisher = engine._core.scheduler.pool, engine._publisher
    assert publisher is not None
    assert pool.num_evictions > 0
    batches = replayed(publisher)
    assert hashes(batches) == {public_hash(each) for each in pool.cached_hashes()}
    assert engine.stats().dropped_kv_event_batches == 0
    await engine.stop()


async def test_new_weights_clear_all_blocks() -> None:
    engine = Engine.fake(config=EngineConfig.from_options(kv_events_config=JSON))
    engine.start()
    await generate(engine, list(range(1, 40)))
    publisher, core = engine._publisher, engine._core
    assert publisher is not None
    before = replayed(publisher)
    assert hashes(before)
    engine._thread.between_steps(lambda: core.update_weights(lambda: None, 1, "keep"))
    assert replayed(publisher, len(before)) == [(len(before), [["AllBlocksCleared"]])]
    await engine.stop()


async def test_blocks_leave_at_once_in_a_pause() -> None:
    engine = Engine.fake(config=EngineConfig.from_options(kv_events_config=JSON))
    engine.start()
    await generate(engine, list(range(1, 40)))
    await engine.control.pause()
    publisher = engine._publisher
    assert publisher is not None
    assert hashes(replayed(publisher))
    await engine.control.reset_prefix_cache()
    assert not hashes(replayed(publisher))
    await engine.control.sleep()
    assert replayed(publisher)[-1][1] == [["AllBlocksCleared"]]
    await engine.stop()


async def test_engine_without_the_flag_records_no_events() -> None:
    engine = Engine.fake()
    assert engine._core.scheduler.pool.events is None
    assert engine.stats().dropped_kv_event_batches is None


async def test_crash_of_the_engine_process_clears_all_blocks() -> None:
    engine = EngineProcess.fake(config=EngineConfig.from_options(kv_events_config=JSON))
    engine.start()
    await generate(engine, list(range(1, 40)))
    publisher, pid = engine._publisher, engine.pid
    assert publisher is not None and pid is not None
    before = replayed(publisher)
    assert hashes(before)
    os.kill(pid, signal.SIGKILL)
    await generate(engine, list(range(60, 100)))
    after = replayed(publisher, len(before))
    assert after[0] == (len(before), [["AllBlocksCleared"]])
    assert hashes(after)
    await engine.stop()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("no", "must be a JSON object"),
        ('{"endpoint": "5557"}', r"\$\.endpoint"),
        ('{"buffer_steps": 0}', r"\$\.buffer_steps"),
        ('{"hwm": "x"}', r"\$\.hwm"),
        ('{"host": "x"}', "unknown field `host`"),
    ],
)
def test_invalid_settings_are_rejected_by_name(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        EngineConfig.from_options(kv_events_config=text)


def test_events_without_a_prefix_cache_are_rejected() -> None:
    with pytest.raises(ConfigError, match="prefix_cache=False"):
        EngineConfig.from_options(kv_events_config=JSON, prefix_cache=False)


def test_address_in_use_is_named_in_the_error() -> None:
    publisher = Publisher(KVEvents(endpoint=LOCAL))
    with pytest.raises(ConfigError, match="replay_endpoint tcp"):
        Publisher(KVEvents(endpoint=LOCAL, replay_endpoint=publisher.endpoint))
    publisher.close()


def test_missing_pyzmq_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"extra events: pip install .*\[events\]"):
        Publisher(KVEvents())


@pytest.mark.parametrize("load", [Engine.load, EngineProcess.load])
def test_failed_start_frees_the_address(load, tmp_path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
    text = f'{{"enable_kv_cache_events": true, "endpoint": "tcp://*:{port}"}}'
    config = EngineConfig.from_options(model=str(tmp_path), kv_events_config=text)
    for _ in range(2):  # a ConfigError of the address would replace the second
        with pytest.raises(ModelError, match=r"no config\.json"):
            load(config)
