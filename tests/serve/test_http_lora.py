"""LoRA adapters over HTTP, with vLLM's fields: load, list, use as model, unload."""

import asyncio
import re

import pytest
from conftest import running
from lora_files import write_adapter

from forge_jax.config import EngineConfig
from forge_jax.engine.thread import Engine
from forge_jax.sampling_params import SamplingParams
from forge_serve.config import ServerConfig

OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 32}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
BODY = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def stories(short_stories):
    return short_stories


@pytest.fixture
async def server(stories, tmp_path):
    root = tmp_path / "adapters"
    write_adapter(root / "first", stories, seed=1)
    write_adapter(root / "second", stories, seed=2)
    write_adapter(tmp_path / "outside", stories, seed=3)
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "ring").symlink_to(root / "ring")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        folder = root / f"outside {name}"
        folder.mkdir()
        for each in ("adapter_config.json", "adapter_model.safetensors"):
            place = tmp_path / "outside" if each == name else root / "second"
            (folder / each).symlink_to(place / each)
    (root / "inside").symlink_to(root / "second")
    config = EngineConfig.from_options(
        model=str(stories),
        **OPTIONS,
        chat_template=TEMPLATE,
        lora=(f"first={root / 'first'}",),
        max_loras=2,
    )
    engine = await asyncio.to_thread(Engine.load, config)
    options = ServerConfig(served_model_name="stories", lora_folder=str(root))
    async with running(engine, options) as server:
        yield server


def text_of(server) -> str:
    """Return the adapters in use from /metrics, by name of the label."""
    text = server.service.metrics.text().decode()
    (labels,) = re.findall(r"^vllm:lora_requests_info\{(.*)\} \S+$", text, re.MULTILINE)
    return ",".join(sorted(labels.split(",")))


async def change(server, verb, **body) -> tuple[int, str]:
    async with server.http.post(f"{server.url}/v1/{verb}_lora_adapter", json=body) as response:
        return response.status, await response.text()


async def test_adapters_are_loaded_listed_named_and_unloaded(server):
    status, text = await change(server, "load", lora_name="second", lora_path="second")
    assert (status, text) == (200, "Success: LoRA adapter 'second' added successfully.")
    _, models = await server.get("/v1/models")
    cards = {card["id"]: (card["parent"], card["object"]) for card in models["data"]}
    model = (None, "model")
    assert cards == dict.fromkeys(("first", "second"), ("stories", "model")) | {"stories": model}
    assert (await server.get("/v1/models/second"))[1]["id"] == "second"

    names = ("stories", "first", "second")
    answers = await asyncio.gather(
        *(server.post("/v1/completions", {**BODY, "model": name}) for name in names)
    )
    assert [answer["model"] for _, answer in answers] == list(names)
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 3
    completion = await server.openai.completions.create(model="second", **BODY)
    assert completion.choices[0].text == answers[2][1]["choices"][0]["text"]
    stream = server.engine.submit(
        [1, 2], SamplingParams(max_tokens=64, ignore_eos=True), request_id="x", lora="first"
    )
    assert 'max_lora="2",running_lora_adapters="",waiting_lora_adapters="first"' in text_of(server)
    await anext(stream)
    assert 'max_lora="2",running_lora_adapters="first",waiting_lora_adapters=""' in text_of(server)
    stream.abort()
    _, vectors = await server.post("/v1/embeddings", {"input": "a", "model": "first"})
    _, plain = await server.post("/v1/embeddings", {"input": "a"})
    assert vectors["model"] == "first" and vectors["data"] != plain["data"]

    status, text = await change(server, "unload", lora_name="second")
    assert (status, text) == (200, "Success: LoRA adapter 'second' removed successfully.")
    status, answer = await server.post("/v1/completions", {**BODY, "model": "second"})
    assert status == 404 and answer["error"]["code"] == "model_not_found"


