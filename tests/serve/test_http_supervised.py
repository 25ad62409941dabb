"""Failures in the server outside its handlers: a state or an error, and a log line."""

from __future__ import annotations

import asyncio
import logging

import pytest

from forge_jax.engine.thread import Engine
from forge_jax.errors import RequestError
from forge_jax.host import supervise
from forge_jax.testing import core_of
from forge_serve.config import ServerConfig
from forge_serve.generation import generation
from forge_serve.http import memory
from forge_serve.http.memory import MemoryGuard
from forge_serve.server import profiles
from forge_serve.telemetry import engine_view
from forge_serve.telemetry.request_log import RequestLog

LONG = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
PROMPTS = {"prompt": ["a", "b"], "max_tokens": 9, "ignore_eos": True}
WAIT_S = 60.0


class Planted(Exception):
    pass


def planted(*_):
    raise Planted("planted")


async def planted_soon(*_):
    raise Planted("planted")


async def logged(caplog) -> None:
    """Wait for the planted exception's traceback."""
    async with asyncio.timeout(WAIT_S):
        while not any(
            record.levelno == logging.ERROR and record.exc_info and record.exc_info[0] is Planted
            for record in caplog.records
        ):
            await asyncio.sleep(0.001)


async def test_failure_of_an_essential_part_fails_the_server(server, caplog):
    supervise.start_task(planted_soon(), "a part", server.service.fail)
    await logged(caplog)
    assert await server.get("/health") == (503, {"status": "failed"})


async def test_memory_guard_survives_failed_readings(monkeypatch, caplog):
    monkeypatch.setattr(memory, "CHECK_S", 0.0)
    answers = iter([Planted("planted"), Planted("planted"), 0.99])
    shed = asyncio.Event()

    def in_use() -> float:
        answer = next(answers, 0.5)
        if isinstance(answer, Planted):
            raise answer
        return answer

    guard = MemoryGuard(0.9, lambda: shed.set() or True, in_use)
    watching = supervise.start_task(guard.watch(), "watching the host's memory", None)
    async with asyncio.timeout(WAIT_S):
        await shed.wait()
    watching.cancel()
    assert guard.num_shed == 1
    failures = [r for r in caplog.records if "cannot read the host's memory" in r.getMessage()]
    assert len(failures) == 1  # one line for consecutive failures


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["_expire", "_deliver_gathered", "_account"])
async def test_failing_callback_ends_its_request(server, place, stream, monkeypatch, caplog):
    monkeypatch.setattr(generation.Generation, place, planted)
    body = {**PROMPTS, "max_tokens": 900, "timeout": 1e-6} if place == "_expire" else PROMPTS
    async with asyncio.timeout(WAIT_S):
        async with server.http.post(
            server.url + "/v1/completions", json={**body, "stream": stream}
        ) as response:
            answer = await response.text()
    assert response.status == (200 if stream else 500) and "internal_error" in answer
    await logged(caplog)
    await server.idle()


async def test_background_response_ends_even_if_its_log_line_fails(server, monkeypatch, caplog):
    end = RequestLog.end

    def end_or_fail(self, status):
        if self.goes_on:
            planted()
        end(self, status)

    monkeypatch.setattr(RequestLog, "end", end_or_fail)
    body = {"input": "a", "max_output_tokens": 5, "background": True}
    _, made = await server.post("/v1/responses", body)
    await logged(caplog)
    _, found = await server.get(f"/v1/responses/{made['id']}")
    assert found["status"] in ("completed", "incomplete")


async def test_failed_look_without_a_waiter_is_logged(server, monkeypatch, caplog):
    gone = asyncio.Event()

    async def look_and_fail():
        await gone.wait()
        planted()

    monkeypatch.setattr(server.engine, "look", look_and_fail)
    monkeypatch.setattr(engine_view, "LONGEST_S", 0.001)
    assert (await server.get("/engine_state"))[0] == 503
    gone.set()
    await logged(caplog)


async def test_failed_write_of_a_timed_out_profile_is_logged(tmp_path, caplog):
    class Broken:
        async def start_profile(self, folder):
            pass

        async def stop_profile(self):
            planted()

    taken = profiles.Profiles(str(tmp_path), longest_s=0.0)
    await taken.start(Broken())
    await logged(caplog)
    with pytest.raises(RequestError, match="no profile is running"):
        await taken.stop(Broken())


async def test_failed_profile_of_a_disconnected_client_is_logged(tmp_path, caplog):
    begun, gone = asyncio.Event(), asyncio.Event()

    class Broken:
        async def start_profile(self, folder):
            begun.set()
            await gone.wait()
            planted()

    taken = profiles.Profiles(str(tmp_path))
    client = asyncio.ensure_future(taken.start(Broken()))
    await begun.wait()
    client.cancel()
    await asyncio.wait([client])
    gone.set()
    await logged(caplog)


async def test_engine_thread_failure_fails_the_server(start, monkeypatch, caplog):
    engine = Engine.fake(step_time_s=0.001)
    server = await start(engine, ServerConfig())
    answer = asyncio.ensure_future(server.post("/v1/completions", LONG))
    async with asyncio.timeout(WAIT_S):
        while not engine.stats().num_running:
            await asyncio.sleep(0.001)
    monkeypatch.setattr(core_of(engine), "tick", planted)
    status, error = await answer
    assert status == 503 and error["error"]["code"] == "engine_unavailable"
    assert await server.get("/health") == (503, {"status": "failed"})
    await logged(caplog)
