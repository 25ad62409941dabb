"""Supervision: background work cannot fail silently, and no other code starts any."""

from __future__ import annotations

import ast
import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from forge_jax import SamplingParams
from forge_jax.config import EngineConfig
from forge_jax.engine.commands import Abort, Stop
from forge_jax.engine.process import launcher
from forge_jax.engine.process.client import EngineProcess
from forge_jax.engine.process.messages import Start
from forge_jax.engine.streams import WaitingQueue
from forge_jax.engine.thread import Engine
from forge_jax.errors import EngineError, RequestError
from forge_jax.host import supervise
from forge_jax.testing import core_of

ROOT = Path(__file__).parent.parent
PACKAGES = [ROOT / "forge_jax", ROOT / "serve" / "forge_serve", ROOT / "kernels" / "forge_kernels"]

# Calls that start work which need not be awaited.
STARTS = {
    "create_task", "ensure_future", "Thread", "Timer", "start_new_thread", "run_in_executor",
    "ThreadPoolExecutor", "ProcessPoolExecutor", "add_done_callback", "call_soon", "call_later",
    "call_at", "call_soon_threadsafe", "run_coroutine_threadsafe", "add_signal_handler",
}  # fmt: skip
# (file, call) -> how its exceptions are handled.
ALLOWED = {
    ("forge_jax/tools/doctor/checks.py", "ThreadPoolExecutor"): "each future's result is read",
    ("forge_jax/engine/preparation.py", "ThreadPoolExecutor"): "its one future is watched",
    ("forge_jax/grammar/compiler.py", "ThreadPoolExecutor"): "futures are awaited, or watched",
    ("forge_jax/grammar/matcher.py", "ThreadPoolExecutor"): "its results are read",
    ("forge_jax/step/executables.py", "ThreadPoolExecutor"): "futures are read by their names",
    ("forge_jax/step/executables.py", "add_done_callback"): "the callback is guarded",
    ("forge_jax/engine/streams.py", "call_soon"): "the callback is guarded",
    ("forge_jax/engine/streams.py", "call_soon_threadsafe"): "guarded, or `fail`, which catches",
    ("forge_jax/engine/process/calls.py", "run_coroutine_threadsafe"): "its result is read",
    ("forge_jax/engine/process/group.py", "ThreadPoolExecutor"): "each future's result is read",
    ("forge_jax/engine/process/group.py", "run_coroutine_threadsafe"): "its result is read",
    ("forge_jax/engine/process/worker.py", "call_soon_threadsafe"): "guarded: it ends the process",
    ("forge_jax/engine/process/worker.py", "call_later"): "guarded: it ends the process",
    ("kernels/forge_kernels/cpu/build.py", "ThreadPoolExecutor"): "its results are read",
    ("kernels/forge_kernels/threads.py", "ThreadPoolExecutor"): "its results are read",
    ("serve/forge_serve/batch/run.py", "create_task"): "of a TaskGroup, which raises",
    ("serve/forge_serve/batch/run.py", "add_done_callback"): "counts, and awakes",
    ("serve/forge_serve/batch/run.py", "add_signal_handler"): "cancels a task",
    ("serve/forge_serve/bench/client.py", "create_task"): "of a TaskGroup, which raises",
    ("serve/forge_serve/http/sse.py", "call_at"): "a comment that fails costs no event",
    ("serve/forge_serve/generation/generation.py", "call_soon"): "the callback is guarded",
    ("serve/forge_serve/generation/generation.py", "call_later"): "the callback is guarded",
    ("serve/forge_serve/cli/chat/markdown.py", "call_later"): "the callback is guarded",
    ("serve/forge_serve/responses_api/websocket.py", "call_later"): "the callback is guarded",
    ("serve/forge_serve/responses_api/websocket.py", "add_done_callback"): "forgets responses",
    ("serve/forge_serve/integrations/ray_routing.py", "add_done_callback"): "forgets a request",
    ("serve/forge_serve/generation/workers.py", "ThreadPoolExecutor"): "the future is awaited",
    ("serve/forge_serve/generation/workers.py", "add_done_callback"): "gives the thread back",
    ("serve/forge_serve/generation/workers.py", "call_soon_threadsafe"): "gives the thread back",
    ("serve/forge_serve/server/follower.py", "add_signal_handler"): "sets an event",
    ("serve/forge_serve/server/process.py", "call_later"): "ends the process",
    (
        "serve/forge_serve/server/process.py",
        "add_signal_handler",
    ): "arms the timer that ends the process",
    (
        "serve/forge_serve/integrations/inspect/provider.py",
        "Thread",
    ): "runs an event loop until `close` joins it",
    (
        "serve/forge_serve/integrations/inspect/provider.py",
        "create_task",
    ): "requests await the load",
    (
        "serve/forge_serve/integrations/inspect/provider.py",
        "run_coroutine_threadsafe",
    ): "futures are awaited",
    (
        "serve/forge_serve/integrations/inspect/provider.py",
        "call_soon_threadsafe",
    ): "stops the loop",
}


