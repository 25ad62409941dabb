"""An engine in its own process: killed at any moment, it continues every stream."""

import asyncio
import dataclasses
import os
import random
import signal
import struct
import threading
import time

import msgspec
import pytest

from forge_jax import SamplingParams
from forge_jax.config import EngineConfig
from forge_jax.engine.async_engine import AsyncEngine
from forge_jax.engine.commands import Abort, Submit
from forge_jax.engine.fault_isolation import MAX_FAILURES
from forge_jax.engine.process import launcher, supervisor
from forge_jax.engine.process.client import EngineProcess
from forge_jax.engine.process.connection import Connection
from forge_jax.engine.process.launcher import PendingLaunch
from forge_jax.engine.process.messages import Frames, Start, decoded, frame, to_engine
from forge_jax.engine.process.supervisor import Supervisor
from forge_jax.engine.streams import QueueLimits
from forge_jax.engine.thread import Engine
from forge_jax.errors import (
    ConfigError,
    EngineError,
    ModelError,
    OverloadedError,
    RequestError,
    StepError,
)
from forge_jax.schedule.request import Request
from forge_jax.testing import POOLED_SIZE, FakeDevice

WAIT_S = 60.0


def jobs(count: int, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    made = []
    for i in range(count):
        stem = [9] * 64 if rng.random() < 0.5 else []
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 2)),
            max_tokens=rng.randint(1, 120),
            temperature=1.0,
            seed=i,
            ignore_eos=True,
            logprobs=rng.choice((None, None, 1)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
            stop=rng.choice(((), (), ("garden w", "brave dog"))),
            skip_special_tokens=rng.random() < 0.5,
        )
        made.append((stem + [rng.randrange(300) for _ in range(rng.randint(1, 80))], params))
    return made


async def outcome(engine: AsyncEngine, name: str, prompt, params) -> dict[int, list]:
    """Return for each sample: tokens, text, logprobs, prompt logprobs and the finish reason."""
    found = {i: [(), "", (), (), None, None] for i in range(params.n)}
    async for deltas in engine.submit(prompt, params, request_id=name):
        for delta in deltas:
            entry = found[delta.index]
            assert entry[4] is None, "news after the end"
            entry[0] += delta.token_ids
            entry[1] += delta.text
            entry[2] += delta.logprobs or ()
            entry[3] += delta.prompt_logprobs or ()
            entry[4], entry[5] = delta.finish_reason, delta.stop_reason
            if delta.error is not None:
                entry[5] = delta.error
    return found


async def outcomes(engine: AsyncEngine, work) -> list[dict[int, list]]:
    tasks = [outcome(engine, f"r{i}", *job) for i, job in enumerate(work)]
    return await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)


async def until(condition, what: str) -> None:
    for _ in range(int(WAIT_S * 100)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never: {what}")


async def undisturbed(work, **options) -> list[dict[int, list]]:
    engine = Engine.fake(**options)
    engine.start()
    try:
        return await outcomes(engine, work)
    finally:
        await engine.stop()


@pytest.fixture
async def engine():
    engine = EngineProcess.fake(step_time_s=0.002)
    engine.start()
    yield engine
    await engine.stop()


async def test_engine_process_answers_like_an_in_process_engine(engine):
    work = jobs(20)
    assert await outcomes(engine, work) == await undisturbed(work)
    await until(lambda: engine.stats().num_used_blocks == 0, "idle")
    stats = engine.stats()
    assert stats.healthy and stats.state == "ready" and stats.restarts == 0
    assert stats.generation_tokens > 100 and stats.step_phases["schedule"].count > 10


async def test_pooled_vectors_survive_a_kill(engine):
    params = SamplingParams(max_tokens=0, detokenize=False)
    prompts = [[9] * 64 + [i] * 3000 for i in range(40)]
    streams = [
        engine.submit(prompt, params, request_id=f"p{i}", pooling="mean")
        for i, prompt in enumerate(prompts)
    ]
    steps = engine.stats().steps
    await until(lambda: engine.stats().steps > steps + 3, "steps")
    os.kill(engine.pid, signal.SIGKILL)
    device = FakeDevice(num_blocks=1, block_size=16, max_num_seqs=1)
    async with asyncio.timeout(WAIT_S):
        for prompt, stream in zip(prompts, streams, strict=True):
            [delta] = [delta async for deltas in stream for delta in deltas]
            assert delta.finish_reason == "stop" and delta.pooled is not None
            vector = struct.unpack(f"<{POOLED_SIZE}f", delta.pooled)
            assert vector == pytest.approx(device.pooled(prompt, "mean"), abs=1e-5)
    assert engine.num_restarts == 1
    with pytest.raises(RequestError, match="max_tokens"):
        engine.submit([1], SamplingParams(max_tokens=1), request_id="p", pooling="last")


async def test_every_stream_continues_after_kills(engine):
    work = jobs(64, seed=1)
    expected = await undisturbed(work)
    serving = asyncio.ensure_future(outcomes(engine, work))
    for kill in range(3):
        await until(lambda: engine.stats().healthy, "healthy")
        steps = engine.stats().steps
        await until(lambda steps=steps: engine.stats().steps > steps + 15, "steps")
        assert not serving.done(), "killed too late to show anything"
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: not engine.stats().healthy, "unhealthy")
        assert engine.stats().state == "recovering"
        assert engine.num_restarts == kill + 1
    assert await serving == expected
    assert not engine._journal and not engine.streams
    await until(lambda: engine.stats().state == "ready", "ready again")


