"""Activations over HTTP: completions, chats and streams have those of the engine."""

import asyncio
import base64
import json

import numpy as np
import pytest
import pytest_asyncio
from conftest import running

from forge_jax import ReturnActivations
from forge_jax.config import EngineConfig
from forge_jax.engine.thread import Engine
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.activations import joined

OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 32, "dtype": "bfloat16"}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PROMPT = "Once upon a time"
BODY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
ASKED = {"names": ["layers.*.resid"], "tokens": "all"}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(short_stories):
    config = EngineConfig.from_options(
        model=str(short_stories),
        **OPTIONS,
        chat_template=TEMPLATE,
        activations=("layers.*.resid",),
        max_activation_mib=1,
    )
    async with running(await asyncio.to_thread(Engine.load, config)) as server:
        yield server


def decoded(rows):
    """Return the start, and bits by name with the number of rows."""
    found = {}
    for name, array in rows["arrays"].items():
        assert array["dtype"] == "bfloat16"
        data = np.frombuffer(base64.b64decode(array["data"]), np.uint16)
        found[name] = data.reshape(array["shape"])
    return rows["start"], found


def assert_equal(rows, wanted):
    start, arrays = rows
    assert start == wanted.start
    for name, array in wanted.arrays.items():
        assert arrays[name].tobytes() == array.tobytes()
    assert arrays.keys() == wanted.arrays.keys()


async def test_all_forms_of_a_response_have_the_activations(server):
    ids = server.engine.tokenizer.encode(PROMPT)
    params = SamplingParams(**BODY, return_activations=ReturnActivations(**ASKED))
    deltas = [delta async for delta in server.engine.generate(ids, params)]
    wanted = joined([delta.activations for delta in deltas])
    assert (wanted.start, wanted.end) == (0, len(ids) + 5)
    body = {**BODY, "prompt": ids, "return_activations": ASKED}
    status, answer = await server.post("/v1/completions", body)
    assert status == 200, answer
    assert_equal(decoded(answer["choices"][0]["activations"]), wanted)
    _, plain = await server.post("/v1/completions", {**BODY, "prompt": ids})
    assert "activations" not in plain["choices"][0]
    chat = {
        **BODY,
        "messages": [{"role": "user", "content": PROMPT}],
        "add_special_tokens": True,
    }
    _, answer = await server.post("/v1/chat/completions", {**chat, "return_activations": ASKED})
    assert_equal(decoded(answer["choices"][0]["activations"]), wanted)
    for path, streamed in (("/v1/completions", body), ("/v1/chat/completions", chat)):
        streamed = {**streamed, "return_activations": ASKED, "stream": True}
        *events, done = await server.events(path, streamed)
        choices = [each for event in events for each in json.loads(event)["choices"]]
        parts = [decoded(each["activations"]) for each in choices if "activations" in each]
        assert done == "[DONE]" and len(parts) > 1
        ends = [start + len(next(iter(arrays.values()))) for start, arrays in parts]
        assert [start for start, _ in parts] == [0, *ends[:-1]]
        whole = {
            name: np.concatenate([arrays[name] for _, arrays in parts]) for name in wanted.arrays
        }
        assert_equal((0, whole), wanted)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"return_activations": {"names": ["layers.2.resid"]}}, "names[0] matches no activation"),
        ({"return_activations": ASKED, "max_tokens": 200, "n": 30}, "set max_tokens"),
        ({"return_activations": ASKED, "prompt": [PROMPT] * 1000}, "exceed the limit of 1048576"),
    ],
)
async def test_activations_that_the_engine_cannot_return_get_a_400(server, more, named):
    status, answer = await server.post("/v1/completions", {**BODY, "prompt": PROMPT, **more})
    assert (status, answer["error"]["param"]) == (400, "return_activations")
    assert named in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ],
)
async def test_other_endpoints_reject_activations(server, path, body):
    status, answer = await server.post(path, {**body, "return_activations": ASKED})
    assert status == 400 and "return_activations is not supported" in answer["error"]["message"]
