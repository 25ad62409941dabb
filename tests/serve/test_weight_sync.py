"""The endpoints for trainers: pauses, new weights from folders and shared memory, and sleep."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import Server, running
from safetensors.numpy import load_file, save_file

from forge_jax import Engine, EngineConfig
from forge_jax.errors import ConfigError
from forge_serve.config import ServerConfig

BODY = {"prompt": [5, 6, 7, 8, 9] * 8, "max_tokens": 24, "seed": 3, "ignore_eos": True}
LONG = {**BODY, "max_tokens": 200}
POSTS = (
    "/pause", "/resume", "/abort_requests", "/start_weight_update", "/update_weights",
    "/finish_weight_update", "/reset_prefix_cache", "/sleep", "/wake_up",
    "/init_weight_transfer_engine", "/init_communicator", "/update_named_param",
)  # fmt: skip
GETS = ("/is_paused", "/weight_info", "/get_world_size", "/is_sleeping")


@pytest.fixture
async def synced(start, tmp_path) -> Server:
    """Return a server on a slow fake device, with the endpoints."""
    engine = Engine.fake(step_time_s=0.002, max_model_len=1024)
    return await start(engine, ServerConfig(weight_sync_dir=str(tmp_path)))


async def text(server: Server, body: dict[str, Any] = BODY) -> str:
    status, answer = await server.post("/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["text"]


async def running_requests(server: Server, count: int) -> None:
    while len(server.engine.streams) < count or server.engine.streams.num_waiting:
        await asyncio.sleep(0.001)


async def rejection(server: Server, path: str, body: Any = b"") -> dict[str, Any]:
    status, answer = await server.post(path, body)
    assert status == 400, answer
    return answer["error"]


async def test_endpoints_are_disabled_by_default(server):
    for path in POSTS:
        status, answer = await server.post(path, {"update_info": {}})
        assert status == 404 and answer["error"]["code"] == "weight_sync_off", path
        assert "--weight-sync-dir" in answer["error"]["message"]
    for path in GETS:
        status, answer = await server.get(path)
        assert status == 404 and answer["error"]["code"] == "weight_sync_off", path


async def test_endpoints_need_a_key_if_there_are_keys(start, tmp_path):
    config = ServerConfig(weight_sync_dir=str(tmp_path), api_key=("k",))
    server = await start(Engine.fake(), config)
    for path in POSTS:
        status, answer = await server.post(path, b"")
        assert status == 401 and answer["error"]["code"] == "invalid_api_key", path
    for path in GETS:
        assert (await server.get(path))[0] == 401, path
    assert not server.engine.stats().paused


def test_flag_is_rejected_where_it_would_be_unsafe():
    for host in ("0.0.0.0", "192.0.2.1", "::", "example.org"):
        with pytest.raises(ConfigError, match="set --api-key-file, or listen on a loopback"):
            ServerConfig(weight_sync_dir="w", host=host)
        ServerConfig(weight_sync_dir="w", host=host, api_key=("k",))
    for host in ("127.0.0.1", "localhost", "::1"):
        ServerConfig(weight_sync_dir="w", host=host)
    with pytest.raises(ConfigError, match="cannot be combined with --engine-process"):
        ServerConfig(weight_sync_dir="w", engine_process=True)
    with pytest.raises(ConfigError, match="cannot be combined with --data-parallel"):
        ServerConfig(weight_sync_dir="w", data_parallel=2)
    with pytest.raises(ConfigError, match="must not be empty"):
        ServerConfig(weight_sync_dir="")


@pytest.mark.parametrize(("stop", "go"), [
    ("/pause?mode=keep", "/resume"),
    ("/sleep?level=1&mode=keep", "/wake_up?tags=kv_cache&tags=weights"),
])  # fmt: skip
async def test_kept_requests_continue_with_equal_tokens(synced, stop, go):
    alone = await text(synced, LONG)
    requests = [asyncio.create_task(text(synced, LONG)) for _ in range(2)]
    await running_requests(synced, 2)
    assert (await synced.post(stop, b""))[0] == 200
    requests.append(asyncio.create_task(text(synced, LONG)))  # waits
    await asyncio.sleep(0.05)
    assert not any(request.done() for request in requests)
    assert await synced.get("/is_paused") == (200, {"is_paused": True})
    assert await synced.get("/is_sleeping") == (200, {"is_sleeping": "sleep" in stop})
    assert await synced.get("/health") == (200, {"status": "ready"})
    async with synced.http.get(f"{synced.url}/metrics") as response:
        metrics = await response.text()
    assert 'forge:engine_paused{engine="0",model_name="forge-fake"} 1.0' in metrics
    sleeping = f"{float('sleep' in stop)}"
    assert f'forge:engine_sleeping{{engine="0",model_name="forge-fake"}} {sleeping}' in metrics
    assert (await synced.post(go, b""))[0] == 200
    assert await asyncio.gather(*requests) == [alone] * 3
    assert await synced.get("/is_paused") == (200, {"is_paused": False})


async def test_full_queue_rejects_requests_of_a_paused_server(start, tmp_path):
    limit = ServerConfig(weight_sync_dir=str(tmp_path), max_queued_requests=1)
    engine = Engine.fake()
    engine.streams.queue_limits = engine.streams._queue._limits = type(engine.streams.queue_limits)(
        samples=1
    )
    server = await start(engine, limit)
    await server.post("/pause?mode=keep", b"")
    waiting = asyncio.create_task(text(server))
    while not len(engine.streams):
        await asyncio.sleep(0.001)
    status, answer = await server.post("/v1/completions", BODY)
    assert status == 503 and answer["error"]["code"] == "overloaded"
    await server.post("/resume", b"")
    await waiting


async def test_aborting_pause_ends_requests_with_an_error(synced):
    for path, body in (
        ("/pause?mode=abort", b""),
        ("/pause", b""),
        ("/abort_requests", {}),
        ("/sleep", b""),
    ):
        request = asyncio.create_task(synced.post("/v1/completions", LONG))
        await running_requests(synced, 1)
        assert (await synced.post(path, body))[0] == 200
        status, answer = await request
        assert status == 503 and answer["error"]["code"] == "request_aborted"
        await synced.post("/wake_up", b"")
        await synced.post("/resume", b"")


async def test_requests_are_aborted_by_the_ids_of_requests_or_responses(synced):
    async def post(name: str) -> int:
        headers = {"X-Request-Id": name}
        url = f"{synced.url}/v1/completions"
        async with synced.http.post(url, json=LONG, headers=headers) as response:
            return response.status

    requests = [asyncio.create_task(post(name)) for name in ("a-1", "b-2", "c")]
    await running_requests(synced, 3)
    body = {"request_ids": ["a-1", "cmpl-b-2", "unknown"]}
    answer = await synced.post("/abort_requests", body)
    assert answer == (200, {"status": "aborted", "aborted": 2})
    assert await asyncio.gather(*requests) == [503, 503, 200]


async def test_waiting_pause_lets_requests_finish(synced):
    alone = await text(synced, LONG)
    request = asyncio.create_task(text(synced, LONG))
    await running_requests(synced, 1)
    assert await synced.post("/pause?mode=wait", b"") == (200, {"status": "paused"})
    assert await request == alone
    await synced.post("/resume", b"")
    assert await text(synced, LONG) == alone


async def test_invalid_requests_are_rejected_with_the_name_of_the_field(synced):
    assert (await rejection(synced, "/pause?mode=x"))["param"] == "mode"
    assert (await rejection(synced, "/sleep?level=3"))["param"] == "level"
    assert (await rejection(synced, "/sleep?level=x"))["param"] == "level"
    assert (await rejection(synced, "/wake_up?tags=x"))["param"] == "tags"
    assert (await rejection(synced, "/update_weights", b""))["param"] == "update_info"
    assert (
        "start_weight_update first"
        in (await rejection(synced, "/finish_weight_update", {"weight_version": 3}))["message"]
    )
    for body in ("[]", "null", "{", '{"update_info": 3}', '{"update_info": {"folder": 3}}'):
        await rejection(synced, "/update_weights", body.encode())
    for path in ("/init_weight_transfer_engine", "/init_communicator", "/update_named_param"):
        message = (await rejection(synced, path, {"init_info": {}}))["message"]
        assert "update_info.folder" in message and "update_info.shared_memory" in message
    nccl = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2]], "packed": True}
    assert "NCCL" in (await rejection(synced, "/update_weights", {"update_info": nccl}))["message"]
    ipc = {**nccl, "ipc_handles_pickled": "x"}
    assert "NCCL" in (await rejection(synced, "/update_weights", {"update_info": ipc}))["message"]
    assert synced.engine.stats().weight_version == 0 and not synced.engine.stats().paused


async def test_fake_device_reports_its_size_and_takes_no_weights(synced, tmp_path):
    info = {"weight_version": 0, "model": "forge-fake", "num_leaves": 0, "num_bytes": 0}
    assert await synced.get("/weight_info") == (200, info)
    assert await synced.get("/get_world_size") == (200, {"world_size": 1})
    (tmp_path / "new").mkdir()
    error = await rejection(synced, "/update_weights", {"update_info": {"folder": "new"}})
    assert "fake device" in error["message"]


# ---- a model ---------------------------------------------------------------------------------

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}


@asynccontextmanager
async def serving(model: Path, root: Path, dtype: str = "float32") -> AsyncIterator[Server]:
    config = EngineConfig.from_options(model=str(model), deterministic=True, dtype=dtype, **SIZES)
    engine = await asyncio.to_thread(Engine.load, config)
    async with running(engine, ServerConfig(weight_sync_dir=str(root))) as server:
        yield server


@pytest.fixture(scope="module")
def tensors(short_stories) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    stored = load_file(short_stories / "model.safetensors")
    return {
        n: (t + 0.05 * rng.normal(size=t.shape)).astype(ml_dtypes.bfloat16)
        for n, t in stored.items()
    }


@pytest.fixture(scope="module")
def root(short_stories, tensors, tmp_path_factory) -> Path:
    """Return a folder with the original weights in "original" and changed ones in "changed"."""
    root = tmp_path_factory.mktemp("weights")
    for name in ("original", "changed"):
        shutil.copytree(short_stories, root / name)
    save_file(tensors, root / "changed" / "model.safetensors")
    return root


@pytest.fixture(scope="module")
def segment(tensors) -> Iterator[dict[str, Any]]:
    """Yield the `update_info` of the changed weights in shared memory."""
    memory = shared_memory.SharedMemory(create=True, size=sum(t.nbytes for t in tensors.values()))
    table: dict[str, list[Any]] = {"names": [], "dtype_names": [], "shapes": [], "offsets": []}
    offset = 0
    for name, tensor in tensors.items():
        memory.buf[offset : offset + tensor.nbytes] = tensor.tobytes()
        row = (name, "torch.bfloat16", list(tensor.shape), offset)
        for column, value in zip(table.values(), row, strict=True):
            column.append(value)
        offset += tensor.nbytes
    yield {"shared_memory": memory.name, **table}
    memory.close()
    memory.unlink()


def part(info: dict[str, Any], rows: slice) -> dict[str, Any]:
    """Return some rows of a segment's table."""
    return {n: column if n == "shared_memory" else column[rows] for n, column in info.items()}