async def test_requests_submitted_without_a_process_are_served_by_the_next(engine):
    [job] = jobs(1, seed=5)
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.stats().state == "recovering", "recovering")
    stream = engine.submit([1], SamplingParams(max_tokens=500), request_id="given up")
    stream.abort()
    assert [d.finish_reason for d in await anext(stream)] == ["abort"]
    assert await outcomes(engine, [job]) == await undisturbed([job])


@pytest.mark.slow
async def test_request_that_kills_each_process_is_isolated(engine, monkeypatch):
    """The process dies whenever it receives this request, before any request gets a token."""
    send = Connection.send

    def send_and_kill(self, message):
        if isinstance(message, Submit) and message.request.request_id == "poison":
            self.process.kill()
        send(self, message)

    monkeypatch.setattr(Connection, "send", send_and_kill)
    work = jobs(9, seed=2)
    expected = await undisturbed(work)
    serving = asyncio.ensure_future(outcomes(engine, work))
    await asyncio.sleep(0)  # all requests are sent, and none has a token
    poison = SamplingParams(max_tokens=5)
    found = await asyncio.wait_for(outcome(engine, "poison", [1], poison), WAIT_S)
    assert found[0][4] == "error" and isinstance(found[0][5], StepError)
    assert await serving == expected
    # Three crashes of all ten, then halves of 10, 5, 3 and 2 that contain it, then it alone.
    assert engine.num_restarts <= MAX_FAILURES + 4 + 1
    assert not engine._journal.searching and not engine._journal


STICKY = """
import os, sys
from forge_jax.engine.process import worker
from forge_jax.testing import FakeDevice

right = FakeDevice.dispatch

def dispatch(self, plan):
    if self.num_steps == 40 and not os.path.exists({marker!r}):
        open({marker!r}, "w").close()
        FakeDevice.dispatch = FakeDevice.reset = broken
    return FakeDevice.dispatch(self, plan) if FakeDevice.dispatch is broken else right(self, plan)

def broken(self, *plan):
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

FakeDevice.dispatch = dispatch
worker.main()
"""


async def test_unrecoverable_device_ends_its_process(monkeypatch, tmp_path):
    """After its first failure every device call fails, until there is a new process."""
    code = STICKY.format(marker=str(tmp_path / "has failed"))
    monkeypatch.setattr(launcher, "WORKER", ("-c", code))
    engine = EngineProcess.fake(step_time_s=0.001)
    engine.start()
    try:
        work = jobs(12, seed=3)
        assert await outcomes(engine, work) == await undisturbed(work)
        assert engine.num_restarts == 1 and (tmp_path / "has failed").exists()
    finally:
        await engine.stop()


