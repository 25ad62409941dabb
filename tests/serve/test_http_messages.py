"""POST /v1/messages: Anthropic's protocol over the same engine."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from forge_jax.engine.thread import Engine
from forge_serve.anthropic.serializer import complete_values
from forge_serve.config import ServerConfig
from tests.serve import families
from tests.serve.conftest import Server, scripted_engine

PATH = "/v1/messages"
USER = {"role": "user", "content": "What is the weather in Paris?"}
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
FORMAT = {"type": "json_schema", "schema": {"enum": [5]}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"


def message(**more: Any) -> dict[str, Any]:
    return {"model": "forge-fake", "messages": [USER], "max_tokens": 500, **more}


async def streamed(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events, and check that each is named as its data states."""
    async with server.http.post(server.url + PATH, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        *events, end = (await response.read()).decode().split("\n\n")
    assert end == ""
    found = []
    for event in events:
        name, _, data = event.partition("\ndata: ")
        found.append(json.loads(data))
        assert name == f"event: {found[-1]['type']}"
    return found


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream, accumulated as Anthropic's clients do it."""
    first, *events, last = events
    assert (first["type"], last["type"]) == ("message_start", "message_stop")
    whole, open_index = first["message"], None
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert open_index is None and event["index"] == len(whole["content"])
                open_index = event["index"]
                whole["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert event["index"] == open_index
                block, delta = whole["content"][-1], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        block["json"] += delta["partial_json"]
            case "content_block_stop":
                assert event["index"] == open_index
                block, open_index = whole["content"][-1], None
                arguments = block.pop("json")
                if block["type"] == "tool_use":
                    block["input"] = json.loads(arguments)
            case "message_delta":
                assert open_index is None
                whole |= event["delta"]
                whole["usage"] |= event["usage"]
    return whole


def alike(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without the fields that differ between requests."""
    kept = {key: message[key] for key in ("type", "role", "model", "stop_reason", "stop_sequence")}
    usage = message["usage"]
    prompt = sum(usage[key] for key in usage if "input" in key)
    blocks = [{key: block[key] for key in block if key != "id"} for block in message["content"]]
    return {**kept, "content": blocks, "prompt": prompt, "output": usage["output_tokens"]}


@pytest.mark.parametrize(
    ("answer", "more", "content", "reason"),
    [
        ("It is sunny.", {}, ["text"], "end_turn"),
        ("It is sunny.", {"max_tokens": 3}, ["text"], "max_tokens"),
        ("It is sunny.", {"stop_sequences": ["sun"]}, ["text"], "stop_sequence"),
        (CALL, {"tools": [TOOL]}, ["tool_use"], "tool_use"),
        (
            f"{THOUGHT}So:{CALL}\n{CALL}Done",
            {"tools": [TOOL]},
            ["thinking", "text", "tool_use", "tool_use"],
            "tool_use",
        ),
        ("Sunny", {"tools": [TOOL], "tool_choice": {"type": "any"}}, ["tool_use"], "tool_use"),
        (
            "Sunny",
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}},
            ["tool_use"],
            "tool_use",
        ),
        (CALL, {"tools": [TOOL], "tool_choice": {"type": "none"}}, ["text"], "end_turn"),
        ("", {}, [], "end_turn"),
    ],
)
async def test_answer_consists_of_blocks(start, answer, more, content, reason):
    server = await start(scripted_engine(answer, template=families.QWEN))
    status, whole = await server.post(PATH, message(**more))
    assert status == 200, whole
    assert whole["id"].startswith("msg_") and (whole["type"], whole["role"]) == (
        "message",
        "assistant",
    )
    assert [block["type"] for block in whole["content"]] == content
    assert whole["stop_reason"] == reason
    assert whole["stop_sequence"] == ("sun" if reason == "stop_sequence" else None)
    for block in whole["content"]:
        if block["type"] == "tool_use":
            assert (
                re.fullmatch("toolu_[0-9a-f]{24}", block["id"]) and block["name"] == "get_weather"
            )
            assert block["input"] in ({"city": "Paris"}, {"city": "Rome"})
    stream = put_together(await streamed(server, message(**more)))
    if answer.endswith("Done"):  # in a stream the text stays in its position
        assert stream["content"].pop() == {"type": "text", "text": "Done"}
        whole["content"][1]["text"] = whole["content"][1]["text"].removesuffix("Done")
    assert alike(stream) == alike(whole)


async def test_truncated_call_has_only_complete_values(start):
    server = await start(scripted_engine(CALL, template=families.HERMES))
    for cut in ("is", '"}'):
        body = message(tools=[TOOL], max_tokens=CALL.index(cut) + 1)
        _, whole = await server.post(PATH, body)
        [block] = whole["content"]
        assert (whole["stop_reason"], block["name"]) == ("max_tokens", "get_weather")
        events = await streamed(server, body)
        assert events[-2]["delta"]["stop_reason"] == "max_tokens"
        pieces = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
        assert '{"city": "Paris"}'.startswith("".join(pieces))
        assert block["input"] == json.loads(complete_values("".join(pieces)))
        assert block["input"] == ({} if cut == "is" else {"city": "Paris"})


@pytest.mark.parametrize(
    "value", [{}, {"a": {}}, {"a": [1, [], {"b": '}]\\"', "c": None}], "é": -1.5e3, "d": True}]
)
def test_complete_values_end_before_the_cut(value):
    text = json.dumps(value, ensure_ascii=False)
    assert complete_values(text) == text
    largest = 0
    for end in range(len(text)):
        found = complete_values(text[:end])
        begun = found.rstrip("]}")
        assert isinstance(json.loads(found), dict) and text.startswith(begun)
        assert len(begun) >= largest, "a longer text has no fewer values"
        largest = len(begun)


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("", "{}"),
        ('{"a', "{}"),
        ('{"a"', "{}"),
        ('{"a": 12', "{}"),
        ('{"a": 12,', '{"a": 12}'),
        ('{"a": 1, "b": "x', '{"a": 1}'),
        ('{"a": 1, "b": [{"c": tru', '{"a": 1, "b": [{}]}'),
        ('{"a": ["x", "y"', '{"a": ["x", "y"]}'),
    ],
)
def test_value_that_may_continue_is_left_out(text, complete):
    assert complete_values(text) == complete


async def test_turns_reach_the_template(start):
    server = await start(scripted_engine("x", template=families.QWEN))
    seen: list[Any] = []
    encode = server.engine.chat_template.encode

    def spy(messages: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((messages, kwargs))
        return encode(messages, *args, **kwargs)

    server.engine.chat_template.encode = spy
    rome = {"input": {"city": "Rome"}}
    turns = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_t1", "name": "get_weather", **rome},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_t1", "content": "sun"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "rain"}],
                },
                {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    notes = [
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "system", "content": "Gone.", "clear_at": "next_user_message"},
    ]
    now = {"role": "system", "content": "It snows.", "clear_at": "next_user_message"}
    turns = [*notes, *turns, now]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    body = message(messages=turns, system=system, tools=[TOOL], thinking={"type": "disabled"})
    status, answer = await server.post(PATH, body)
    assert status == 200, answer
    [(messages, options)] = seen
    function = {"name": "get_weather", "arguments": {"city": "Rome"}}
    assert messages == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        USER,
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "sun", "tool_call_id": "t1"},
        {"role": "tool", "content": "rain", "tool_call_id": "t2"},
        {"role": "user", "content": "And now?"},
        {"role": "system", "content": "It snows."},
    ]
    schema = {"parameters": TOOL["input_schema"]}
    plain = {"name": TOOL["name"], "description": TOOL["description"], **schema}
    assert options["tools"] == [{"type": "function", "function": plain}]
    assert options["enable_thinking"] is False and options["thinking"] is False
    assert not options["continue_final_message"]


async def test_final_assistant_turn_is_continued(start):
    server = await start(scripted_engine(" sunny.", template=families.QWEN))
    begun = [USER, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    _, answer = await server.post(PATH, message(messages=begun))
    assert answer["content"] == [{"type": "text", "text": " sunny."}]
    text = "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n<|im_start|>assistant\nIt is"
    assert answer["usage"]["input_tokens"] == len(server.engine.tokenizer.encode(text))


async def test_parallel_calls_can_be_disabled(start):
    server = await start(scripted_engine(CALL * 3, template=families.HERMES))
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    _, answer = await server.post(PATH, message(tools=[TOOL], tool_choice=choice))
    assert [block["type"] for block in answer["content"]] == ["tool_use"]


async def test_output_format_is_followed(start):
    server = await start(scripted_engine("x"))
    for more in ({"output_config": {"format": FORMAT}}, {"output_format": FORMAT}):
        _, answer = await server.post(PATH, message(**more))
        assert answer["content"] == [{"type": "text", "text": "5"}]


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
@pytest.mark.parametrize("kind", [{"type": "create"}, {"type": "continue"}])
async def test_thread_is_rejected_so_that_clients_resend_the_conversation(start, path, kind):
    server = await start(scripted_engine("x"))
    body = message(thread={**kind, "previous_message_id": "msg_1"}, messages=[])
    status, answer = await server.post(path, body)
    assert status == 400
    assert answer["error"].pop("message").startswith("thread: ")
    assert answer == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        },
    }
    assert (await server.post(path, message(thread=None)))[0] == 200


async def test_effort_display_and_examples_are_accepted(start):
    template = families.QWEN + "{{ reasoning_effort }} {{ tools[0].function.parameters.examples }}"
    server = await start(scripted_engine("<think>Hm.</think>Sunny.", template=template))
    tool = {**TOOL, "input_examples": [{"city": "Rome"}]}
    body = message(
        thinking={"type": "adaptive", "display": "omitted"},
        output_config={"effort": "max"},
        tools=[tool],
    )
    _, answer = await server.post(PATH, body)
    assert answer["content"] == [{"type": "text", "text": "Sunny."}]
    end = "max [{'city': 'Rome'}]"
    _, counted = await server.post(f"{PATH}/count_tokens", body)
    _, other = await server.post(f"{PATH}/count_tokens", {**body, "tools": [TOOL]})
    assert counted["input_tokens"] > other["input_tokens"] + len(end) / 2
    body["tool_choice"] = {"type": "any"}
    _, answer = await server.post(PATH, body)
    assert answer["content"][0]["type"] == "tool_use", "the grammar ignores the examples"


async def test_call_ids_return_as_the_model_writes_them(start):
    call = '[TOOL_CALLS][{"name": "get_weather", "arguments": {}}]'
    server = await start(scripted_engine(call, template=families.MISTRAL))
    _, answer = await server.post(PATH, message(tools=[TOOL]))
    [block] = answer["content"]
    assert len(block["id"]) == len("toolu_") + 9
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "sun"}
    turns = [
        USER,
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [result]},
    ]
    status, answer = await server.post(PATH, message(messages=turns, max_tokens=1))
    assert status == 200, "the template refuses ids that have not 9 characters"


async def test_count_tokens_matches_the_usage(start):
    server = await start(scripted_engine("x", template=families.HERMES))
    body = message(tools=[TOOL], system="Be brief.")
    status, counted = await server.post(f"{PATH}/count_tokens", body)
    _, answer = await server.post(PATH, body)
    assert status == 200 and counted == {"input_tokens": answer["usage"]["input_tokens"]}
    _, answer = await server.post(PATH, body)
    usage = answer["usage"]
    assert usage["cache_read_input_tokens"] > 0
    assert usage["cache_read_input_tokens"] + usage["input_tokens"] == counted["input_tokens"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            "must be one of user, assistant, system",
        ),
        (
            {"messages": [{"role": "system", "content": [{"type": "tool_addition"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{**USER, "output_config": {"effort": "low"}}]},
            "messages[0].output_config",
        ),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url", "name": "a", "url": "http://a"}]}, "mcp_servers"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "task_budget"),
        ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, "output_format"),
        ({"tools": [{**TOOL, "allowed_callers": ["code"]}]}, "tools[0].allowed_callers"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
            "messages[0].content[0].name",
        ),
        ({"tools": [{"name": "f", "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tools": [{}]}, "tools[0].name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": 1000}, "temperature"),
        ({"n": 2}, "n must be 1"),
        (b"{", "JSON"),
    ],
)
async def test_errors_have_the_anthropic_format(start, more, named):
    server = await start(scripted_engine("x", template=families.HERMES))
    status, answer = await server.post(PATH, message(**more) if isinstance(more, dict) else more)
    assert status == 400, answer
    assert answer.keys() == {"type", "error"} and answer["type"] == "error"
    assert answer["error"].keys() == {"type", "message"}
    assert answer["error"]["type"] == "invalid_request_error"
    assert named in answer["error"]["message"]


async def test_other_errors_have_their_own_types(start):
    server = await start(Engine.fake(), ServerConfig(api_key=("k",)))
    for headers, status, kind in (
        ({}, 401, "authentication_error"),
        ({"x-api-key": "wrong"}, 401, "authentication_error"),
        ({"x-api-key": "k", "Authorization": "Bearer wrong"}, 401, "authentication_error"),
        ({"x-api-key": "k"}, 404, "not_found_error"),
    ):
        body = message(model="another")
        async with server.http.post(server.url + PATH, json=body, headers=headers) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["type"]) == (status, kind)
    body, headers = message(max_tokens=2), {"x-api-key": "k"}
    async with server.http.post(server.url + PATH, json=body, headers=headers) as response:
        assert response.status == 200


async def test_mid_stream_failure_is_an_error_event(start):
    server = await start(Engine.fake(step_time_s=0.01))
    events = await streamed(server, message(max_tokens=4000, ignore_eos=True, timeout=0.2))
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "timeout_error"