def changed(info: dict[str, Any], column: str, value: Any) -> dict[str, Any]:
    """Return a segment's table with another value in one column of the last row."""
    return {**info, column: [*info[column][:-1], value]}


@pytest.mark.slow
async def test_updated_server_equals_one_started_with_the_weights(root, segment):
    async with serving(root / "changed", root) as server:
        expected, expected_long = await text(server), await text(server, LONG)
    async with serving(root / "original", root) as server:
        before, fingerprint = await text(server), server.engine.system_fingerprint
        assert before != expected

        async def update(version: int, info: dict[str, Any], in_flight: str = "keep") -> None:
            body = {"update_info": info, "weight_version": version, "in_flight": in_flight}
            answer = await server.post("/update_weights", body)
            assert answer == (200, {"message": "Weights updated", "weight_version": version})

        for version, (info, wanted) in enumerate(
            [
                ({"folder": "changed"}, expected),
                ({"folder": "original"}, before),
                (segment, expected),
                ({"folder": "original/../original"}, before),
            ],
            start=3,
        ):
            await update(version, info)
            status, completion = await server.post("/v1/completions", BODY)
            assert status == 200 and completion["choices"][0]["text"] == wanted
            assert completion["system_fingerprint"] == f"{fingerprint}-w{version}"
            _, about = await server.get("/weight_info")
            assert about["weight_version"] == version and about["num_bytes"] > 0

        # In parts: nothing changes before the end.
        assert (await server.post("/start_weight_update", {}))[0] == 200
        for rows in (slice(0, 5), slice(5, None)):
            body = {"update_info": part(segment, rows)}
            answer = await server.post("/update_weights", body)
            assert answer == (200, {"message": "Weights collected", "weight_version": 6})
            assert await text(server) == before
        body = {"update_info": part(segment, slice(0, 1))}
        assert "already has some" in (await rejection(server, "/update_weights", body))["message"]
        assert (await server.post("/finish_weight_update", {"weight_version": "9"}))[0] == 200
        assert await text(server) == expected and server.engine.weight_version == 9

        # Dropped weights come with the next update.
        await server.post("/sleep?level=2", b"")
        assert "update_weights" in (await rejection(server, "/wake_up"))["message"]
        assert (await rejection(server, "/resume"))["message"].endswith("POST /wake_up")
        await server.post("/wake_up?tags=weights", b"")
        await update(10, {"folder": "original"})
        waiting = asyncio.create_task(text(server))
        assert await server.get("/is_sleeping") == (200, {"is_sleeping": True})
        assert await server.post("/wake_up?tags=kv_cache", b"") == (200, {"status": "awake"})
        assert await waiting == before

        # A restarted request returns only its last run. A stream cannot, and ends with an error.
        url = f"{server.url}/v1/completions"
        async with server.http.post(url, json={**LONG, "stream": True}) as stream:
            await stream.content.readline()
            whole = asyncio.create_task(server.post("/v1/completions", {**LONG, "n": 2}))
            await running_requests(server, 2)
            await update(11, {"folder": "changed"}, "restart")
            events = (await stream.read()).decode()
        status, completion = await whole
        assert status == 200 and completion["usage"]["completion_tokens"] == 2 * LONG["max_tokens"]
        assert completion["choices"][0]["text"] == expected_long
        last = json.loads(events.strip().rpartition("data: ")[2])
        assert last["error"]["code"] == "request_restarted"
        request = asyncio.create_task(server.post("/v1/completions", LONG))
        await running_requests(server, 1)
        await update(12, {"folder": "original"}, "abort")
        assert (await request)[0] == 503 and await text(server) == before
        assert server.engine.stats().compilations_after_ready == 0