async def test_waiting_requests_are_shed_while_there_is_no_process(engine):
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.stats().state == "recovering", "recovering")
    streams = [engine.submit([1], SamplingParams(max_tokens=3), request_id=r) for r in "ab"]
    assert engine.shed()
    [end] = await anext(streams[1])
    assert end.finish_reason == "error" and isinstance(end.error, OverloadedError)
    last = [delta async for deltas in streams[0] for delta in deltas][-1]
    assert last.finish_reason == "length" and not engine._journal and not engine.streams


async def test_aborts_reach_the_process(engine):
    stream = engine.submit([1, 2], SamplingParams(max_tokens=4000), request_id="a")
    await anext(stream)
    stream.abort()
    ends = [delta.finish_reason async for deltas in stream for delta in deltas]
    assert ends[-1] == "abort"
    await until(lambda: engine.stats().num_used_blocks == 0, "free")
    assert not engine._journal


async def test_rejections_match_those_of_an_engine(engine):
    local = Engine.fake()
    for prompt, params in (
        ([], SamplingParams()),
        ([10**6], SamplingParams()),
        ([1], SamplingParams(max_tokens=10**6)),
        ([1], SamplingParams(allowed_token_ids=(10**6,))),
    ):
        with pytest.raises(RequestError) as here:
            local.check(prompt, params)
        with pytest.raises(RequestError) as there:
            engine.submit(prompt, params, request_id="x")
        assert str(here.value) == str(there.value) and here.value.param == there.value.param
    assert not engine.streams and not engine._journal


async def test_unencodable_request_is_rejected_without_affecting_others(engine):
    """It may arrive between two processes, when the successor would receive it."""
    [job] = jobs(1, seed=5)
    for kill in (False, True):
        if kill:
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: engine.stats().state == "recovering", "recovering")
        with pytest.raises(OverflowError):
            engine.submit([1], SamplingParams(), request_id="far", priority=2**70)
        assert not engine.streams
    assert await outcomes(engine, [job]) == await undisturbed([job])
    assert engine.num_restarts == 1


async def test_drain_lets_running_requests_finish():
    engine = EngineProcess.fake(step_time_s=0.002, queue_limits=QueueLimits(samples=3))
    engine.start()
    pid = engine.pid
    work = [([1, 2, 3], SamplingParams(max_tokens=60, seed=1, ignore_eos=True))]
    serving = asyncio.ensure_future(outcomes(engine, work))
    await asyncio.sleep(0.05)
    await engine.stop(drain_s=WAIT_S)
    assert await serving == await undisturbed(work)
    with pytest.raises(EngineError):
        engine.submit([1], SamplingParams(), request_id="late")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_process_ends_when_its_connection_closes():
    process = launcher.launch(Start(EngineConfig(), fake=True))
    process.sock.close()
    assert await asyncio.to_thread(process.process.wait, WAIT_S) == 0


async def test_engine_that_cannot_restart_reports_failure(engine, monkeypatch):
    def refuse(*_):
        raise EngineError("no more processes")

    monkeypatch.setattr(launcher, "launch", refuse)
    monkeypatch.setattr(supervisor, "MAX_LAUNCHES", 2)
    serving = asyncio.ensure_future(outcomes(engine, [([1], SamplingParams(max_tokens=4000))]))
    await until(lambda: engine.stats().num_running, "running")
    os.kill(engine.pid, signal.SIGKILL)
    [found] = await serving
    assert found[0][4] == "error" and isinstance(found[0][5], EngineError)
    assert engine.stats().state == "failed" and not engine.stats().healthy