def started(source: str) -> set[str]:
    """Return the calls in `STARTS` that a module makes, by their written name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found |= {name} & STARTS
    return found


def test_nothing_is_started_without_supervision():
    found = {
        (file.relative_to(ROOT).as_posix(), name)
        for package in PACKAGES
        for file in package.rglob("*.py")
        if file.name != "supervise.py"
        for name in started(file.read_text())
    }
    assert not found - ALLOWED.keys(), "start it with forge_jax.host.supervise"
    assert not ALLOWED.keys() - found, "these are gone: take them off the list"


def test_check_detects_unsupervised_starts():
    source = "loop.create_task(f())\nThread(target=f)\nasyncio.get_running_loop().call_soon(f)"
    assert started(source) == {"create_task", "Thread", "call_soon"}


# ---- the helper ----------------------------------------------------------------------------------


class Planted(Exception):
    pass


def planted(*_: Any, **__: Any) -> Any:
    raise Planted("planted")


async def planted_soon(*_: Any, **__: Any) -> Any:
    await asyncio.sleep(0)
    raise Planted("planted")


def tracebacks(caplog: pytest.LogCaptureFixture) -> int:
    return sum(
        record.levelno == logging.ERROR and bool(record.exc_info) and record.exc_info[0] is Planted
        for record in caplog.records
    )


async def turns(condition: Callable[[], Any] = lambda: False, number: int = 5000) -> None:
    """Let the event loop turn until a condition is true."""
    for _ in range(number):
        if condition():
            return
        await asyncio.sleep(0.001 if number > 10 else 0)


async def test_task_error_reaches_its_owner_and_the_log(caplog):
    errors = []
    supervise.start_task(planted_soon(), "a task", errors.append)
    await turns(lambda: errors)
    assert isinstance(errors[0], Planted) and tracebacks(caplog) == 1
    assert "a task failed: Planted: planted" in caplog.text
    assert not supervise._tasks


async def test_cancellation_and_expected_errors_are_not_failures(caplog):
    errors = []
    task = supervise.start_task(asyncio.sleep(600), "a task", errors.append)
    await asyncio.sleep(0)
    task.cancel()
    other = supervise.start_task(planted_soon(), "a task", errors.append, expected=(Planted,))
    with pytest.raises(Planted):
        await other
    await turns(number=5)
    assert task.cancelled() and not errors and not caplog.records


async def test_task_is_referenced_until_it_ends():
    """The event loop keeps only a weak reference."""
    import gc

    arrived = asyncio.Event()

    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    task = supervise.start_task(wait(), "a task", None)
    task.add_done_callback(lambda _: arrived.set())
    name = task.get_name()
    del task
    gc.collect()
    [held] = [task for task in supervise._tasks if task.get_name() == name]
    held.cancel()
    await arrived.wait()


def test_thread_error_reaches_its_owner_and_the_log(caplog):
    errors: list[BaseException] = []
    supervise.start_thread(planted, "a thread", errors.append).join()
    supervise.start_thread(lambda: exec("raise SystemExit(3)"), "a thread", errors.append).join()
    assert [type(error) for error in errors] == [Planted, SystemExit] and tracebacks(caplog) == 1


async def test_thread_result_or_error_is_awaited():
    assert await supervise.in_thread(lambda: 5, "a thread") == 5
    with pytest.raises(Planted):
        await supervise.in_thread(planted, "a thread")


def test_thread_error_after_its_loop_closed_is_logged(caplog):
    import threading

    begun, closed = threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        closed.wait(60)
        planted()

    async def start() -> None:
        supervise.in_thread(fail, "a thread")
        await asyncio.to_thread(begun.wait)

    before = threading.active_count()
    asyncio.run(start())
    closed.set()
    for thread in threading.enumerate():
        if thread.name == "a thread":
            thread.join()
    assert tracebacks(caplog) == 1 and threading.active_count() <= before


def test_callback_and_future_errors_reach_their_owner_and_the_log(caplog):
    errors: list[BaseException] = []
    supervise.guarded(planted, "a callback", errors.append)()
    future: Future[None] = Future()
    supervise.watch(future, "a future", errors.append)
    future.set_exception(Planted("planted"))
    assert len(errors) == 2 and tracebacks(caplog) == 2


def test_failing_owner_is_logged(caplog):
    supervise.guarded(planted, "a callback", planted)()
    assert tracebacks(caplog) == 2 and "the error handler failed" in caplog.text


# ---- the engine ----------------------------------------------------------------------------------

LONG = SamplingParams(max_tokens=4000, ignore_eos=True)


async def end_of(stream) -> Any:
    async with asyncio.timeout(60):
        return [delta async for deltas in stream for delta in deltas][-1]


@pytest.fixture
async def engine():
    engine = Engine.fake(step_time_s=0.001)
    engine.start()
    yield engine
    await engine.stop()


@pytest.mark.parametrize("place", ["tick", "abort", "drain"])
async def test_error_in_the_engine_thread_fails_the_engine(engine, place, monkeypatch, caplog):
    stream = engine.submit([1], LONG, request_id="a")
    await anext(stream)
    monkeypatch.setattr(core_of(engine), place, planted)
    engine._thread.send(Stop() if place == "drain" else Abort("somebody"))
    end = await end_of(stream)
    assert end.finish_reason == "error" and isinstance(end.error, EngineError)
    assert engine.stats().state == "failed" and not engine.stats().healthy
    assert tracebacks(caplog) == 1


async def test_failed_update_delivery_fails_the_engine(engine, monkeypatch, caplog):
    streams = [engine.submit([1], LONG, request_id=name) for name in "ab"]
    monkeypatch.setattr(WaitingQueue, "pop", planted)
    for stream in streams:
        end = await end_of(stream)
        assert end.finish_reason == "error" and isinstance(end.error, EngineError)
    assert engine.stats().state == "failed" and tracebacks(caplog) >= 1
    await turns(lambda: not engine.stats().num_used_blocks)
    assert not engine.stats().num_used_blocks  # they are no longer computed


async def test_failing_reader_does_not_withhold_the_end_from_others(engine, caplog):
    first, second = (engine.submit([1], LONG, request_id=name) for name in "ab")
    first.push_to(lambda deltas: planted() if deltas[-1].finish_reason else None)
    await anext(second)
    engine._fail(ValueError("planted"))
    end = await end_of(second)
    assert end.finish_reason == "error" and tracebacks(caplog) == 1


async def test_grammar_compilation_error_ends_its_request(engine, monkeypatch, caplog):
    from forge_jax.grammar import GrammarSpec

    monkeypatch.setattr(engine.grammars, "compile_soon", planted_soon)
    params = SamplingParams(structured_outputs=GrammarSpec("regex", "a+"))
    end = await end_of(engine.submit([1], params, request_id="a"))
    assert end.finish_reason == "error" and "could not be compiled" in str(end.error)
    assert not len(engine._preparation) and tracebacks(caplog) == 1
    assert engine.stats().state == "ready"


async def test_abandoned_compilation_error_is_logged(engine, monkeypatch, caplog):
    import threading

    from forge_jax.grammar import GrammarSpec

    begun, go_on = threading.Event(), threading.Event()

    def compile_and_fail(spec):
        begun.set()
        go_on.wait(60)
        planted()

    monkeypatch.setattr(engine.grammars, "_compile", compile_and_fail)
    params = SamplingParams(structured_outputs=GrammarSpec("regex", "a+"))
    stream = engine.submit([1], params, request_id="a")
    await asyncio.to_thread(begun.wait)
    stream.abort()
    assert (await end_of(stream)).finish_reason == "abort"
    await turns(number=5)
    go_on.set()
    await turns(lambda: tracebacks(caplog))
    assert tracebacks(caplog) == 1


def test_executable_adoption_error_is_logged(caplog):
    from forge_jax.step.executables import Executables

    executables = Executables()
    future: Future[Any] = Future()
    executables._futures["step"] = future
    executables.on_done("step", planted)
    future.set_result(None)
    assert tracebacks(caplog) == 1
    executables.close()


async def test_pooling_compilation_error_ends_its_request(engine, caplog):
    class Pooler:
        can_pool = False
        compile_pooling = staticmethod(planted)

    engine._parts.pooler = Pooler()
    params = SamplingParams(max_tokens=0, detokenize=False)
    end = await end_of(engine.submit([1], params, request_id="a", pooling="mean"))
    assert end.finish_reason == "error" and tracebacks(caplog) == 2


# ---- the engine process --------------------------------------------------------------------------

DIES = """
from forge_jax.engine.process import worker