REFUSED = [
    ("load", {"lora_name": "x"}, 400, "lora_path"),
    ("load", {"lora_name": "first", "lora_path": "second"}, 400, "lora_name"),
    ("load", {"lora_name": "stories", "lora_path": "second"}, 400, "lora_name"),
    ("load", {"lora_name": "a b", "lora_path": "second"}, 400, "lora_name"),
    ("load", {"lora_name": "x", "lora_path": "nowhere"}, 404, "lora_path"),
    ("load", {"lora_name": "x", "lora_path": "../outside"}, 404, "lora_path"),
    ("load", {"lora_name": "x", "lora_path": "link"}, 404, "lora_path"),
    ("load", {"lora_name": "x", "lora_path": "ring"}, 404, "lora_path"),
    ("load", {"lora_name": "x", "lora_path": "outside adapter_config.json"}, 404, "lora_path"),
    ("load", {"lora_name": "x", "lora_path": "outside adapter_model.safetensors"}, 404,
     "lora_path"),
    ("load", {"lora_name": "x", "lora_path": "/etc"}, 404, "lora_path"),
    ("load", {"lora_name": "x", "lora_path": "."}, 404, "lora_path"),
    ("load", {"lora_name": "x", "lora_path": "a\0"}, 404, "lora_path"),
    ("load", {"lora_name": "x", "lora_path": "first", "load_inplace": True}, 400,
     "load_inplace"),
    ("unload", {"lora_name": "x"}, 404, "lora_name"),
    ("unload", {}, 400, "lora_name"),
]  # fmt: skip


async def test_impossible_adapter_requests_are_rejected(server, tmp_path):
    for verb, body, status, param in REFUSED:
        found, answer = await server.post(f"/v1/{verb}_lora_adapter", body)
        assert (found, answer["error"]["param"]) == (status, param), (body, answer)
        assert str(tmp_path) not in answer["error"]["message"]
        assert [adapter.name for adapter in server.engine.loras] == ["first"]
    assert (await change(server, "load", lora_name="x", lora_path="inside"))[0] == 200
    assert (await change(server, "unload", lora_name="x"))[0] == 200
    within = str(tmp_path / "adapters" / "second")
    assert (await change(server, "load", lora_name="x", lora_path=within))[0] == 200


async def test_documented_examples_are_served(server, tmp_path):
    (tmp_path / "adapters" / "second").rename(tmp_path / "adapters" / "my-adapter")
    _, document = await server.get("/openapi.json")
    for verb in ("load", "unload"):
        post = document["paths"][f"/v1/{verb}_lora_adapter"]["post"]
        body = post["requestBody"]["content"]["application/json"]["examples"]["whole"]["value"]
        status, text = await change(server, verb, **body)
        assert status == 200 and "text/plain" in post["responses"]["200"]["content"], text


async def test_every_protocol_names_an_adapter_as_the_model(server):
    user = [{"role": "user", "content": "One day"}]
    chat = {"messages": user, "max_tokens": 8, "temperature": 0}
    forms = {
        "/v1/chat/completions": (chat, lambda body: body["choices"][0]["message"]["content"]),
        "/v1/messages": (chat, lambda body: body["content"][0]["text"]),
        "/v1/responses": (
            {"input": "One day", "max_output_tokens": 16, "temperature": 0},
            lambda body: body["output"][0]["content"][0]["text"],
        ),
        "/generate": (
            {"prompt": "One day", "max_new_tokens": 8, "temperature": 0},
            lambda body: body["text"],
        ),
    }
    for path, (body, text_of) in forms.items():
        texts = set()
        for name in ("stories", "first"):
            status, answer = await server.post(path, {**body, "model": name})
            assert status == 200, answer
            assert answer.get("model", name) == name
            texts.add(text_of(answer))
        assert len(texts) == 2, path
        status, _ = await server.post(path, {**body, "model": "second"})
        assert status == 404, path


async def test_adapter_file_error_hides_the_path(server, tmp_path):
    (tmp_path / "adapters" / "first" / "adapter_config.json").unlink()
    status, answer = await server.post(
        "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "first"}
    )
    assert status == 400 and "adapter_config.json" in answer["error"]["message"]
    assert str(tmp_path) not in answer["error"]["message"]


async def test_adapter_in_use_is_not_unloaded_over_http(server):
    body = {**BODY, "model": "first", "max_tokens": 400, "stream": True, "ignore_eos": True}
    async with server.http.post(f"{server.url}/v1/completions", json=body) as response:
        await response.content.readline()
        status, answer = await server.post("/v1/unload_lora_adapter", {"lora_name": "first"})
        assert status == 400 and "use this LoRA adapter" in answer["error"]["message"]
    async with asyncio.timeout(5):  # until the disconnect is noticed
        while (await change(server, "unload", lora_name="first"))[0] != 200:
            await asyncio.sleep(0.01)


async def test_clients_load_nothing_without_an_adapter_folder(start):
    server = await start(Engine.fake())
    for verb in ("load", "unload"):
        body = {"lora_name": "x", "lora_path": "/etc"}
        status, answer = await server.post(f"/v1/{verb}_lora_adapter", body)
        assert status == 400 and "--lora-folder" in answer["error"]["message"]
