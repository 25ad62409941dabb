"""The worker information that routers read, with and without keys."""

from __future__ import annotations

import json

import aiohttp
import pytest

import forge_jax
from forge_jax.config import EngineConfig
from forge_jax.engine.thread import Engine
from forge_serve.config import ServerConfig
from forge_serve.server.service import Service

KEY = "a-key-that-nobody-must-see"
PATHS = ("/server_info", "/get_server_info", "/model_info", "/get_model_info", "/v1/loads", "/ping")


async def test_worker_info_has_the_fields_of_a_router(start):
    """The fields and types are those of the structs in SGLang's gateway."""
    config = EngineConfig.from_options(max_num_seqs=7, num_blocks=40, block_size=16)
    served = ServerConfig(served_model_name="org/model")
    server = await start(Engine.fake(config=config, max_model_len=512), served)
    status, found = await server.get("/server_info")
    assert status == 200 and await server.get("/get_server_info") == (200, found)
    assert found["served_model_name"] == found["model_id"] == "org/model"
    assert found["model_path"] == server.engine.name
    assert found["version"] == forge_jax.__version__ and found["status"] == "ready"
    assert found["max_running_requests"] == found["max_num_reqs"] == 7
    assert found["max_total_num_tokens"] == found["max_total_tokens"] == 640
    assert found["context_length"] == found["max_model_len"] == 512
    assert found["dp_size"] == found["tp_size"] == 1
    status, model = await server.get("/model_info")
    assert status == 200 and await server.get("/get_model_info") == (200, model)
    assert model["is_generation"] is True and model["architectures"] is None
    assert model["model_path"] == model["tokenizer_path"] == server.engine.name
    assert model["vocab_size"] == server.engine.vocab_size


async def test_loads_follow_the_work(start):
    config = EngineConfig.from_options(max_num_seqs=2)
    server = await start(Engine.fake(step_time_s=0.01, config=config))
    status, idle = await server.get("/v1/loads")
    assert status == 200 and idle["version"] == forge_jax.__version__
    [load] = idle["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["token_usage"]) == (0, 0, 0)
    body = {"prompt": "a" * 60, "n": 3, "max_tokens": 200, "ignore_eos": True, "stream": True}
    async with server.http.post(server.url + "/v1/completions", json=body) as response:
        for _ in range(20):
            await response.content.readline()
        [load] = (await server.get("/v1/loads?include=core"))[1]["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (2, 1, 3)
    assert load["max_running_requests"] == 2 and load["utilization"] == 1.0
    assert 0 < load["num_used_tokens"] < load["max_total_num_tokens"]
    assert 0 < load["token_usage"] < 1 and load["dp_rank"] == 0


async def test_info_needs_a_key_and_never_reveals_one(start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    server = await start(Engine.fake(), ServerConfig(api_key_file=str(keys)))
    for path in PATHS:
        async with server.http.get(server.url + path) as response:
            assert response.status == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        async with server.http.get(server.url + path, headers=headers) as response:
            assert response.status == 200
            text = await response.text()
            assert KEY not in text and str(tmp_path) not in text


async def test_starting_server_is_not_a_worker(listening):
    async with listening(Service(ServerConfig())) as url, aiohttp.ClientSession() as http:
        for path in PATHS:
            async with http.get(url + path) as response:
                assert response.status == 503


async def test_ping_reports_whether_requests_are_served(server):
    async with server.http.get(server.url + "/ping") as response:
        assert (response.status, await response.text()) == (200, "")
    server.service.stopping = True
    async with server.http.get(server.url + "/ping") as response:
        assert response.status == 503


@pytest.mark.parametrize("path", PATHS[:5])
async def test_info_is_plain_json(server, path):
    _, answer = await server.get(path)
    json.dumps(answer, allow_nan=False)
