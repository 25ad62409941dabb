"""POST /start_profile and /stop_profile: disabled by default, and protected like other routes."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from forge_jax.engine.process.client import EngineProcess
from forge_jax.engine.thread import Engine
from forge_jax.errors import RequestError
from forge_jax.tools.profile.trace import read_traces
from forge_serve.config import ServerConfig
from forge_serve.server.process import drain
from forge_serve.server.profiles import Profiles

BODY = {"prompt": "a dog", "max_tokens": 8, "ignore_eos": True}


async def test_profiles_are_disabled_without_a_folder(server):
    for path in ("/start_profile", "/stop_profile"):
        status, answer = await server.post(path, b"")
        assert status == 404 and answer["error"]["code"] == "profiles_off"
        assert "--profile-dir" in answer["error"]["message"]


@pytest.mark.parametrize("in_process", [False, True])
async def test_running_server_is_profiled(start, tmp_path, in_process):
    kind = EngineProcess if in_process else Engine
    engine = await asyncio.to_thread(kind.fake)
    server = await start(engine, ServerConfig(profile_dir=str(tmp_path)))
    status, begun = await server.post("/start_profile", b"")
    assert status == 200
    status, _ = await server.post("/v1/completions", BODY)
    assert status == 200
    status, answer = await server.post("/start_profile", b"")
    assert status == 400 and "/stop_profile" in answer["error"]["message"]
    assert await server.post("/stop_profile", b"") == (200, begun)
    [trace] = read_traces(tmp_path)
    assert trace.name == begun["profile"]
    assert trace.steps >= 8 and trace.phases["deliver"].count  # one delivery may hold several steps
    assert {"schedule", "dispatch", "read", "commit", "text"} <= trace.phases.keys()
    status, answer = await server.post("/stop_profile", b"")
    assert status == 400 and "/start_profile" in answer["error"]["message"]


async def test_profiling_needs_a_key(start, tmp_path):
    server = await start(Engine.fake(), ServerConfig(profile_dir=str(tmp_path), api_key=("k",)))
    for path in ("/start_profile", "/stop_profile"):
        status, answer = await server.post(path, b"")
        assert status == 401 and answer["error"]["code"] == "invalid_api_key"
    assert not list(tmp_path.iterdir())


async def test_unusable_folder_is_reported_to_the_client(start, tmp_path):
    (tmp_path / "file").touch()
    server = await start(Engine.fake(), ServerConfig(profile_dir=str(tmp_path / "file")))
    status, answer = await server.post("/start_profile", b"")
    assert status == 400 and "cannot be written" in answer["error"]["message"]
    status, _ = await server.post("/stop_profile", b"")
    assert status == 400  # nothing started


async def test_disconnected_client_leaves_no_partial_profile(tmp_path):
    engine = Engine.fake()
    engine.start()
    profiles = Profiles(str(tmp_path), most=1)
    try:
        leaving = asyncio.ensure_future(profiles.start(engine))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        async with asyncio.timeout(20):
            name = None
            while name is None:
                with contextlib.suppress(RequestError):
                    name = await profiles.stop(engine)
                await asyncio.sleep(0.01)
        assert [folder.name for folder in tmp_path.iterdir()] == [name]
        with pytest.raises(RequestError, match="the folder already has 1 profiles"):
            await profiles.start(engine)
    finally:
        await engine.stop()


async def test_profile_is_written_when_the_server_stops(start, tmp_path):
    server = await start(Engine.fake(), ServerConfig(profile_dir=str(tmp_path)))
    status, _ = await server.post("/start_profile", b"")
    assert status == 200
    await drain(server.service, 0.0)
    assert read_traces(tmp_path)


async def test_unstopped_profile_ends_by_itself(tmp_path):
    engine = Engine.fake()
    engine.start()
    profiles = Profiles(str(tmp_path), longest_s=0.05)
    try:
        name = await profiles.start(engine)
        async with asyncio.timeout(20):
            while not list((tmp_path / name).rglob("*.xplane.pb")):
                await asyncio.sleep(0.01)
        again = await profiles.start(engine)
        assert again != name and await profiles.stop(engine) == again
    finally:
        await engine.stop()