@pytest.mark.slow
def test_model_load_errors_reach_the_caller(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        EngineProcess.load(EngineConfig.from_options(model=str(tmp_path)))
    with pytest.raises(ConfigError, match="--device 99"):
        EngineProcess.load(EngineConfig.from_options(model="forge-tiny", device=99))


@pytest.mark.slow
async def test_bundled_model_continues_with_the_same_bits():
    options = {"deterministic": True, "max_num_seqs": 4, "max_model_len": 256, "num_blocks": 64}
    config = EngineConfig.from_options(model="forge-tiny", **options)
    text = "Once upon a time there was a "
    engine = EngineProcess.load(config)
    engine.start()
    try:
        assert engine.tokenizer is not None and engine.chat_template is not None
        work = [
            (
                engine.tokenizer.encode(text + animal),
                SamplingParams(max_tokens=150, temperature=t, seed=7, logprobs=1, ignore_eos=True),
            )
            for animal, t in (("dog", 0.0), ("cat", 0.8), ("bird", 1.0))
        ]
        expected = await outcomes(engine, work)
        serving = asyncio.ensure_future(outcomes(engine, work))
        await until(lambda: engine._journal.num_tokens > 40, "tokens")
        assert not serving.done()
        os.kill(engine.pid, signal.SIGKILL)
        assert await serving == expected
        assert engine.num_restarts == 1
        assert engine.system_fingerprint is not None
    finally:
        await engine.stop()


# ---- how an engine process fails -----------------------------------------------------------------

EXITS = "import sys; sys.exit(1)"
# Connects, then sends nothing, not even heartbeats.
HOLDS_ITS_BREATH = """
import os, signal, sys
from forge_jax.engine.process import worker
worker.Engine.fake = lambda **_: os.kill(os.getpid(), signal.SIGSTOP)
worker.main()
"""
# Sends heartbeats and loads forever.
LOADS_FOR_EVER = """
import time
from forge_jax.engine.process import worker
worker.Engine.fake = lambda **_: time.sleep(600)
worker.main()
"""
GIBBERISH = """
import socket, sys, time
sock = socket.socket(fileno=int(sys.argv[1]))
sock.sendall(bytes(range(200, 250)))
time.sleep(600)
"""
HANGS = """
import os, time
from forge_jax.engine.process import worker
from forge_jax.testing import FakeDevice

read = FakeDevice.read

def read_or_hang(self, pending):
    if self.num_steps > 40 and not os.path.exists({marker!r}):
        open({marker!r}, "w").close()
        time.sleep(600)
    return read(self, pending)

FakeDevice.read = read_or_hang
worker.main()
"""


@pytest.fixture
def brief_pauses(monkeypatch):
    sleep = asyncio.sleep
    monkeypatch.setattr(supervisor.asyncio, "sleep", lambda seconds: sleep(min(seconds, 0.01)))


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        (EXITS, "ended with status 1 before it could serve"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9 before it could serve"),
        (GIBBERISH, "communication with the engine process failed"),
        (HOLDS_ITS_BREATH, "has sent nothing for . s during startup"),
    ],
    ids=["exits", "killed", "gibberish", "frozen"],
)
def test_failed_first_start_reports_the_cause(worker, message, monkeypatch):
    monkeypatch.setattr(launcher, "WORKER", ("-c", worker))
    timeout_s = 1.0 if worker == HOLDS_ITS_BREATH else 120.0
    with pytest.raises(EngineError, match=message):
        EngineProcess.fake(config=EngineConfig.from_options(engine_timeout_s=timeout_s))


async def test_early_exits_are_retried_until_the_limit(engine, monkeypatch, caplog, brief_pauses):
    serving = asyncio.ensure_future(outcomes(engine, [([1], SamplingParams(max_tokens=4000))]))
    await until(lambda: engine.stats().num_running, "running")
    monkeypatch.setattr(launcher, "WORKER", ("-c", EXITS))
    os.kill(engine.pid, signal.SIGKILL)
    [found] = await serving
    assert found[0][4] == "error" and "failed to start 5 times" in str(found[0][5])
    failed = [r for r in caplog.records if "could not be started again" in r.getMessage()]
    assert len(failed) == supervisor.MAX_LAUNCHES
    assert engine.stats().state == "failed" and not engine.stats().healthy
    with pytest.raises(EngineError, match="failed"):
        engine.submit([1], SamplingParams(), request_id="late")


async def test_launches_after_repeated_early_deaths_wait_longer(engine, monkeypatch):
    """Covers processes that connect and die before they output a token."""
    sleep, slept = asyncio.sleep, []

    async def recorded(seconds):
        if asyncio.current_task() is engine._supervisor.replacing:
            slept.append(seconds)
            seconds = 0.0
        await sleep(seconds)

    monkeypatch.setattr(supervisor.asyncio, "sleep", recorded)
    for useful in (False, False, True):
        if useful:
            await outcomes(engine, jobs(1))
        restarts = engine.num_restarts
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda before=restarts: engine.num_restarts > before, "a restart")
        await until(lambda: engine.stats().state == "ready", "ready again")
    assert slept == pytest.approx([0.2, 0.4, 0.0])


