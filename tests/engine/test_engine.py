"""`Engine`: the thread, the streams and their ends, on the fake device, which checks each step."""

import asyncio
import threading
import time

import pytest

from forge_jax import Engine, SamplingParams
from forge_jax.config import BatchConfig, CacheConfig, EngineConfig
from forge_jax.errors import ContextLengthError, EngineError, NumericalError, RequestError
from forge_jax.testing import core_of
from forge_jax.text import Tokenizer


@pytest.fixture
async def engine():
    engine = Engine.fake(check=True)
    engine.start()
    yield engine
    await engine.stop()


async def read(stream) -> tuple[dict[int, str], dict[int, str]]:
    """Return (text by sample, finish reason by sample)."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    async for deltas in stream:
        for delta in deltas:
            texts[delta.index] = texts.get(delta.index, "") + delta.text
            if delta.finish_reason is not None:
                reasons[delta.index] = delta.finish_reason
    return texts, reasons


async def settled(engine, *, steps: int = 2) -> None:
    """Wait until the engine is idle, which must take at most `steps` steps."""
    begin = engine.stats().steps
    for _ in range(400):
        if not core_of(engine).has_work:
            break
        await asyncio.sleep(0.005)
    assert engine.stats().num_used_blocks == 0
    assert engine.stats().steps - begin <= steps


async def test_concurrent_streams_each_get_their_own_text(engine):
    async def one(i: int):
        params = SamplingParams(max_tokens=30, n=2, seed=i)
        return await read(engine.submit([i % 50, 3, 4], params, request_id=f"r{i}"))

    crowd = await asyncio.gather(*(one(i) for i in range(200)))
    for i in (0, 17, 199):
        params = SamplingParams(max_tokens=30, n=2, seed=i)
        alone = await read(engine.submit([i % 50, 3, 4], params, request_id=f"again-{i}"))
        assert crowd[i] == alone
    await settled(engine, steps=0)


async def test_text_is_whole_characters(engine):
    params = SamplingParams(max_tokens=500, seed=4)
    pieces = [d.text async for d in engine.generate([1], params)]
    assert "🙂" in "".join(pieces) and not any("\ufffd" in piece for piece in pieces)


async def test_aborted_request_frees_its_blocks_within_two_steps():
    engine = Engine.fake(step_time_s=0.01)
    engine.start()
    stream = engine.submit([1] * 100, SamplingParams(max_tokens=2000), request_id="r")
    await anext(stream)
    assert engine.stats().num_used_blocks > 0
    stream.abort()
    stream.abort()
    await settled(engine, steps=2)
    _, reasons = await read(stream)
    assert reasons == {0: "abort"}
    await engine.stop()


async def test_leaving_generate_early_aborts_the_request(engine):
    generation = engine.generate([1], SamplingParams(max_tokens=3000))
    async for _ in generation:
        break
    await generation.aclose()
    await asyncio.sleep(0.05)
    assert engine.stats().num_running == 0 and engine.stats().num_used_blocks == 0


async def test_text_that_can_never_fit_is_rejected_before_encoding(engine, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", None)
    with pytest.raises(ContextLengthError):
        await anext(engine.generate("word " * 1_000_000))


async def test_unservable_requests_are_rejected_at_submit(engine):
    params = SamplingParams(max_tokens=10)
    with pytest.raises(ContextLengthError):
        engine.submit([1] * 5000, params, request_id="long")
    with pytest.raises(RequestError, match="vocabulary"):
        engine.submit([10**6], params, request_id="id")
    stream = engine.submit([1], params, request_id="twice")
    with pytest.raises(RequestError, match="in use"):
        engine.submit([1], params, request_id="twice")
    await read(stream)


async def test_numerical_fault_fails_only_one_request(engine):
    core_of(engine).device._fault = lambda scheduled: scheduled.seq_key[0] == "bad"
    good = engine.submit([1, 2], SamplingParams(max_tokens=20, seed=1), request_id="good")
    bad = engine.submit([1, 2], SamplingParams(max_tokens=20, seed=1), request_id="bad")
    (texts, reasons), updates = await asyncio.gather(read(good), anext(bad))
    assert reasons == {0: "length"} and texts[0]
    assert isinstance(updates[-1].error, NumericalError)


@pytest.mark.parametrize(("interval_s", "items"), [(0.0, range(2, 31)), (3600.0, range(1, 2))])
async def test_updates_are_batched_but_the_last_one_is_not_delayed(interval_s, items):
    engine = Engine.fake(step_time_s=0.002)
    engine.news_interval_s = interval_s
    engine.start()
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    received = [each async for each in engine.submit([1, 2], params, request_id="r")]
    assert sum(len(delta.token_ids) for deltas in received for delta in deltas) == 30
    assert len(received) in items
    await engine.stop()


async def test_updates_before_a_failure_are_delivered():
    engine = Engine.fake()
    tick, left = core_of(engine).tick, iter(range(10))

    def failing(before_wait):
        if next(left, None) is None:
            raise MemoryError
        return tick(before_wait)

    core_of(engine).tick = failing
    engine.news_interval_s = 3600.0
    engine.start()
    stream = engine.submit([1], SamplingParams(max_tokens=50), request_id="r")
    deltas = [delta async for deltas in stream for delta in deltas]
    assert sum(len(delta.token_ids) for delta in deltas) == 9  # the first tick only dispatches
    assert deltas[-1].finish_reason == "error"
    await engine.stop()


async def test_failed_engine_reports_to_every_stream(engine, caplog):
    def fail(*plan):
        raise RuntimeError("the device is gone")

    core_of(engine).device.dispatch = core_of(engine).device.reset = fail
    stream = engine.submit([1], SamplingParams(max_tokens=20), request_id="r")
    deltas = await anext(stream)
    assert isinstance(deltas[0].error, EngineError)
    assert not engine.stats().healthy and engine.stats().state == "failed"
    with pytest.raises(EngineError):
        engine.submit([1], SamplingParams(), request_id="later")
    assert "the device is gone" in caplog.text


async def test_stopping_drains_then_aborts_and_ends_the_thread():
    engine = Engine.fake(step_time_s=0.002)
    engine.start()
    short = engine.submit([1], SamplingParams(max_tokens=20), request_id="short")
    long = engine.submit([1], SamplingParams(max_tokens=4000), request_id="long")
    ends = asyncio.gather(read(short), read(long))
    await engine.stop(drain_s=0.4)
    (_, short_reason), (_, long_reason) = await ends
    assert (short_reason, long_reason) == ({0: "length"}, {0: "abort"})
    assert "forge-engine" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(EngineError, match="stopped"):
        engine.submit([1], SamplingParams(), request_id="late")


async def test_idle_engine_sleeps(engine):
    await read(engine.submit([1], SamplingParams(max_tokens=3), request_id="r"))
    steps = engine.stats().steps
    await asyncio.sleep(0.1)
    assert engine.stats().steps == steps


async def test_small_limits_still_serve_every_request():
    config = EngineConfig(
        cache=CacheConfig(num_blocks=20, block_size=8),
        batch=BatchConfig(max_num_seqs=3, max_num_batched_tokens=7, prefill_chunk_size=5),
    )
    engine = Engine.fake(check=True, config=config)
    engine.start()
    streams = [
        engine.submit([i] * 30, SamplingParams(max_tokens=40), request_id=f"r{i}")
        for i in range(12)
    ]
    for _, reasons in await asyncio.gather(*map(read, streams)):
        assert reasons == {0: "length"}
    assert engine.stats().preemptions > 0
    await settled(engine, steps=0)
    await engine.stop()


async def test_tokens_cross_to_the_event_loop_once_per_step(engine, monkeypatch):
    loop = asyncio.get_running_loop()
    calls = []
    original = loop.call_soon_threadsafe
    monkeypatch.setattr(
        loop, "call_soon_threadsafe", lambda *a, **k: (calls.append(a), original(*a, **k))[1]
    )
    before = engine.stats().steps
    streams = [
        engine.submit([i], SamplingParams(max_tokens=50), request_id=f"r{i}") for i in range(40)
    ]
    await asyncio.gather(*map(read, streams))
    assert len(calls) <= engine.stats().steps - before


async def test_pushed_updates_equal_iterated_ones(engine):
    params = SamplingParams(max_tokens=50, n=2, seed=1)
    stream = engine.submit([1, 2], params, request_id="pushed")
    texts = {0: "", 1: ""}
    over = asyncio.Event()

    def receive(deltas):
        for delta in deltas:
            texts[delta.index] += delta.text
        if stream.finished:
            over.set()

    while not stream._deltas:  # some arrive before a receiver is registered
        await asyncio.sleep(0)
    stream.push_to(receive)
    await over.wait()
    assert texts == (await read(engine.submit([1, 2], params, request_id="iterated")))[0]
    await settled(engine, steps=0)


async def test_steps_behind_a_slow_event_loop_are_delivered_together(engine):
    stream = engine.submit([1], SamplingParams(max_tokens=20, ignore_eos=True), request_id="r")
    while engine.stats().generation_tokens < 20:
        time.sleep(0.001)  # blocks the event loop
    items = [deltas async for deltas in stream]
    assert [len(deltas) for deltas in items] == [20]


async def test_raising_receiver_costs_only_its_own_request(engine, caplog):
    def receive(deltas):
        raise ValueError("cannot take it")

    stream = engine.submit([1], SamplingParams(max_tokens=3000), request_id="raises")
    stream.push_to(receive)
    other = engine.submit([2], SamplingParams(max_tokens=100, ignore_eos=True), request_id="other")
    assert (await read(other))[1] == {0: "length"}
    await settled(engine, steps=5)
    assert engine.stats().generation_tokens < 3000 and "cannot take it" in caplog.text


def test_faulty_offline_prompt_does_not_cost_the_others():
    from forge_jax.engine.fake import assemble_fake
    from forge_jax.llm import LLM

    llm = LLM.from_parts(
        assemble_fake(EngineConfig(), step_time_s=0.0, max_model_len=100, check=True)
    )
    core_of(llm).device._fault = lambda scheduled: scheduled.seq_key[0] == "llm-2"
    params = SamplingParams(max_tokens=5)
    outputs = llm.generate([[1], [2], [3]], params, progress=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert isinstance(outputs[1].outputs[0].error, NumericalError)
    core_of(llm).device._fault = lambda scheduled: True
    with pytest.raises(NumericalError):
        list(llm.stream([4], params))


async def test_error_in_one_request_does_not_affect_others(engine, monkeypatch, caplog):
    """A panic inside a library counts, although it is no Exception."""
    from forge_jax.engine.text_output import SequenceText

    class Panic(BaseException):
        pass

    original = SequenceText.push

    def push(self, token_ids, num_before):
        if self._min_tokens == 7:
            raise Panic
        return original(self, token_ids, num_before)

    monkeypatch.setattr(SequenceText, "push", push)
    good = engine.submit([1, 2], SamplingParams(max_tokens=20, seed=1), request_id="good")
    breaking = SamplingParams(max_tokens=20, min_tokens=7, stop=["never"])
    bad = engine.submit([1, 2], breaking, request_id="bad")
    (texts, reasons), (_, bad_reasons) = await asyncio.gather(read(good), read(bad))
    assert reasons == {0: "length"} and texts[0]
    assert bad_reasons == {0: "error"}
    await settled(engine)


async def test_submit_copies_and_checks_its_parameters(engine):
    ids = [5] * 40
    stream = engine.submit(ids, SamplingParams(max_tokens=3), request_id="r")
    ids.clear()
    assert (await read(stream))[1] == {0: "length"}
    with pytest.raises(RequestError, match="integers"):
        engine.submit([1.5], SamplingParams(), request_id="float")
    for salt in ("\ud800", None):
        with pytest.raises(RequestError) as error:
            engine.submit([1], SamplingParams(), request_id="s", cache_salt=salt)
        assert error.value.param == "cache_salt"
    with pytest.raises(ContextLengthError):
        engine.check([1] * 5000, SamplingParams())


async def test_engine_thread_death_ends_its_streams():
    class Panic(BaseException):
        pass

    def dispatch(plan):
        raise Panic

    engine = Engine.fake()
    core_of(engine).device.dispatch = dispatch
    engine.start()
    stream = engine.submit([1], SamplingParams(max_tokens=20), request_id="r")
    assert (await read(stream))[1] == {0: "error"}
    assert engine.stats().state == "failed"
    await engine.stop()


def test_engine_outlives_its_clients_event_loop():
    engine = Engine.fake(step_time_s=0.001)
    engine.start()

    async def leave_early():
        engine.submit([1], SamplingParams(max_tokens=3000), request_id="r")

    async def come_later():
        reasons = (await read(engine.submit([1], SamplingParams(max_tokens=5), request_id="s")))[1]
        await engine.stop()
        return reasons

    asyncio.run(leave_early())
    assert asyncio.run(come_later()) == {0: "length"}
