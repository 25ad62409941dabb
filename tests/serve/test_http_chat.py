"""POST /v1/chat/completions through OpenAI's own client."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from forge_jax.engine.thread import Engine
from forge_jax.text import ChatTemplate, chat_template

USER = [{"role": "user", "content": "Hello"}]


async def test_answer_has_the_openai_format(server):
    chat = await server.openai.chat.completions.create(
        model=server.model, messages=USER, max_tokens=8, seed=1
    )
    assert chat.id.startswith("chatcmpl-")
    assert chat.object == "chat.completion"
    [choice] = chat.choices
    assert choice.message.role == "assistant"
    assert isinstance(choice.message.content, str)
    assert choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")
    prompt = server.engine.chat_template.encode(USER, server.engine.tokenizer)
    assert chat.usage.prompt_tokens == len(prompt)


async def test_stream_opens_with_the_role_and_closes_with_the_reason(server):
    options: dict[str, Any] = {"model": server.model, "messages": USER, "seed": 2, "n": 2}
    options["max_completion_tokens"] = 30
    whole = await server.openai.chat.completions.create(**options)
    stream = await server.openai.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *chunks, last = chunks
    assert last.choices == [] and last.usage == whole.usage
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert all(choice.delta.role is None for choice in mine[1:])
        assert "".join(c.delta.content or "" for c in mine) == whole.choices[index].message.content
        assert [c.finish_reason for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == whole.choices[index].finish_reason


async def test_max_tokens_has_two_names_and_no_default(start):
    server = await start(Engine.fake(max_model_len=64))
    for names, expected in (
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 9, "max_completion_tokens": 4}, 4),
        ({"max_tokens": None}, None),
    ):
        body = {"messages": USER, "ignore_eos": True, **names}
        status, answer = await server.post("/v1/chat/completions", body)
        assert status == 200
        usage = answer["usage"]
        room = 64 - usage["prompt_tokens"]
        assert usage["completion_tokens"] == (room if expected is None else expected)


async def test_messages_reach_the_template_as_text(start):
    server = await start(Engine.fake(max_model_len=8192))
    template, tokenizer = server.engine.chat_template, server.engine.tokenizer

    async def prompt_of(messages: list[dict[str, Any]], **more: Any) -> list[int]:
        body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, **more}
        status, answer = await server.post("/v1/chat/completions", body)
        assert status == 200, answer
        return answer["prompt_token_ids"]

    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert await prompt_of([{"role": "user", "content": parts}]) == await prompt_of(USER)
    assert await prompt_of([{"role": "developer", "content": "a"}]) == await prompt_of(
        [{"role": "system", "content": "a"}]
    )
    assert await prompt_of(USER) == template.encode(USER, tokenizer)
    assert await prompt_of(USER, add_generation_prompt=False) == template.encode(
        USER, tokenizer, add_generation_prompt=False
    )
    begun = [*USER, {"role": "assistant", "content": "I would"}]
    assert await prompt_of(begun, continue_final_message=True) == template.encode(
        begun, tokenizer, add_generation_prompt=False, continue_final_message=True
    )
    template.__init__(
        "{% for m in messages %}{{ m.content if m.content is string else "
        "m.content | map(attribute='text') | join('+') }}{% endfor %}"
    )
    assert tokenizer.decode(await prompt_of([{"role": "user", "content": parts}])) == "Hel+lo"
    long = [{"role": "user", "content": "a b " * 1100}, *USER]
    assert await prompt_of(long) == template.encode(long, tokenizer)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_list_each_token_with_its_bytes(server, stream):
    options: dict[str, Any] = {"model": server.model, "messages": USER, "max_tokens": 9, "seed": 1}
    options |= {"logprobs": True, "top_logprobs": 2, "extra_body": {"ignore_eos": True}}
    if stream:
        chunks = await server.openai.chat.completions.create(**options, stream=True)
        parts = [chunk.choices[0].logprobs async for chunk in chunks]
        content = [entry for part in parts if part is not None for entry in part.content]
    else:
        chat = await server.openai.chat.completions.create(**options)
        content = chat.choices[0].logprobs.content
    assert len(content) == 9
    for entry in content:
        assert entry.logprob <= 0.0
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token or not entry.bytes
        assert len(entry.top_logprobs) == 2


async def test_logprobs_work_without_alternatives(server):
    body = {"messages": USER, "max_tokens": 2, "logprobs": True, "ignore_eos": True}
    _, answer = await server.post("/v1/chat/completions", body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], []]


async def test_token_ids_are_returned_on_request(server):
    body = {"messages": USER, "max_tokens": 5, "seed": 1, "return_token_ids": True}
    _, whole = await server.post("/v1/chat/completions", body)
    events = await server.events("/v1/chat/completions", {**body, "stream": True})
    chunks = [json.loads(event) for event in events[:-1]]
    streamed = [id for c in chunks for id in c["choices"][0].get("token_ids", ())]
    assert streamed == whole["choices"][0]["token_ids"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert not any("prompt_token_ids" in choice for c in chunks for choice in c["choices"])
    options = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    *events, _ = await server.events("/v1/chat/completions", {**body, **options})
    with_prompt = ["prompt_token_ids" in json.loads(event) for event in events]
    assert with_prompt == [True] + [False] * (len(events) - 1)


async def test_model_without_chat_template_names_the_remedy(start):
    engine = Engine.fake()
    engine.chat_template = None
    server = await start(engine)
    status, answer = await server.post("/v1/chat/completions", {"messages": USER})
    assert status == 400
    assert "--chat-template" in answer["error"]["message"]


async def test_slow_template_is_rendered_off_the_event_loop(start, monkeypatch):
    """A model's template may take up to its time limit, but only the first may block the loop."""
    engine = Engine.fake()
    monkeypatch.setattr(chat_template, "SLOW_S", 0.0)  # every template counts as slow
    engine.chat_template = ChatTemplate("{{ messages[0].content }}")
    server = await start(engine)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    assert (await server.post("/v1/chat/completions", body))[0] == 200
    assert engine.chat_template.slow
    seen: list[str] = []
    encode = engine.chat_template.encode

    def spy(*args, **kwargs):
        seen.append(threading.current_thread().name)
        return encode(*args, **kwargs)

    engine.chat_template.encode = spy
    assert (await server.post("/v1/chat/completions", body))[0] == 200
    assert seen[0] != threading.current_thread().name
