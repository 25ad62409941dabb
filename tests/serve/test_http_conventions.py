"""Compatibility with clients of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge_jax.config import EngineConfig
from forge_jax.engine.adapters import LoadedAdapter
from forge_jax.engine.fake import assemble_fake, fake_tokenizer
from forge_jax.engine.thread import Engine
from forge_jax.schedule.request import LoraRef
from forge_jax.text import Tokenizer
from forge_serve.config import ServerConfig
from forge_serve.openai import loras
from forge_serve.openai import validation as validate
from forge_serve.openai.ignored_fields import IgnoredFields
from forge_serve.telemetry import info
from tests.serve.conftest import scripted_engine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "the dog"}
ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def bodies(**more: Any) -> list[tuple[str, dict[str, Any]]]:
    return [
        (COMPLETIONS, {"prompt": "the dog", "max_tokens": 30, **more}),
        (CHAT, {"messages": [USER], "max_tokens": 30, **more}),
    ]


async def test_vllm_fields_are_null_unless_requested(server):
    for path, body in bodies():
        _, answer = await server.post(path, body)
        choice = answer["choices"][0]
        for field in ("prompt_logprobs", "prompt_token_ids"):
            assert (answer if path == CHAT else choice)[field] is None
        assert choice["token_ids"] is choice["stop_reason"] is None


@pytest.mark.parametrize(
    ("answer", "more", "stop_reason", "matched"),
    [
        ("ab", {}, None, "end"),
        ("abcdef", {"stop": "cd"}, "cd", "cd"),
        ("abcdef", {"max_tokens": 2}, None, None),
    ],
)
async def test_choice_reports_its_stop_reason(start, answer, more, stop_reason, matched):
    """SGLang's matched_stop also reports the EOS token, for which vLLM's stop_reason is null."""
    server = await start(scripted_engine(answer))
    expected = server.engine.tokenizer.eos_token_id if matched == "end" else matched
    for path, body in bodies(**more):
        _, whole = await server.post(path, body)
        choice = whole["choices"][0]
        assert (choice["stop_reason"], choice["matched_stop"]) == (stop_reason, expected)
        *_, last, done = await server.events(path, {**body, "stream": True})
        assert done == "[DONE]"
        choice = json.loads(last)["choices"][0]
        assert (choice["stop_reason"], choice["matched_stop"]) == (stop_reason, expected)


async def test_stop_token_beyond_the_vocabulary_never_matches(start):
    server = await start(scripted_engine("abcdef"))
    b = server.engine.tokenizer.encode("b")[0]
    for path, body in bodies(min_tokens=1):
        _, plain = await server.post(path, body)
        status, answer = await server.post(path, {**body, "stop_token_ids": [10**8]})
        assert status == 200 and answer["choices"] == plain["choices"]
        _, answer = await server.post(path, {**body, "stop_token_ids": [10**8, b]})
        assert answer["choices"][0]["stop_reason"] == b


async def test_stop_token_beyond_the_vocabulary_does_not_disturb_masks(server):
    body = {"prompt": "a", "stop_token_ids": [2**31 - 1], "min_tokens": 5, "max_tokens": 8}
    status, answer = await server.post(COMPLETIONS, {**body, "bad_words": ["the"]})
    assert status == 200 and answer["usage"]["completion_tokens"] >= 5


async def test_chat_template_decides_which_roles_are_valid(start):
    server = await start(scripted_engine("x", template=ROLES))
    tokenizer = server.engine.tokenizer
    messages = [{"role": "critic", "content": "a"}, {"role": "user", "content": "b"}]
    _, found = await server.post("/tokenize", {"messages": messages})
    assert found["tokens"] == tokenizer.encode("[critic]a[user]b")
    refuses = "{{ raise_exception('only users') if messages[0].role != 'user' }}"
    server = await start(scripted_engine("x", template=refuses))
    status, answer = await server.post(CHAT, {"messages": messages})
    assert status == 400 and answer["error"]["param"] == "messages"


def adapter(name: str, number: int, path: str) -> LoadedAdapter:
    ref = LoraRef(name=name, place=number + 1, identity=str(number))
    return LoadedAdapter(ref=ref, path=path, digest="", rank=8)


def _with_bos() -> Tokenizer:
    backend = fake_tokenizer().backend
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, {"eos_token": "</s>", "bos_token": "<s>"}, add_bos_token=True)


@pytest.mark.parametrize("asked", [None, False, True])
async def test_chat_can_add_special_tokens(start, asked):
    parts = assemble_fake(
        EngineConfig(), step_time_s=0.0, max_model_len=512, check=False, tokenizer=_with_bos()
    )
    server = await start(Engine(parts))
    plain = (await server.post("/tokenize", {"messages": [USER]}))[1]["tokens"]
    body = {"messages": [USER], "add_special_tokens": asked}
    found = (await server.post("/tokenize", body))[1]["tokens"]
    bos = server.engine.tokenizer.bos_token_id
    assert found == ([bos, *plain] if asked else plain)
    _, answer = await server.post(CHAT, {**body, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == len(found)


async def test_generate_counts_and_times_its_request(server):
    for path in ("/generate", "/v1/generate"):
        body = {"prompt": "a", "max_new_tokens": 3, "ignore_eos": True, "request_id": "mine"}
        status, answer = await server.post(path, body)
        assert status == 200 and answer["generated_tokens"] == answer["completion_tokens"] == 3
        assert (answer["request_id"], answer["model"]) == ("mine", server.model)
        assert answer["latency_ms"] >= 0


async def test_stats_also_have_the_names_of_other_engines(start):
    config = EngineConfig.from_options(block_size=32, scheduling_policy="priority")
    server = await start(Engine.fake(config=config), ServerConfig(served_model_name="org/model"))
    _, before = await server.get("/stats")
    assert (before["average_batch_size"], before["max_batch_size"]) == (0, 0)
    body = {"prompt": "a", "max_tokens": 5, "ignore_eos": True, "n": 3}
    for _ in range(2):
        await server.post(COMPLETIONS, body)
    await server.post(COMPLETIONS, {**body, "max_tokens": 4000, "timeout": 0.01})
    await server.idle()
    _, stats = await server.get("/stats")
    assert stats["model"] == "org/model" and stats["running"] == stats["num_running"] == 0
    assert stats["completed_requests"] == 2, "one was aborted"
    assert (stats["page_size"], stats["policy"]) == (32, "priority")
    assert 1 <= stats["average_batch_size"] <= stats["max_batch_size"] == 3


def test_server_info_reports_the_device_count():
    parts = assemble_fake(EngineConfig(), step_time_s=0.0, max_model_len=64, check=False)
    parts.shards = 2
    assert info.server_info(Engine(parts), "m", "ready").tp_size == 2


async def test_adapter_root_is_its_path(server, monkeypatch, tmp_path):
    """The path as given: clients name adapters relative to the operator's folder."""
    inside, outside = tmp_path / "all" / "mine", "adapters/theirs"
    found = [adapter("a", 0, str(inside)), adapter("b", 1, outside)]
    monkeypatch.setattr(type(server.engine), "loras", property(lambda _: found))
    monkeypatch.setattr(server.service, "config", ServerConfig(lora_folder=str(tmp_path / "all")))
    _, models = await server.get("/v1/models")
    roots = {card["id"]: card["root"] for card in models["data"]}
    assert roots == {server.model: server.engine.name, "a": "mine", "b": "adapters/theirs"}
    assert loras.shown_path("adapters/theirs", None) == "adapters/theirs"
    assert str(Path(tmp_path)) not in json.dumps(models)