async def test_successors_can_be_killed_at_any_point_of_their_start(
    engine, monkeypatch, brief_pauses
):
    """Covers the time before a successor reads its configuration, when sending it fails."""
    popen, kills = launcher.subprocess.Popen, iter((0.0, None, 0.1, 0.3))

    def popen_and_kill(*args, **kwargs):
        process = popen(*args, **kwargs)
        after_s = next(kills, "never")
        if after_s is None:
            process.kill()
            process.wait()
        elif isinstance(after_s, float):
            threading.Timer(after_s, process.kill).start()
        return process

    work = jobs(12, seed=11)
    expected = await undisturbed(work)
    serving = asyncio.ensure_future(outcomes(engine, work))
    await until(lambda: engine.stats().steps > 5, "steps")
    monkeypatch.setattr(launcher.subprocess, "Popen", popen_and_kill)
    os.kill(engine.pid, signal.SIGKILL)
    assert await serving == expected
    await until(lambda: engine.stats().state == "ready", "ready again")
    assert next(kills, "none") == "none"


@pytest.mark.parametrize("place", ["introduce", "connect", "connected", "receive", "died"])
async def test_error_during_recovery_ends_every_stream(engine, monkeypatch, caplog, place):
    """The failing task is not awaited, so the engine fails and the log has the traceback."""
    work = [([i], SamplingParams(max_tokens=4000)) for i in range(3)]
    serving = asyncio.ensure_future(outcomes(engine, work))
    await until(lambda: engine.stats().num_running, "running")

    def planted(*_):
        raise ZeroDivisionError("planted")

    if place == "connect":
        monkeypatch.setattr(engine._supervisor, "_connect", planted)
    else:
        hooks = dataclasses.replace(engine._supervisor.hooks, **{place: planted})
        monkeypatch.setattr(engine._supervisor, "hooks", hooks)
    os.kill(engine.pid, signal.SIGKILL)
    for found in await serving:
        assert found[0][4] == "error" and isinstance(found[0][5], EngineError)
    assert engine.stats().state == "failed" and not engine.stats().healthy
    assert any(r.exc_info and r.exc_info[0] is ZeroDivisionError for r in caplog.records)
    assert not engine.streams and not engine._journal


@pytest.mark.parametrize("place", ["_connect_first", "_watch"])
async def test_supervisor_task_failure_ends_the_streams(monkeypatch, caplog, place):
    async def planted(*_):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Supervisor, place, planted)
    engine = EngineProcess.fake()
    engine.start()
    try:
        [found] = await outcomes(engine, [([1], SamplingParams(max_tokens=4000))])
        assert found[0][4] == "error" and "ZeroDivisionError" in str(found[0][5])
        assert engine.stats().state == "failed"
        assert any(r.exc_info and r.exc_info[0] is ZeroDivisionError for r in caplog.records)
    finally:
        await engine.stop()


async def test_stop_ends_a_starting_successor(engine, monkeypatch):
    """The stop must not wait for the successor's load, which may take minutes."""
    monkeypatch.setattr(launcher, "WORKER", ("-c", LOADS_FOR_EVER))
    births = []
    started = PendingLaunch.started
    monkeypatch.setattr(
        PendingLaunch,
        "started",
        lambda self, process: (births.append(process), started(self, process)),
    )
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: births, "a successor")
    async with asyncio.timeout(WAIT_S):
        await engine.stop()
    assert engine.stats().state == "stopped" and births[0].returncode == -signal.SIGKILL


async def test_crash_during_a_drain_only_pauses_it(engine):
    work = [([1, 2, 3], SamplingParams(max_tokens=1000, seed=1, ignore_eos=True))]
    serving = asyncio.ensure_future(outcomes(engine, work))
    await until(lambda: engine.stats().num_running, "running")
    stopping = asyncio.ensure_future(engine.stop(drain_s=WAIT_S))
    await until(lambda: engine.stats().state == "stopping", "stopping")
    os.kill(engine.pid, signal.SIGKILL)
    assert await serving == await undisturbed(work)
    await stopping
    assert engine.num_restarts == 1