def planted(*_, **__):
    raise ZeroDivisionError("planted")

{plant}
worker.main()
"""


@pytest.mark.parametrize(
    "plant",
    [
        "worker._Worker._begin = planted",
        "worker._Worker._load = planted",
        "worker._Worker._tell_of_life = planted",
    ],
)
def test_error_in_a_starting_process_fails_the_start(plant, monkeypatch, capfd):
    monkeypatch.setattr(launcher, "WORKER", ("-c", DIES.format(plant=plant)))
    with pytest.raises(EngineError, match="before it could serve"):
        launcher.launch(Start(EngineConfig(), fake=True))
    assert "ZeroDivisionError: planted" in capfd.readouterr().err


ONCE = """
import os
from forge_jax.engine.process import worker

right = worker._Worker.{place}

def fail_once(self):
    if not os.path.exists({marker!r}):
        open({marker!r}, "w").close()
        raise ZeroDivisionError("planted")
    right(self)

worker._Worker.{place} = fail_once
worker.main()
"""


@pytest.mark.parametrize("place", ["_send_news", "_tell_stats"])
async def test_one_error_in_a_process_costs_no_token(place, monkeypatch, tmp_path, capfd):
    code = ONCE.format(place=place, marker=str(tmp_path / "has failed"))
    monkeypatch.setattr(launcher, "WORKER", ("-c", code))
    engine = EngineProcess.fake()
    engine.start()
    try:
        params = SamplingParams(max_tokens=50, ignore_eos=True, seed=1)
        async with asyncio.timeout(60):
            tokens = [
                token
                async for deltas in engine.submit([1], params, request_id="a")
                for delta in deltas
                for token in delta.token_ids
            ]
        assert len(tokens) == 50 and engine.num_restarts == 1
        assert "ZeroDivisionError: planted" in capfd.readouterr().err
    finally:
        await engine.stop()


@pytest.mark.parametrize("place", ["look", "start_profile"])
async def test_error_of_a_call_into_a_process_reaches_the_caller(place, monkeypatch, tmp_path):
    plant = f"worker.Engine.{place} = planted"
    monkeypatch.setattr(launcher, "WORKER", ("-c", DIES.format(plant=plant)))
    engine = EngineProcess.fake()
    engine.start()
    try:
        await engine._supervisor.settled()
        with pytest.raises((EngineError, RequestError), match="ZeroDivisionError"):
            async with asyncio.timeout(60):
                await (engine.look() if place == "look" else engine.start_profile(tmp_path))
        assert engine.stats().state == "ready" and engine.num_restarts == 0
    finally:
        await engine.stop()
