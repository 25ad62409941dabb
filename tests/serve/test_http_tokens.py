"""The tokenizer endpoints."""

from __future__ import annotations

import pytest

import forge_jax
from forge_jax.engine.thread import Engine

MESSAGES = [{"role": "user", "content": "Two of them, please."}]


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_detokenize_are_inverse(server, prefix):
    text = "Über the garden\n  and the river."
    tokenizer = server.engine.tokenizer
    status, answer = await server.post(f"{prefix}/tokenize", {"prompt": text})
    assert status == 200
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 1024
    assert answer["token_strs"] is None
    body = {"prompt": text, "add_special_tokens": False, "model": server.model}
    _, plain = await server.post(f"{prefix}/tokenize", body)
    assert plain["tokens"] == tokenizer.encode(text, add_special_tokens=False)
    _, back = await server.post(f"{prefix}/detokenize", {"tokens": plain["tokens"]})
    assert back == {"prompt": text, "text": text}


async def test_several_texts_give_lists(server):
    texts = ["one", "", "and another"]
    _, answer = await server.post("/tokenize", {"prompt": texts, "add_special_tokens": False})
    tokenizer = server.engine.tokenizer
    assert answer["tokens"] == [tokenizer.encode(t, add_special_tokens=False) for t in texts]
    assert answer["count"] == [len(ids) for ids in answer["tokens"]]
    _, back = await server.post("/detokenize", {"tokens": answer["tokens"]})
    assert back["text"] == texts


async def test_chat_tokens_match_those_charged_by_its_completion(server):
    _, answer = await server.post("/tokenize", {"messages": MESSAGES, "return_token_strs": True})
    body = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    _, completion = await server.post("/v1/chat/completions", body)
    assert answer["count"] == completion["usage"]["prompt_tokens"]
    assert answer["tokens"] == completion["prompt_token_ids"]
    name = server.engine.tokenizer.backend.id_to_token
    assert answer["token_strs"] == [name(token) for token in answer["tokens"]]


async def test_long_texts_give_the_same_tokens(server):
    ids = server.engine.tokenizer.encode("the river ", add_special_tokens=False)
    _, answer = await server.post("/detokenize", {"tokens": ids * 5000})
    assert answer["text"] == server.engine.tokenizer.decode(ids * 5000)


async def test_special_tokens_are_shown_unless_skipped(server):
    tokenizer = server.engine.tokenizer
    special = min(tokenizer.special_ids)
    ids = [special, *tokenizer.encode("a", add_special_tokens=False)]
    _, shown = await server.post("/detokenize", {"tokens": ids})
    _, hidden = await server.post("/detokenize", {"tokens": ids, "skip_special_tokens": True})
    assert shown["text"] == tokenizer.decode(ids, skip_special_tokens=False)
    assert hidden["text"] == "a" != shown["text"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": []}, "prompt"),
        ("/tokenize", {"prompt": ["a"] * 2000}, "prompt"),
        ("/tokenize", {"prompt": "a" * 2_000_000}, "prompt"),
        ("/tokenize", {"prompt": [1, 2]}, "prompt[0]"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**31]}, "tokens"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens"),
        ("/detokenize", {"tokens": [[1]] * 2000}, "tokens"),
    ],
)
async def test_invalid_requests_are_rejected(server, path, body, param):
    status, answer = await server.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_tokenizer_info_suffices_to_write_prompts(server):
    status, info = await server.get("/tokenizer_info")
    tokenizer = server.engine.tokenizer
    assert status == 200 and info["vocab_size"] == tokenizer.vocab_size
    assert info["eos_token"] == tokenizer.eos_token and "pad_token" in info
    assert info["chat_template"] == server.engine.chat_template.sources["default"]
    assert info["model_max_length"] == 1024


async def test_version_and_load_are_served_for_routers(start):
    server = await start(Engine.fake(step_time_s=0.01))
    assert await server.get("/version") == (200, {"version": forge_jax.__version__})
    assert await server.get("/load") == (200, {"server_load": 0})
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    async with server.http.post(server.url + "/v1/completions", json=body) as response:
        await response.content.readline()
        assert await server.get("/load") == (200, {"server_load": 1})