# ---- frozen engine processes ------------------------------------------------------------


async def frozen_and_replaced(engine: EngineProcess, work, freeze) -> None:
    expected = await undisturbed(work)
    serving = asyncio.ensure_future(outcomes(engine, work))
    await until(lambda: engine.stats().steps > 10, "steps")
    assert not serving.done()
    engine._supervisor.watchdog.timeout_s = 3.0  # applies to this process; a start may take longer
    freeze()
    assert await serving == expected
    assert engine.num_restarts >= 1
    await until(lambda: engine.stats().state == "ready", "ready again")


async def test_stopped_process_is_replaced_and_its_streams_continue(caplog):
    engine = EngineProcess.fake(step_time_s=0.02)
    engine.start()
    try:
        pid = engine.pid
        await frozen_and_replaced(engine, jobs(12, 7), lambda: os.kill(pid, signal.SIGSTOP))
        assert "the engine process has sent nothing for" in caplog.text
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        await engine.stop()


async def test_hanging_step_gets_its_live_process_replaced(monkeypatch, tmp_path, caplog):
    code = HANGS.format(marker=str(tmp_path / "has hung"))
    monkeypatch.setattr(launcher, "WORKER", ("-c", code))
    engine = EngineProcess.fake(step_time_s=0.01)
    engine.start()
    try:
        await frozen_and_replaced(engine, jobs(12, 8), lambda: None)
        assert "the engine process has completed no step for" in caplog.text
        assert (tmp_path / "has hung").exists()
    finally:
        await engine.stop()


@pytest.mark.parametrize(
    ("worker", "message"),
    [(HOLDS_ITS_BREATH, "has sent nothing for"), (LOADS_FOR_EVER, "did not become ready within")],
    ids=["frozen", "loading"],
)
async def test_successor_that_hangs_at_start_is_replaced(
    worker, message, monkeypatch, caplog, brief_pauses
):
    engine = EngineProcess.fake(step_time_s=0.002)
    engine.start()
    successors = engine._supervisor.launcher
    right = launcher.WORKER, successors.start, successors.limit_s
    try:
        [job] = jobs(1, seed=9)
        monkeypatch.setattr(launcher, "WORKER", ("-c", worker))
        if worker == LOADS_FOR_EVER:
            successors.limit_s = 3.0
        else:
            config = EngineConfig.from_options(engine_timeout_s=1.0)
            successors.start = msgspec.structs.replace(successors.start, config=config)
        os.kill(engine.pid, signal.SIGKILL)
        serving = asyncio.ensure_future(outcomes(engine, [job]))
        await until(lambda: message in caplog.text, message)
        assert engine.stats().state == "recovering"
        monkeypatch.setattr(launcher, "WORKER", right[0])
        successors.start, successors.limit_s = right[1:]
        assert await serving == await undisturbed([job])
    finally:
        await engine.stop()


def test_timeout_has_a_range():
    for wrong in (-1.0, 0.5, float("nan"), 1e9):
        with pytest.raises(ConfigError, match="engine_timeout_s must be from 1 to 86400 seconds"):
            EngineConfig.from_options(engine_timeout_s=wrong)
    assert EngineConfig.from_options(engine_timeout_s=0.0).parallel.engine_timeout_s == 0.0


# ---- adapter loads during a process death --------------------------------------------

# A fake engine with adapters that records each load; one adapter kills it.
TAKES_ADAPTERS = """
import os
from forge_jax.engine import fake
from forge_jax.engine.adapters import Adapters, LoadedAdapter
from forge_jax.engine.process import worker

def install(ref, path, run):
    if path == "deadly":
        os.kill(os.getpid(), 9)
    with open({notes!r}, "a") as notes:
        print(os.getpid(), ref.name, file=notes)
    return LoadedAdapter(ref=ref, path=path, digest="", rank=1)

assemble = fake.assemble_fake

def assemble_with_adapters(*args, **options):
    parts = assemble(*args, **options)
    parts.adapters = Adapters(2, install)
    return parts

fake.assemble_fake = assemble_with_adapters
worker.main()
"""