@pytest.mark.slow
async def test_rejected_updates_change_nothing(root, segment, tmp_path):
    outside = shutil.copytree(root / "changed", tmp_path / "outside")
    (root / "link").symlink_to(outside)
    (root / "linked").mkdir()
    for file in outside.iterdir():
        (root / "linked" / file.name).symlink_to(file)
    other = shutil.copytree(root / "changed", root / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 77.0}))
    broken = shutil.copytree(root / "changed", root / "broken")
    stored = dict(load_file(broken / "model.safetensors"))
    del stored["model.norm.weight"]
    save_file(stored, broken / "model.safetensors")
    large = os.stat(Path("/dev/shm") / segment["shared_memory"]).st_size
    async with serving(root / "original", root) as server:
        before = await text(server)
        for info, complaint in [
            ({}, "NCCL"),
            ({"folder": "changed", **segment}, "not both"),
            ({"folder": "missing"}, "no such folder"),
            ({"folder": "."}, "no such folder"),
            ({"folder": "../weights"}, "no such folder"),
            ({"folder": str(outside)}, "no such folder"),
            ({"folder": "link"}, "a link to a place outside"),
            ({"folder": "linked"}, "a link to a place outside"),
            ({"folder": "a\0b"}, "no such folder"),
            ({"folder": "other"}, "rope"),
            ({"folder": "broken"}, "model.norm.weight"),
            ({**segment, "shared_memory": "missing"}, "no segment of this name"),
            ({**segment, "shared_memory": "../etc/passwd"}, "the name of a segment"),
            ({**segment, "shared_memory": ".."}, "the name of a segment"),
            ({**segment, "offsets": None}, "with one entry for each tensor"),
            (part(segment, slice(1, None)) | {"names": segment["names"]}, "one entry for each"),
            (changed(segment, "names", "unknown"), "model.norm.weight is missing"),
            (changed(segment, "names", segment["names"][0]), "appears twice"),
            (changed(segment, "dtype_names", "bfloat17"), "dtype_names must be float64"),
            (changed(segment, "dtype_names", "float64"), f"the segment has {large} bytes"),
            (changed(segment, "shapes", [7]), "shape"),
            (changed(segment, "shapes", [-1]), "at least 0"),
            (changed(segment, "shapes", [2**62, 2**62]), f"the segment has {large} bytes"),
            (changed(segment, "offsets", 0), "overlap"),
            (changed(segment, "offsets", -2), "negative"),
            (changed(segment, "offsets", large), f"the segment has {large} bytes"),
            (part(segment, slice(1, None)), segment["names"][0]),
        ]:
            error = await rejection(server, "/update_weights", {"update_info": info})
            assert complaint in error["message"] and str(root) not in error["message"], error
            assert error["param"].startswith("update_info")
        for fields in ({"weight_version": 0}, {"in_flight": "x"}):
            body = {"update_info": {"folder": "changed"}, **fields}
            assert (await rejection(server, "/update_weights", body))["param"] == next(iter(fields))
        await server.post("/start_weight_update", b"")
        assert (await rejection(server, "/finish_weight_update", {}))["message"]
        assert await text(server) == before and server.engine.weight_version == 0