async def test_unknown_adapter_error_suggests_the_closest_one(server, monkeypatch):
    found = [adapter(f"adapter-{c}", i, "a") for i, c in enumerate("abcdefg")]
    monkeypatch.setattr(type(server.engine), "loras", property(lambda _: found))
    _, answer = await server.post(COMPLETIONS, {"prompt": "a", "model": "adaptor-f"})
    message = answer["error"]["message"]
    assert "did you mean adapter-f?" in message and "3 more" in message
    assert "adaptor" not in message


@pytest.mark.parametrize(
    ("path", "body", "hint"),
    [
        (COMPLETIONS, {"promt": "a"}, "the body has a field with a similar name"),
        (CHAT, {"mesages": [USER]}, "the body has a field with a similar name"),
        (
            CHAT,
            {"messages": [USER], "response_format": {"type": "json_shema"}},
            "did you mean json_schema?",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "structured_outputs": {"rejex": "a"}},
            "did you mean regex?",
        ),
    ],
)
async def test_misspelled_field_error_suggests_the_closest_one(server, path, body, hint):
    status, answer = await server.post(path, body)
    assert status == 400 and hint in answer["error"]["message"]


async def test_missing_field_without_a_similar_one_has_no_hint(server):
    for body in ({}, {"zebra": 1}, {f"{i}": 1 for i in range(5000)}):
        _, answer = await server.post(COMPLETIONS, body)
        assert answer["error"]["message"] == "prompt is required"


async def test_log_suggests_a_name_for_an_ignored_field(server, caplog, monkeypatch):
    monkeypatch.setattr(validate, "_ignored", IgnoredFields())
    caplog.set_level("INFO")
    await server.post(COMPLETIONS, {"prompt": "a", "max_tokenz": 3, "zebra_stripes": 1})
    assert "unknown request field max_tokenz; did you mean max_tokens?" in caplog.text
    assert "unknown request field zebra_stripes (logged once)" in caplog.text
