"""Fields of vLLM and other engines: each has its documented effect."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import scripted_engine
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params

from forge_jax.config import EngineConfig
from forge_jax.engine.thread import Engine
from forge_jax.testing import core_of
from forge_serve.config import ServerConfig
from forge_serve.http.sse import EventStream
from forge_serve.openai import ignored_fields
from forge_serve.openai.ignored_fields import IgnoredFields
from forge_serve.openai.requests import ChatRequest, CompletionRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Two of them, please."}]
BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 40, "ignore_eos": True, "seed": 1}


async def post(server: Any, path: str, body: dict[str, Any]) -> Any:
    status, answer = await server.post(path, body)
    assert status == 200, answer
    return answer


def forms(body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    chat = {name: value for name, value in body.items() if name != "prompt"}
    return [(COMPLETIONS, body), (CHAT, {**chat, "messages": MESSAGES})]


# ---- allowed tokens ------------------------------------------------------------------------------


async def test_only_allowed_tokens_are_sampled(server):
    allowed = [3, 5, 8]
    for path, body in forms({**BODY, "allowed_token_ids": allowed, "return_token_ids": True}):
        answer = await post(server, path, {**body, "n": 2, "temperature": 0.7})
        for choice in answer["choices"]:
            assert set(choice["token_ids"]) <= set(allowed) and len(choice["token_ids"]) == 40


async def test_bad_words_are_never_sampled(start):
    server = await start(scripted_engine("the dog and the cat"))
    plain = {"prompt": "Hello", "max_tokens": 60}
    for words, expected in (
        ([], "the dog and the cat"),
        (["dog"], "the doh and the cat"),  # the device takes the token after a forbidden one
        ([" dog", "and"], "the doh ane the cat"),
        (["hound"], "the dog and the cat"),
    ):
        for path, body in forms({**plain, "bad_words": words}):
            [choice] = (await post(server, path, body))["choices"]
            assert (choice["message"]["content"] if path == CHAT else choice["text"]) == expected


async def test_answer_without_allowed_tokens_is_an_error(server):
    letters = [server.engine.tokenizer.encode(letter)[0] for letter in "ab"]
    body = {**BODY, "allowed_token_ids": letters, "bad_words": ["aa", "ab", "ba", "bb"]}
    status, answer = await server.post(COMPLETIONS, body)
    assert (status, answer["error"]["param"]) == (400, "allowed_token_ids")
    assert "allowed_token_ids and bad_words leave no token" in answer["error"]["message"]
    *_, last = await server.events(COMPLETIONS, {**body, "stream": True})
    assert json.loads(last) == answer
    status, answer = await server.post(COMPLETIONS, {**body, "bad_words": ["a", "b"]})
    assert (status, answer["error"]["param"]) == (400, "bad_words")


async def test_logit_bias_min_tokens_and_eos_take_effect(start):
    server = await start(scripted_engine("yes"))
    num_tokens = 4  # one byte each, and EOS
    plain = {"prompt": "Hello", "max_tokens": 9, "return_token_ids": True}
    for path, body in forms(plain):
        choice = (await post(server, path, body))["choices"][0]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (num_tokens, "stop")
        choice = (await post(server, path, {**body, "ignore_eos": True}))["choices"][0]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (9, "length")
        choice = (await post(server, path, {**body, "min_tokens": 6}))["choices"][0]
        assert len(choice["token_ids"]) >= 6
    # The fake device has no logits, so its inputs are checked.
    seen: list[Any] = []
    dispatch = core_of(server.engine).device.dispatch

    def spy(plan: Any) -> Any:
        seen.extend(admission.params for admission in plan.admissions)
        return dispatch(plan)

    core_of(server.engine).device.dispatch = spy
    for path, body in forms({**plain, "logit_bias": {"7": 2.5}}):
        await post(server, path, body)
    assert [params.logit_bias for params in seen] == [{7: 2.5}] * 2


async def test_priority_decides_the_order(start):
    config = EngineConfig.from_options(max_num_seqs=1, scheduling_policy="priority")
    server = await start(Engine.fake(step_time_s=0.005, config=config))
    first = {**BODY, "max_tokens": 3000, "priority": -9}
    running = asyncio.create_task(server.post(COMPLETIONS, first))
    while not server.engine.stats().num_running:
        await asyncio.sleep(0.001)
    ended: list[int] = []

    async def one(path: str, body: dict[str, Any], priority: int) -> None:
        await server.post(path, {**body, "max_tokens": 3, "priority": priority})
        ended.append(priority)

    waiting = []
    for priority, (path, body) in zip((5, 2, 4, 1), forms(BODY) * 2, strict=True):
        waiting.append(asyncio.create_task(one(path, body, priority)))
        while server.engine.stats().num_waiting < len(waiting):
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(*waiting)
    assert ended == [1, 2, 4, 5]


async def test_salt_separates_the_prefix_cache_of_chats(server):
    messages = [{"role": "user", "content": "the same beginning " * 20}]

    async def cached(**more: Any) -> int:
        answer = await post(server, CHAT, {"messages": messages, "max_tokens": 2, **more})
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert await cached() == 0 < await cached()
    assert await cached(cache_salt="mine") == 0 < await cached(cache_salt="mine")


# ---- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 7, 500])
async def test_truncated_prompt_keeps_its_last_tokens(server, keep):
    text = "the river and the road " * 9
    ids = server.engine.tokenizer.encode(text)
    body = {**BODY, "max_tokens": 3, "return_token_ids": True, "echo": True}
    for prompt in (text, ids):
        sent = {**body, "prompt": [prompt, prompt], "truncate_prompt_tokens": keep}
        for choice in (await post(server, COMPLETIONS, sent))["choices"]:
            assert choice["prompt_token_ids"] == ids[-keep:]
            whole = server.engine.tokenizer.decode([*ids[-keep:], *choice["token_ids"]])
            assert choice["text"] == whole
    sent = {**body, "prompt": text, "truncate_prompt_tokens": keep, "truncation_side": "right"}
    assert (await post(server, COMPLETIONS, sent))["choices"][0]["prompt_token_ids"] == ids[:keep]
    body = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    ids = (await post(server, CHAT, body))["prompt_token_ids"]
    answer = await post(server, CHAT, {**body, "truncate_prompt_tokens": keep})
    assert answer["prompt_token_ids"] == ids[-keep:]
    assert answer["usage"]["prompt_tokens"] == min(keep, len(ids))


async def test_prompt_of_any_length_fits_if_truncation_is_allowed(server):
    long, most = "the river " * 4000, server.engine.max_model_len
    body = {"truncate_prompt_tokens": -1, "ignore_eos": True}
    for max_tokens, output in ((0, 0), (5, 5), (None, 16)):
        sent = {**body, "prompt": long, "max_tokens": max_tokens}
        usage = (await post(server, COMPLETIONS, sent))["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (most - output, output)
    sent = {**body, "messages": [{"role": "user", "content": long}]}
    usage = (await post(server, CHAT, sent))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (most - 1, 1)


def test_truncation_keeps_the_tokenizers_bos():
    from forge_serve.generation.prompts import Kept, Prompt

    ids = [1, 5, 6, 7]
    assert Kept(3, first=False).cut(Prompt(ids, "text"), 1).token_ids == [1, 6, 7]
    assert Kept(1, first=False).cut(Prompt(ids, "text"), 1).token_ids == [7]
    assert Kept(3, first=False).cut(Prompt(ids), 1).token_ids == [5, 6, 7]
    assert Kept(3, first=False).cut(Prompt(ids, "text"), None).token_ids == [5, 6, 7]
    assert Kept(4, first=False).cut(Prompt(ids, "text"), 1) == Prompt(ids, "text")


async def test_prompt_logprobs_have_the_vllm_format(server):
    tokenizer = server.engine.tokenizer
    for path, body in forms({**BODY, "max_tokens": 2, "n": 2, "return_token_ids": True}):
        answer = await post(server, path, {**body, "prompt_logprobs": 3})
        where = answer if path == CHAT else answer["choices"][1]
        ids, scores = where["prompt_token_ids"], where["prompt_logprobs"]
        assert len(scores) == len(ids) and scores[0] is None
        for token, entry in zip(ids[1:], scores[1:], strict=True):
            own = entry[str(token)]
            assert set(own) == {"logprob", "rank", "decoded_token"}
            assert own["decoded_token"] == tokenizer.token_text(token)
            assert {1, 2, 3} <= {score["rank"] for score in entry.values()}
            assert len(entry) == 4 or own["rank"] <= 3
        assert (answer if path == CHAT else answer["choices"][0])["prompt_logprobs"] == scores
        alone = await post(server, path, {**body, "prompt_logprobs": 0})
        where = alone if path == CHAT else alone["choices"][0]
        assert [list(e) for e in where["prompt_logprobs"][1:]] == [
            [str(token)] for token in ids[1:]
        ]
        without = await post(server, path, body)
        assert {**without["choices"][0], **without}["prompt_logprobs"] is None
        status, refused = await server.post(path, {**body, "prompt_logprobs": 1, "stream": True})
        assert (status, refused["error"]["param"]) == (400, "prompt_logprobs")
    both = {**BODY, "echo": True, "logprobs": 1, "prompt_logprobs": 4, "max_tokens": 1}
    [choice] = (await post(server, COMPLETIONS, both))["choices"]
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])
    assert all(len(entry) >= 4 for entry in choice["prompt_logprobs"][1:])
    for path in ("/generate", "/v1/messages"):
        sent = {"prompt": "a", "messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": 1}
        assert (await server.post(path, sent))[0] == 400


async def test_logprob_tokens_may_be_ids(server):
    more = {"max_tokens": 3, "return_token_ids": True, "return_tokens_as_token_ids": True}
    for path, body in forms({**BODY, **more}):
        wanted = {"logprobs": True} if path == CHAT else {"logprobs": 0}
        [choice] = (await post(server, path, {**body, **wanted}))["choices"]
        logprobs = choice["logprobs"]
        names = [e["token"] for e in logprobs["content"]] if path == CHAT else logprobs["tokens"]
        assert names == [f"token_id:{token}" for token in choice["token_ids"]]


# ---- ids and unknown fields ----------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/messages", "/generate"])
async def test_one_request_id_is_used_everywhere(server, caplog, path):
    caplog.set_level(logging.INFO, "forge_serve.requests")
    body = {"prompt": "a", "messages": MESSAGES, "max_tokens": 2}
    for header, field, expected in (
        ("trace/1", None, "trace/1"),
        ("trace/2", "mine", "trace/2"),
        (None, "mine", "mine"),
        ("not valid", "mine", "mine"),
    ):
        caplog.clear()
        headers = {} if header is None else {"X-Request-Id": header}
        sent = {**body, "request_id": field}
        async with server.http.post(server.url + path, json=sent, headers=headers) as response:
            answer = await response.json()
            assert response.status == 200, answer
            assert response.headers["X-Request-Id"] == expected
        assert path == "/generate" or re.split("[-_]", answer["id"], maxsplit=1)[1] == expected
        assert f"id={expected} " in caplog.text and re.search(f"[-_]{expected} ", caplog.text)


async def test_concurrent_requests_may_share_an_id(server):
    async def one() -> int:
        return (await server.post(COMPLETIONS, {**BODY, "request_id": "same"}))[0]

    assert await asyncio.gather(*(one() for _ in range(5))) == [200] * 5


async def test_unknown_field_is_logged_once(server, caplog, monkeypatch):
    monkeypatch.setattr("forge_serve.openai.validation._ignored", IgnoredFields())
    caplog.set_level(logging.INFO, "forge_serve.openai.ignored_fields")
    odd = "evil\nname\x1b[31m" + "x" * 500
    for _ in range(3):
        for path, body in forms({**BODY, "max_tokens": 1, "brand_new": "a secret", odd: 1}):
            await post(server, path, body)
    lines = [
        r.getMessage() for r in caplog.records if r.name == "forge_serve.openai.ignored_fields"
    ]
    assert len(lines) == 2 and any("brand_new" in line for line in lines)
    assert "secret" not in caplog.text and all(line.isprintable() for line in lines)
    assert all(len(line) < 150 for line in lines)


def test_logged_unknown_fields_are_bounded(caplog):
    caplog.set_level(logging.INFO, "forge_serve.openai.ignored_fields")
    fields = IgnoredFields()
    for i in range(1000):
        fields.tell([f"field_{i}"])
    assert len(caplog.records) == len(fields._told) == ignored_fields.MAX_NAMES


# ---- idle streams --------------------------------------------------------------------------------


@pytest.fixture
def streams(monkeypatch) -> list[Any]:
    made: list[Any] = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        made.append(EventStream(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("forge_serve.openai.handler.EventStream", spy)
    return made


async def raw(server: Any, body: dict[str, Any]) -> bytes:
    async with server.http.post(server.url + COMPLETIONS, json=body) as response:
        assert response.status == 200
        return await response.read()


async def test_idle_stream_sends_comments_that_are_no_events(start):
    server = await start(Engine.fake(step_time_s=0.15), ServerConfig(sse_keep_alive_s=0.04))
    body = {**BODY, "max_tokens": 2, "stream": True}
    text = (await raw(server, body)).decode()
    assert text.count(": keep-alive\n\n") >= 2
    parts = [part for part in text.split("\n\n") if part != ": keep-alive"]
    assert parts[-1] == "" and all(part.startswith("data: ") for part in parts[:-1])
    chunks = [
        chunk
        async for chunk in await server.openai.completions.create(
            model=server.model, prompt="Hello", max_tokens=2, seed=1, stream=True
        )
    ]
    [whole] = (await post(server, COMPLETIONS, {**BODY, "max_tokens": 2}))["choices"]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole["text"]


async def test_zero_disables_keep_alive_comments(start):
    server = await start(Engine.fake(step_time_s=0.1), ServerConfig(sse_keep_alive_s=0.0))
    assert b": keep" not in await raw(server, {**BODY, "max_tokens": 2, "stream": True})


async def test_comment_follows_only_silence_and_its_timer_ends_with_the_stream(start, streams):
    server = await start(Engine.fake(step_time_s=0.02), ServerConfig(sse_keep_alive_s=100.0))
    async with server.http.post(
        server.url + COMPLETIONS, json={**BODY, "max_tokens": 60, "stream": True}
    ) as response:
        await response.content.readline()
        [stream] = streams
        stream._keep_alive()  # early: there was an event
        stream._written_s -= 1000.0
        stream._keep_alive()
        stream._keep_alive()  # early again: there was a comment
        text = (await response.read()).decode()
    assert text.count(": keep-alive") == 1 and text.endswith("data: [DONE]\n\n")
    assert stream._alarm.cancelled()


async def test_rejected_stream_request_has_its_http_status(start):
    server = await start(Engine.fake(step_time_s=0.1), ServerConfig(sse_keep_alive_s=0.01))
    for more in ({"prompt": "x" * 9000}, {"top_p": 7}, {"bad_words": [""]}, {"regex": "(?=a)"}):
        status, answer = await server.post(COMPLETIONS, {**BODY, "stream": True, **more})
        assert status == 400 and set(answer) == {"error"}


# ---- fields of OpenAI's protocol -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
        (chat_params.CompletionCreateParamsBase, ChatRequest),
    ],
)
def test_every_openai_client_parameter_is_supported_or_documented(params, kind):
    page = (Path(__file__).parent.parent.parent / "docs/http.md").read_text()
    ignored = page.split("These fields of OpenAI's protocol are ignored")[1].split("\n\n")[0]
    harmless = set(re.findall(r"`(\w+)`", ignored))
    assert set(params.__annotations__) <= {*kind.__struct_fields__, *harmless}
    assert not harmless & set(kind.__struct_fields__)


async def test_verbosity_reaches_the_template(start):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ verbosity | default('none') }}"
    server = await start(scripted_engine("x", template=template))
    for more, shown in (({}, "none"), ({"verbosity": "low"}, "low")):
        body = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True, **more}
        answer = await post(server, CHAT, body)
        assert server.engine.tokenizer.decode(answer["prompt_token_ids"]).endswith(shown)


async def test_unusual_assistant_message_is_served_or_rejected(start):
    template = "{% for m in messages %}{{ m }}{% endfor %}"
    server = await start(scripted_engine("x", template=template))
    asked = {"role": "assistant", "content": None, "audio": None, "function_call": None}
    body = {"max_tokens": 1, "return_token_ids": True}
    for content, refusal, shown in ((None, "No.", "No."), ("Yes.", None, "Yes.")):
        said = {**asked, "content": content, "refusal": refusal}
        answer = await post(server, CHAT, {**body, "messages": [*MESSAGES, said]})
        prompt = server.engine.tokenizer.decode(answer["prompt_token_ids"])
        assert prompt.endswith(str({"role": "assistant", "content": shown}))
    for name, value in (("function_call", {"name": "f", "arguments": ""}), ("audio", {"id": "a"})):
        said = {**asked, name: value}
        status, answer = await server.post(CHAT, {**body, "messages": [*MESSAGES, said]})
        assert (status, answer["error"]["param"]) == (400, f"messages[1].{name}")