@pytest.fixture
async def with_adapters(monkeypatch, tmp_path):
    """Return an engine, and a function that returns the names its current process has loaded."""
    notes = tmp_path / "loaded"
    notes.touch()
    monkeypatch.setattr(launcher, "WORKER", ("-c", TAKES_ADAPTERS.format(notes=str(notes))))
    engine = EngineProcess.fake()
    engine.start()

    def loaded() -> list[str]:
        lines = [line.split() for line in notes.read_text().splitlines()]
        return [name for pid, name in lines if int(pid) == engine.pid]

    yield engine, loaded
    await engine.stop()


async def test_adapter_load_interrupted_by_a_crash_can_be_retried(with_adapters):
    engine, loaded = with_adapters
    await engine.load_lora("first", "good")
    with pytest.raises(OverloadedError, match="load the adapter again"):
        await engine.load_lora("second", "deadly")
    assert [adapter.name for adapter in engine.loras] == ["first"]
    await engine.load_lora("second", "good")
    assert engine.num_restarts == 1 and loaded() == ["first", "second"]
    await engine.unload_lora("second")
    await engine.stop()
    with pytest.raises(EngineError, match="it is stopped"):
        await engine.load_lora("second", "good")


async def test_adapter_loaded_just_before_a_crash_is_in_the_next_process(
    with_adapters, monkeypatch, caplog
):
    """The process confirms the load and dies before the loading thread records it."""
    engine, loaded = with_adapters
    answered, may_go_on = threading.Event(), threading.Event()
    install = engine.adapters._install

    def slow_install(*args):
        adapter = install(*args)
        answered.set()
        may_go_on.wait(WAIT_S)
        return adapter

    monkeypatch.setattr(engine.adapters, "_install", slow_install)
    loading = asyncio.ensure_future(engine.load_lora("late", "good"))
    await until(answered.is_set, "the answer of the process")
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: "Restarting it for" in caplog.text, "the end of the process")
    await asyncio.sleep(0.2)
    may_go_on.set()
    await loading
    await until(lambda: engine.stats().state == "ready", "ready again")
    assert [adapter.name for adapter in engine.loras] == loaded() == ["late"]


# ---- messages ------------------------------------------------------------------------------------


def test_messages_survive_any_split():
    params = SamplingParams(stop=("a", "b"), logit_bias={3: 1.5}, seed=2**63, n=2)
    request = Request(
        request_id="ü", prompt_token_ids=(1, 2), params=params, seed=2**64 - 1, outputs={1: (5, 6)}
    )
    sent = [
        Start(EngineConfig.from_options(model="x", max_num_seqs=3, kv_dtype="fp8")),
        Submit(request),
        Abort("b"),
    ]
    data = b"".join(frame(message) for message in sent)
    rng = random.Random(0)
    for _ in range(50):
        frames, found, start = Frames(), [], 0
        while start < len(data):
            end = start + rng.choice((1, 2, 3, 50, 5000))
            found += decoded(frames, data[start:end], to_engine)
            start = end
        assert [type(message) for message in found] == [Start, Submit, Abort]
        assert found[0] == sent[0] and found[2] == sent[2]
        assert found[1].request.params == params and found[1].request.outputs == {1: [5, 6]}


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        (3).to_bytes(4, "big") + b"abc",
        frame(Abort("a")).replace(b"abort", b"abirt"),
        (1).to_bytes(4, "big") + b"\xc1",
    ],
)
def test_invalid_message_is_rejected(data):
    with pytest.raises(ValueError):
        list(decoded(Frames(), data, to_engine))


def test_process_does_not_outlive_its_parent():
    """Covers a killed parent: the operating system closes its end of the connection."""
    import subprocess
    import sys

    code = (
        "import time\n"
        "from forge_jax.engine.process.client import EngineProcess\n"
        "print(EngineProcess.fake().pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    for _ in range(int(WAIT_S * 100)):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        # In a container without an init process, it stays as a zombie.
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                return
        time.sleep(0.01)
    raise AssertionError("it lives on")
