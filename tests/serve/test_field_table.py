"""The table of fields in docs/http.md: our column is what the server does with each of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from forge_jax.engine import Engine
from forge_jax.text import ChatTemplate

PAGE = Path(__file__).parent.parent.parent / "docs/http.md"
COMPLETION = {"prompt": "the dog", "max_tokens": 5, "seed": 1, "ignore_eos": True}
CHAT = {**COMPLETION, "messages": [{"role": "user", "content": "the dog"}]}
del CHAT["prompt"]
TOOLS = [{"type": "function", "function": {"name": "bark"}}]
SCHEMA = {"type": "object"}
ASSISTANT = [*CHAT["messages"], {"role": "assistant", "content": "the"}]
# What is sent, and where: a value, or a whole body to add.
IN_CHATS: dict[str, Any] = {
    "max_completion_tokens": 3,
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "tools": TOOLS,
    "tool_choice": {"tools": TOOLS, "tool_choice": "auto"},
    "parallel_tool_calls": False,
    "functions": [{"name": "bark"}],
    "function_call": "auto",
    "reasoning_effort": "low",
    "include_reasoning": False,
    "add_generation_prompt": False,
    "continue_final_message": {"messages": ASSISTANT, "continue_final_message": True},
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"chat_template_kwargs": {"a": 1}},
    "documents": [{"text": "a"}],
    "mm_processor_kwargs": {"mm_processor_kwargs": {"a": 1}},
    "thinking_token_budget": 5,
}
IN_COMPLETIONS: dict[str, Any] = {
    "max_tokens": 3,
    "best_of": 2,
    "logit_bias": {"logit_bias": {"5": 1.5}},
    "stop": ["e"],
    "stop_token_ids": [5],
    "stop_regex": "e+",
    "truncate_prompt_tokens": 4,
    "prompt_logprobs": 1,
    "logprob_token_ids": [5],
    "allowed_token_ids": [5, 6],
    "bad_words": ["dog"],
    "suffix": "the end",
    "prompt_embeds": "AAAA",
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"regex": "a+"}},
    "guided_json": {"guided_json": SCHEMA},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
    "json_schema": {"json_schema": SCHEMA},
    "regex": "a+",
    "ebnf": 'start: "a"',
    "grammar": 'root ::= "a"',
    "timeout": 20,
    "cache_salt": "a",
    "request_id": "a",
    "rid": "a",
    "user": "a",
    "lora_path": "a",
    "lora": [{"id": 0, "scale": 1.0}],
    "samplers": ["top_k"],
    "custom_params": {"custom_params": {"a": 1}},
    "custom_logit_processor": "a",
    "vllm_xargs": {"vllm_xargs": {"a": 1}},
    "kv_transfer_params": {"kv_transfer_params": {"a": 1}},
    "repetition_detection": {"repetition_detection": {"min_count": 2}},
    **dict.fromkeys(
        ["use_beam_search", "echo", "stream", "ignore_eos", "include_stop_str_in_output",
         "skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens",
         "return_token_ids", "return_tokens_as_token_ids"],
        True,
    ),
    **dict.fromkeys(
        ["n", "temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "logprobs",
         "presence_penalty", "frequency_penalty", "repetition_penalty", "priority",
         "length_penalty", "stream_interval", "mirostat"],
        1,
    ),
}  # fmt: skip
WRONG = [{"no field": "is of this form"}]


def table() -> dict[str, str]:
    section = PAGE.read_text().split("## The same fields elsewhere")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE)
    assert len(rows) == len(dict(rows)) > 60
    return dict(rows)


def body(name: str, value: Any) -> tuple[str, dict[str, Any]]:
    """The endpoint and the body that has the field; an object as a sample is all that is added."""
    path, plain = "/v1/completions", COMPLETION
    if name in IN_CHATS:
        path, plain = "/v1/chat/completions", CHAT
    return path, {**plain, **(value if isinstance(value, dict) else {name: value})}


def test_every_field_of_the_table_is_tried_and_every_tried_field_is_in_it():
    assert table().keys() == IN_CHATS.keys() | IN_COMPLETIONS.keys()


@pytest.mark.parametrize("name", table())
async def test_a_field_is_what_the_table_says(start, name):
    engine = Engine.fake(max_model_len=1024)
    engine.chat_template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
    )
    server = await start(engine)
    said = table()[name]
    path, sent = body(name, {**IN_CHATS, **IN_COMPLETIONS}[name])
    async with server.http.post(server.url + path, json=sent) as response:
        status, answer = response.status, await response.text()
    _, wrong = body(name, {name: WRONG})
    wrong_status, refused = await server.post(path, wrong)
    if said.startswith("refused"):
        assert status == 400
        assert wrong_status == 400 and refused["error"]["param"] == name
    elif said.startswith("supported"):
        assert status == 200, answer
        assert wrong_status == 400, "no value of it is wrong: it is not read"
        assert (refused["error"]["param"] or name).startswith(name)
    else:
        assert said == "ignored" and status == 200
        _, plain = body(name, {})
        _, without = await server.post(path, plain)
        assert choices(await server.post(path, sent)) == choices((200, without))
        assert wrong_status == (400 if name == "user" else 200)


def choices(reply: tuple[int, Any]) -> Any:
    assert reply[0] == 200
    return reply[1]["choices"]
