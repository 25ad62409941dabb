"""Steering vectors over HTTP: completions, chats and streams give the engine's steered text."""

import asyncio
import json

import numpy as np
import pytest
from conftest import running
from safetensors.numpy import save_file

from forge_jax import SteeringVector
from forge_jax.config import EngineConfig
from forge_jax.engine.thread import Engine
from forge_jax.sampling_params import SamplingParams

OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 32}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PROMPT = "Once upon a time"
BODY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
CHOSEN = [{"name": "v", "scale": "8", "layers": [0]}, {"name": "w", "scale": -8}]
VECTORS = (SteeringVector(name="v", scale=8.0, layers=[0]), SteeringVector(name="w", scale=-8.0))


@pytest.fixture
async def server(short_stories, tmp_path):
    random = np.random.default_rng(0)
    for name, shape in (("v", 64), ("w", (2, 64))):
        file = tmp_path / f"{name}.safetensors"
        save_file({"vector": random.normal(size=shape).astype(np.float32)}, file)
    config = EngineConfig.from_options(
        model=str(short_stories),
        **OPTIONS,
        chat_template=TEMPLATE,
        steering_vectors=tuple(f"{name}={tmp_path / name}.safetensors" for name in "vw"),
    )
    async with running(await asyncio.to_thread(Engine.load, config)) as server:
        yield server


async def text(engine, vectors, ids) -> str:
    params = SamplingParams(**BODY, steering_vectors=vectors)
    return "".join([delta.text async for delta in engine.generate(ids, params)])


async def test_all_forms_of_a_request_are_steered(server):
    ids = server.engine.tokenizer.encode(PROMPT)
    plain, wanted = [await text(server.engine, vectors, ids) for vectors in ((), VECTORS)]
    assert plain != wanted
    body = {**BODY, "prompt": ids, "steering_vectors": CHOSEN}
    (status, steered), (_, other) = await asyncio.gather(
        server.post("/v1/completions", body),
        server.post("/v1/completions", {**BODY, "prompt": ids}),
    )
    assert status == 200, steered
    assert [each["choices"][0]["text"] for each in (steered, other)] == [wanted, plain]
    *events, done = await server.events("/v1/completions", {**body, "stream": True})
    parts = [choice["text"] for event in events for choice in json.loads(event)["choices"]]
    assert (done, "".join(parts)) == ("[DONE]", wanted)
    chat = {**BODY, "messages": [{"role": "user", "content": PROMPT}]}
    unsteered, answer = [
        (await server.post("/v1/chat/completions", {**chat, **more}))[1]["choices"][0]["message"]
        for more in ({}, {"steering_vectors": CHOSEN})
    ]
    assert unsteered["content"] != answer["content"]


@pytest.mark.parametrize(
    ("vector", "named"),
    [
        ({"name": "x"}, "no vector with this name"),
        ({"name": "v"}, "set layers"),
        ({"name": "w", "layers": [2]}, "from 0 to 1"),
    ],
)
async def test_vectors_that_the_engine_lacks_get_a_400(server, vector, named):
    body = {**BODY, "prompt": PROMPT, "steering_vectors": [vector]}
    status, answer = await server.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "steering_vectors")
    assert named in answer["error"]["message"]
