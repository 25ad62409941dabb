"""/v1/responses: OpenAI's newer protocol over the same engine, checked with its SDK's types."""

from __future__ import annotations

import asyncio
import json
import typing
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types import responses as sdk

from forge_jax.engine.thread import Engine
from forge_serve.config import ServerConfig
from tests.serve import families, open_responses
from tests.serve.conftest import Server, scripted_engine

PATH = "/v1/responses"
USER = {"role": "user", "content": "What is the weather in Paris?"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": SCHEMA,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"
LOGPROBS = "message.output_text.logprobs"
# Fields of a finished call in the protocol's reference, and of an error in Open Responses.
MORE_THAN_THE_SDK = {"name", "error"}

EVENTS: dict[str, type[pydantic.BaseModel]] = {
    name: event
    for event in typing.get_args(typing.get_args(sdk.ResponseStreamEvent)[0])
    for name in typing.get_args(event.model_fields["type"].annotation)
}


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "forge-fake", "input": [USER], "max_output_tokens": 500, **more}


async def created(server: Server, **more: Any) -> dict[str, Any]:
    """Return a whole answer, checked with the SDK's type."""
    status, answer = await server.post(PATH, ask(**more))
    assert status == 200, answer
    sdk.Response.model_validate(answer)
    open_responses.check_response(answer)
    return answer


async def streamed(server: Server, path: str = PATH, **more: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, checked for type, name and number."""
    body = ask(stream=True, **more)
    async with server.http.post(server.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        return read_events((await response.read()).decode())


def read_events(text: str, first: int = 0) -> list[dict[str, Any]]:
    *events, end = text.split("\n\n")
    assert end == ""
    found = []
    for number, event in enumerate(events, start=first):
        name, _, data = event.partition("\ndata: ")
        found.append(json.loads(data))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
        read = EVENTS[found[-1]["type"]].model_validate(found[-1])
        assert set(read.model_extra or ()) <= MORE_THAN_THE_SDK
        open_responses.check_event(found[-1])
    return found


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a stream's output, assembled from pieces that are checked to fit what is open."""
    output: list[dict[str, Any]] = []
    open_item: dict[str, Any] | None = None
    for event in events:
        kind = event["type"]
        if "item_id" in event:
            assert open_item is not None
            assert (event["item_id"], event["output_index"]) == (open_item["id"], len(output))
        match kind:
            case "response.output_item.added":
                assert open_item is None and event["output_index"] == len(output)
                open_item = event["item"]
                assert open_item["status"] == "in_progress" and not open_item.get("content")
                text, logprobs = open_item.get("arguments", ""), []
            case "response.content_part.added":
                assert event["part"]["text"] == "" and event["content_index"] == 0
            case (
                "response.output_text.delta"
                | "response.reasoning_text.delta"
                | "response.function_call_arguments.delta"
            ):
                text += event["delta"]
                logprobs += event.get("logprobs", [])
            case "response.output_text.done" | "response.reasoning_text.done":
                assert event["text"] == text
                assert event.get("logprobs", []) == logprobs
            case "response.function_call_arguments.done":
                assert event["arguments"] == text
            case "response.content_part.done":
                assert event["part"]["text"] == text
                part = event["part"]
            case "response.output_item.done":
                item = event["item"]
                assert item["id"] == open_item["id"] and event["output_index"] == len(output)
                if item["type"] == "function_call":
                    assert item["arguments"] == text
                else:
                    assert item["content"] == [part]
                output.append(item)
                open_item = None
    assert open_item is None
    return output


def alike(response: dict[str, Any]) -> dict[str, Any]:
    """Return the response without the fields that differ between requests."""
    ids = ("id", "call_id")
    output = [{k: item[k] for k in item if k not in ids} for item in response["output"]]
    usage = {**response["usage"], "input_tokens_details": None}
    left_out = ("id", "created_at", "completed_at", "output", "usage")
    kept = {key: response[key] for key in response if key not in left_out}
    return {**kept, "output": output, "usage": usage}


async def over(server: Server, response_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            status, answer = await server.get(f"{PATH}/{response_id}")
            assert status == 200, answer
            if answer["status"] not in ("queued", "in_progress"):
                return answer
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("answer", "more", "items", "status"),
    [
        ("It is sunny.", {}, ["message"], "completed"),
        ("It is sunny.", {"max_output_tokens": 3}, ["message"], "incomplete"),
        (CALL, {"tools": [TOOL]}, ["function_call"], "completed"),
        (
            f"{THOUGHT}So:{CALL}\n{CALL}Done",
            {"tools": [TOOL]},
            ["reasoning", "message", "function_call", "function_call", "message"],
            "completed",
        ),
        (THOUGHT + "Yes.", {"max_output_tokens": 4}, ["reasoning"], "incomplete"),
        (THOUGHT + "Yes.", {"reasoning": {"effort": "none"}}, ["message"], "completed"),
        ("Sunny", {"tools": [TOOL], "tool_choice": "required"}, ["function_call"], "completed"),
        (
            "Sunny",
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "get_weather"}},
            ["function_call"],
            "completed",
        ),
        (CALL, {"tools": [TOOL], "tool_choice": "none"}, ["message"], "completed"),
        (
            CALL * 3,
            {"tools": [TOOL], "parallel_tool_calls": False},
            ["function_call"],
            "completed",
        ),
        ("", {}, [], "completed"),
    ],
)
async def test_answer_consists_of_items(start, answer, more, items, status):
    special = ["<think>", "</think>"] if THOUGHT in answer else []
    server = await start(scripted_engine(answer, template=families.QWEN, special_tokens=special))
    whole = await created(server, **more)
    assert whole["id"].startswith("resp_") and whole["object"] == "response"
    assert [item["type"] for item in whole["output"]] == items
    assert whole["status"] == status
    cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
    assert whole["incomplete_details"] == cut
    assert (whole["completed_at"] is None) == (status == "incomplete")
    for item in whole["output"]:
        assert item["status"] == ("completed" if item is not whole["output"][-1] else status)
        if item["type"] == "function_call":
            assert item["call_id"] and item["name"] == "get_weather"
            assert json.loads(item["arguments"]) in ({"city": "Paris"}, {"city": "Rome"})
    events = await streamed(server, **more)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == f"response.{status}"
    assert put_together(events) == last["response"]["output"]
    assert alike(last["response"]) == alike(whole)


async def test_stream_has_every_event_in_order(start):
    server = await start(scripted_engine(f"{THOUGHT}Hi{CALL}", template=families.QWEN))
    events = await streamed(server, tools=[TOOL])
    names = [event["type"].removeprefix("response.") for event in events]
    once = [name for i, name in enumerate(names) if name != names[i - 1]]
    assert once == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert names.count("output_text.delta") == 2, "a delta for each token"
    assert names.count("function_call_arguments.delta") > 10
    assert all(event["response"]["usage"] is None for event in events[:2])
    assert events[-1]["response"]["usage"]["output_tokens"] > 0


async def test_truncated_call_is_an_incomplete_item(start):
    server = await start(scripted_engine(CALL, template=families.HERMES))
    more = {"tools": [TOOL], "max_output_tokens": len(CALL) - 20}
    [streamed_item] = put_together(await streamed(server, **more))
    [item] = (await created(server, **more))["output"]
    assert item["type"] == streamed_item["type"] == "function_call"
    assert item["status"] == streamed_item["status"] == "incomplete"
    assert item["arguments"] == streamed_item["arguments"] != ""
    assert CALL[:-20].endswith(item["arguments"])


async def test_response_echoes_the_request_fields(start):
    server = await start(scripted_engine("x", template=families.HERMES))
    asked = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 7,
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "tools": [TOOL],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "function", "name": "get_weather"}]},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "truncation": "disabled",
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "top_logprobs": 2,
        "store": False,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }  # fmt: skip
    answer = await created(server, **asked, reasoning={"effort": "low", "summary": "auto"})
    # Every tool of a response has `strict`.
    assert {name: answer[name] for name in asked} == {**asked, "tools": [{**TOOL, "strict": False}]}
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    plain = await created(server)
    assert (plain["temperature"], plain["top_p"], plain["top_logprobs"]) == (1.0, 1.0, 0)
    assert (plain["tools"], plain["tool_choice"], plain["metadata"]) == ([], "auto", {})
    assert plain["text"] == {"format": {"type": "text"}} and plain["store"] is True
    assert plain["instructions"] is None and plain["error"] is None
    assert plain["presence_penalty"] == plain["frequency_penalty"] == 0
    assert plain["service_tier"] == "default"


async def test_unknown_and_redundant_fields_are_ignored(start):
    server = await start(scripted_engine("x", template=families.HERMES))
    answer = await created(
        server,
        include=["reasoning.encrypted_content", "file_search_call.results"],
        service_tier="auto",
        stream_options=None,
        something_new={"a": 1},
    )
    assert answer["output"][0]["content"][0]["text"] == "x"


# ---- the prompt ------------------------------------------------------------------------------


def spy_on_template(server: Server) -> list[tuple[Any, dict[str, Any]]]:
    seen: list[tuple[Any, dict[str, Any]]] = []
    encode = server.engine.chat_template.encode

    def spy(messages: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((messages, kwargs))
        return encode(messages, *args, **kwargs)

    server.engine.chat_template.encode = spy
    return seen


async def test_items_reach_the_template_as_messages(start):
    server = await start(scripted_engine("x", template=families.QWEN))
    seen = spy_on_template(server)
    call = {"type": "function_call", "name": "get_weather", "arguments": '{"city": "Rome"}'}
    items = [
        {"type": "message", "role": "developer", "content": "Speak French."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "no"}],
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "I ", "annotations": []},
                     {"type": "output_text", "text": "look.", "annotations": []}]},
        {**call, "call_id": "c1"},
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2",
         "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "So."}],
         "encrypted_content": "?"},
        {"role": "assistant", "content": "Rain."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No more."}]},
        {"role": "user", "content": "Why?"},
    ]  # fmt: skip
    await created(
        server, input=items, instructions="Be brief.", tools=[TOOL], reasoning={"effort": "high"}
    )
    [(messages, options)] = seen
    function = {"name": "get_weather", "arguments": {"city": "Rome"}}
    assert messages == [
        {"role": "system", "content": "Be brief.\n\nSpeak French."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": function},
                {"id": "c2", "type": "function", "function": function},
            ],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "sun", "tool_call_id": "c1"},
        {"role": "tool", "content": "rain", "tool_call_id": "c2"},
        {"role": "assistant", "content": "Rain.", "reasoning_content": "So."},
        {"role": "assistant", "content": "No more."},
        {"role": "user", "content": "Why?"},
    ]
    schema = {"parameters": TOOL["parameters"]}
    plain = {"name": TOOL["name"], "description": TOOL["description"], **schema}
    assert options["tools"] == [{"type": "function", "function": plain}]
    assert options["reasoning_effort"] == "high" and options["thinking"] is True
    assert not options["continue_final_message"] and options["add_generation_prompt"]


async def test_conversation_continues_from_a_stored_response(start):
    server = await start(scripted_engine(f"{THOUGHT}So:{CALL}", template=families.QWEN))
    seen = spy_on_template(server)
    first = await created(server, instructions="Be brief.", tools=[TOOL])
    call = first["output"][-1]
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}]
    second = await created(
        server, input=outputs, previous_response_id=first["id"], instructions="Be long."
    )
    assert second["previous_response_id"] == first["id"]
    events = await streamed(
        server, input="And?", previous_response_id=second["id"], instructions="Be long."
    )
    third = events[-1]["response"]
    (_, _), (after_one, _), (after_two, _) = seen
    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    calls = [{"id": call["call_id"], "type": "function", "function": function}]
    one = [
        USER,
        {
            "role": "assistant",
            "content": "So:",
            "tool_calls": calls,
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "sun", "tool_call_id": call["call_id"]},
    ]
    system = {"role": "system", "content": "Be long."}
    assert after_one == [system, *one]
    # Without tools, the second answer's call is text.
    two = {"role": "assistant", "content": f"So:{CALL}", "reasoning_content": "Hm."}
    assert after_two == [system, *one, two, {"role": "user", "content": "And?"}]
    details = third["usage"]["input_tokens_details"]
    assert details["cached_tokens"] > 0

    _, listed = await server.get(f"{PATH}/{third['id']}/input_items?order=asc")
    kinds = [item["type"] for item in listed["data"]]
    assert kinds == [
        *("message", "reasoning", "message", "function_call"),
        *("function_call_output", "reasoning", "message"),
        "message",
    ]
    assert listed["data"][3]["id"] == call["id"]


async def test_only_allowed_tools_reach_the_template(start):
    server = await start(scripted_engine("x", template=families.HERMES))
    seen = spy_on_template(server)
    tools = [TOOL, {**TOOL, "name": "other"}]
    allowed = [{"type": "function", "name": "other"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    answer = await created(server, tools=tools, tool_choice=choice)
    assert [item["name"] for item in answer["output"]] == ["other"]
    [(_, options)] = seen
    assert [tool["function"]["name"] for tool in options["tools"]] == ["other"]
    assert answer["tools"] == [{**tool, "strict": False} for tool in tools]
    assert answer["tool_choice"] == choice


async def test_output_format_is_followed(start):
    server = await start(scripted_engine("x"))
    form = {"type": "json_schema", "name": "five", "schema": {"enum": [5]}, "strict": True}
    answer = await created(server, text={"format": form})
    assert answer["output"][0]["content"][0]["text"] == "5"
    assert answer["text"] == {"format": form}


async def test_input_token_count_matches_the_usage(start):
    server = await start(scripted_engine("x", template=families.HERMES))
    first = await created(server, tools=[TOOL])
    body = ask(tools=[TOOL], instructions="Be brief.", previous_response_id=first["id"])
    status, counted = await server.post(f"{PATH}/input_tokens", body)
    answer = await created(server, **body)
    assert status == 200
    number = answer["usage"]["input_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": number}


# ---- usage and logprobs ----------------------------------------------------------------------


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["text", "special tokens"])
async def test_reasoning_tokens_are_counted(start, special):
    """Covers chats, with and without a stream. A byte is a token here."""
    server = await start(
        scripted_engine(THOUGHT + "Yes.", template=families.QWEN, special_tokens=special)
    )
    reasoning = len("\nHm.\n") + (2 if special else len("<think></think>"))
    whole = await created(server)
    usage = whole["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": reasoning}
    assert usage["output_tokens"] == reasoning + len("\n\nYes.") + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    events = await streamed(server)
    assert (
        events[-1]["response"]["usage"]["output_tokens_details"] == (usage["output_tokens_details"])
    )
    again = await created(server)
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > 0

    chat = {"messages": [USER], "n": 2}
    _, answer = await server.post("/v1/chat/completions", chat)
    details = answer["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == 2 * reasoning
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last, _ = await server.events("/v1/chat/completions", {**chat, **options})
    details = json.loads(last)["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == 2 * reasoning


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_logprobs_match_the_text(start, stream):
    answer = f"{THOUGHT}So:{CALL}"
    server = await start(scripted_engine(answer, template=families.QWEN))
    more = {"tools": [TOOL], "include": [LOGPROBS], "top_logprobs": 2}
    if stream:
        output = put_together(await streamed(server, **more))
    else:
        output = (await created(server, **more))["output"]
    [message] = [item for item in output if item["type"] == "message"]
    [part] = message["content"]
    assert part["text"] == "So:"
    assert "".join(entry["token"] for entry in part["logprobs"]).lstrip("\n") == "So:"
    for entry in part["logprobs"]:
        assert len(entry["top_logprobs"]) == 2
        assert bytes(entry["bytes"]).decode() == entry["token"] and entry["logprob"] <= 0
    output = (await created(server, tools=[TOOL]))["output"]
    [message] = [item for item in output if item["type"] == "message"]
    assert message["content"][0]["logprobs"] == []


# ---- OpenAI's client --------------------------------------------------------------------------


class Place(pydantic.BaseModel):
    city: Literal["Paris"]


async def test_openai_client_creates_retrieves_lists_and_deletes(start):
    server = await start(scripted_engine("It is sunny.", template=families.HERMES))
    client = server.openai.responses
    made = await client.create(model=server.model, input="Hi", instructions="Be brief.")
    assert made.output_text == "It is sunny." and made.status == "completed"
    assert made.usage is not None and made.usage.output_tokens == 13
    found = await client.retrieve(made.id)
    assert found.to_dict() == made.to_dict()
    more = await client.create(
        model=server.model,
        input=[{"role": "user", "content": "Go on"}],
        previous_response_id=made.id,
    )
    texts = []
    async for item in client.input_items.list(more.id, limit=2, order="asc"):
        texts.append(item.content[0].text)
    assert texts == ["Hi", "It is sunny.", "Go on"]
    newest = await client.input_items.list(more.id, limit=1)
    assert newest.data[0].content[0].text == "Go on" and newest.has_more

    await client.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="deleted"):
        await client.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.create(model=server.model, input="Hi", previous_response_id=made.id)
    # A continuation still has its conversation.
    last = await client.create(model=server.model, input="?", previous_response_id=more.id)
    assert len((await client.input_items.list(last.id)).data) == 5


async def test_openai_client_streams_and_parses(start):
    server = await start(scripted_engine(f"So:{CALL}", template=families.HERMES))
    client = server.openai.responses
    options = {"model": server.model, "input": "Hi", "max_output_tokens": 500}
    async with client.stream(**options, tools=[{**TOOL, "strict": True}]) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    message, call = final.output
    assert message.content[0].text == "So:" and call.parsed_arguments == {"city": "Paris"}

    parsed = await client.parse(**options, text_format=Place)
    assert parsed.output_parsed == Place(city="Paris")
    async with client.stream(**options, text_format=Place) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == Place(city="Paris")


async def test_openai_client_runs_in_the_background_and_cancels(start):
    server = await start(Engine.fake(max_model_len=4096, step_time_s=0.005))
    client = server.openai.responses
    options = {"model": server.model, "input": "Hi", "background": True}
    made = await client.create(**options, max_output_tokens=3, extra_body={"ignore_eos": True})
    assert made.status == "queued" and made.background
    await over(server, made.id)
    done = await client.retrieve(made.id)
    assert done.status == "incomplete" and done.usage.output_tokens == 3
    assert done.output_text
    assert (await client.cancel(made.id)).status == "incomplete", "it was over"

    made = await client.create(**options, extra_body={"ignore_eos": True})
    gone = await client.cancel(made.id)
    assert gone.status == "cancelled" and gone.id == made.id
    assert (await client.cancel(made.id)).status == "cancelled"
    await server.idle()
    plain = await client.create(model=server.model, input="Hi", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.cancel(plain.id)


# ---- in the background --------------------------------------------------------------------------


async def test_background_events_can_be_replayed(start):
    server = await start(Engine.fake(max_model_len=4096, step_time_s=0.002))
    body = ask(background=True, stream=True, max_output_tokens=60, ignore_eos=True)
    async with server.http.post(server.url + PATH, json=body) as response:
        beginning = await response.content.readuntil(b"\n\n")
        first = json.loads(beginning.partition(b"data: ")[2])
        response_id = first["response"]["id"]
        assert first["response"]["status"] == "queued"
    # This client disconnects; another one continues reading from the middle meanwhile.
    url = f"{server.url}{PATH}/{response_id}?stream=true"
    async with server.http.get(url) as response:
        whole = read_events((await response.read()).decode())
    names = [event["type"] for event in whole]
    assert names[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert names[-1] == "response.incomplete"
    async with server.http.get(f"{url}&starting_after=9") as response:
        rest = read_events((await response.read()).decode(), first=10)
    assert rest == whole[10:]
    _, answer = await server.get(f"{PATH}/{response_id}")
    assert answer == whole[-1]["response"]
    assert answer["output"] == put_together(whole)
    # The SDK resumes a stream in the same way.
    stream = await server.openai.responses.retrieve(response_id, stream=True, starting_after=9)
    assert [event.sequence_number async for event in stream] == [
        event["sequence_number"] for event in rest
    ]
    status, answer = await server.get(f"{PATH}/{response_id}?stream=true&starting_after=x")
    assert (status, answer["error"]["param"]) == (400, "starting_after")


async def test_cancelled_stream_ends(start):
    server = await start(Engine.fake(max_model_len=4096, step_time_s=0.002))
    body = ask(background=True, stream=True, max_output_tokens=3000, ignore_eos=True)
    async with server.http.post(server.url + PATH, json=body) as response:
        head = (await response.content.readuntil(b"\n\n")).decode()
        for _ in range(9):
            head += (await response.content.readuntil(b"\n\n")).decode()
        response_id = read_events(head)[0]["response"]["id"]
        status, answer = await server.post(f"{PATH}/{response_id}/cancel", {})
        rest = (await response.read()).decode()
    events = read_events(head + rest)
    assert events[-1]["type"] == "response.incomplete"
    assert (status, answer) == (200, events[-1]["response"])
    assert answer["status"] == "cancelled" and answer["output"] == put_together(events)
    assert answer["output"][0]["status"] == "incomplete" and answer["usage"]["output_tokens"] > 2
    await server.idle()
    assert (await server.get(f"{PATH}/{response_id}"))[1] == answer


async def test_running_response_can_be_seen_and_deleted_but_not_continued(start):
    server = await start(Engine.fake(max_model_len=4096, step_time_s=0.005))
    made = await created(server, background=True, max_output_tokens=3000, ignore_eos=True)
    async with asyncio.timeout(60):
        while True:
            _, seen = await server.get(f"{PATH}/{made['id']}")
            if seen["output"]:
                break
            await asyncio.sleep(0.001)
    assert seen["status"] == "in_progress" and seen["output"][0]["status"] == "in_progress"
    sdk.Response.model_validate(seen)
    status, answer = await server.post(PATH, ask(previous_response_id=made["id"]))
    assert (status, answer["error"]["param"]) == (400, "previous_response_id")
    async with server.http.delete(f"{server.url}{PATH}/{made['id']}") as response:
        gone = await response.json()
    assert gone == {"id": made["id"], "object": "response", "deleted": True}
    assert (await server.get(f"{PATH}/{made['id']}"))[0] == 404
    await server.idle()


async def test_background_failure_is_reported_in_the_response(start):
    server = await start(Engine.fake(max_model_len=4096, step_time_s=0.005))
    body = {"max_output_tokens": 3000, "ignore_eos": True, "timeout": 0.05, "background": True}
    made = await created(server, **body)
    answer = await over(server, made["id"])
    assert answer["status"] == "failed" and answer["error"]["code"] == "server_error"
    assert "longer than 0.05 s" in answer["error"]["message"]
    sdk.Response.model_validate(answer)


# ---- failures and disconnects ----------------------------------------------------------------


async def test_mid_stream_failure_is_reported_in_events(start):
    server = await start(Engine.fake(max_model_len=4096, step_time_s=0.005))
    body = {"max_output_tokens": 3000, "ignore_eos": True, "timeout": 0.05}
    events = await streamed(server, **body)
    error, failed = events[-2:]
    assert error["type"] == "error" and error["code"] == "deadline_exceeded"
    assert error["error"]["code"] == error["code"] and error["error"]["type"] == "timeout_error"
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["message"] == error["message"]
    assert put_together(events) == failed["response"]["output"]
    status, answer = await server.get(f"{PATH}/{failed['response']['id']}")
    assert (status, answer) == (200, failed["response"])
    status, answer = await server.post(PATH, ask(**body))
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")


async def test_client_disconnect_ends_its_response(start):
    server = await start(Engine.fake(max_model_len=4096, step_time_s=0.005))
    body = ask(stream=True, max_output_tokens=3000, ignore_eos=True)
    async with server.http.post(server.url + PATH, json=body) as response:
        data = (await response.content.readuntil(b"\n\n")).partition(b"data: ")[2]
        response_id = json.loads(data)["response"]["id"]
        _, seen = await server.get(f"{PATH}/{response_id}")
        assert seen["status"] == "in_progress"
        response.close()
    await server.idle()
    answer = await over(server, response_id)
    assert answer["status"] == "cancelled" and answer["completed_at"] is None


# ---- the store ------------------------------------------------------------------------------


async def test_unstored_response_is_not_found(start):
    server = await start(scripted_engine("x"))
    for answer in (
        await created(server, store=False),
        (await streamed(server, store=False))[-1]["response"],
    ):
        assert answer["store"] is False
        status, error = await server.get(f"{PATH}/{answer['id']}")
        assert (status, error["error"]["code"]) == (404, "response_not_found")
    assert server.service.responses.num_bytes == 0


async def test_server_without_a_store_reports_it(start):
    server = await start(scripted_engine("x"), ServerConfig(max_stored_responses=0))
    answer = await created(server)
    assert answer["store"] is False
    assert (await server.get(f"{PATH}/{answer['id']}"))[0] == 404
    for name in ("store", "background"):
        status, answer = await server.post(PATH, ask(**{name: True}))
        assert (status, answer["error"]["param"]) == (400, name)
        assert "--max-stored-responses" in answer["error"]["message"]


async def test_least_recently_used_response_is_evicted(start):
    server = await start(scripted_engine("x"), ServerConfig(max_stored_responses=2))
    one, two = [(await created(server))["id"] for _ in range(2)]
    assert (await server.get(f"{PATH}/{one}"))[0] == 200  # used
    three = (await created(server))["id"]
    found = [(await server.get(f"{PATH}/{name}"))[0] for name in (one, two, three)]
    assert found == [200, 404, 200]
    for path in (f"/{two}", f"/{two}/input_items"):
        status, answer = await server.get(PATH + path)
        assert status == 404 and "make room" in answer["error"]["message"]
    status, answer = await server.post(f"{PATH}/{two}/cancel", {})
    assert status == 404
    status, answer = await server.post(PATH, ask(previous_response_id=two))
    assert status == 404 and answer["error"]["param"] == "previous_response_id"


async def test_tenants_do_not_see_each_others_responses(start):
    server = await start(scripted_engine("x"), ServerConfig(api_key=("a", "b")))
    mine, other = ({"Authorization": f"Bearer {key}"} for key in "ab")
    url = server.url + PATH
    async with server.http.post(url, json=ask(), headers=mine) as response:
        made = await response.json()
    for headers, status in ((mine, 200), (other, 404), ({}, 401)):
        for method, path in (
            ("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", ""),
        ):  # fmt: skip
            if headers is mine and method != "GET":
                continue
            name = f"{url}/{made['id']}{path}"
            async with server.http.request(method, name, headers=headers) as response:
                assert response.status == status, (method, path)
        body = ask(previous_response_id=made["id"])
        async with server.http.post(url, json=body, headers=headers) as response:
            assert response.status == status


# ---- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [USER, {"type": "item_reference", "id": "x"}]}, "input[1].type"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
        ),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "input[0].call_id",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {
                "type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
            "tool_choice.tools[0]",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "text.format"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprob"]}, "include[0]"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": 1000}, "temperature"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"input": "a" * 200_000}, "input"),
    ],
)  # fmt: skip
async def test_impossible_requests_are_rejected_by_name(start, more, param):
    server = await start(scripted_engine("x", template=families.HERMES))
    status, answer = await server.post(PATH, ask(**more))
    assert status == 400, answer
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"
    assert server.service.responses.num_responses == 0


async def test_empty_text_is_a_valid_input(start):
    server = await start(scripted_engine("x", template=families.HERMES))
    made = await created(server, input="")
    assert made["usage"]["input_tokens"] > 0
    _, listed = await server.get(f"{PATH}/{made['id']}/input_items")
    assert [item["content"] for item in listed["data"]] == [[{"type": "input_text", "text": ""}]]
    for nothing, message in ((None, "input is required"), ([], "input must not be empty")):
        status, answer = await server.post(PATH, ask(input=nothing))
        assert (status, answer["error"]["message"]) == (400, message)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=-1", "limit"),
        ("order=up", "order"),
        ("after=nothing", "after"),
    ],
)
async def test_invalid_page_parameters_are_rejected(start, query, param):
    server = await start(scripted_engine("x"))
    made = await created(server)
    status, answer = await server.get(f"{PATH}/{made['id']}/input_items?{query}")
    assert (status, answer["error"]["param"]) == (400, param)


async def test_input_tokens_path_accepts_only_post(start):
    server = await start(Engine.fake())
    for method in ("GET", "DELETE"):
        async with server.http.request(method, f"{server.url}{PATH}/input_tokens") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")


# ---- compaction ----------------------------------------------------------------------------------


def prompts_of(server: Server) -> list[str]:
    """Record the prompts that the engine gets from now on, as texts."""
    submit, found = server.engine.submit, []
    assert server.engine.tokenizer is not None
    decode = server.engine.tokenizer.decode

    def spy(prompt_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(decode(list(prompt_token_ids)))
        return submit(prompt_token_ids, *args, **kwargs)

    server.engine.submit = spy  # type: ignore[method-assign]
    return found


async def compacted(server: Server, **body: Any) -> dict[str, Any]:
    status, answer = await server.post(f"{PATH}/compact", {"model": server.model, **body})
    assert status == 200, answer
    sdk.CompactedResponse.model_validate(answer)
    assert answer["object"] == "response.compaction" and answer["usage"]["output_tokens"]
    return answer


@pytest.mark.parametrize("answer", ["Launch on Tuesday.", f"{THOUGHT}Launch on Tuesday."])
async def test_compaction_is_a_summary_by_the_model(start, answer):
    server = await start(scripted_engine(answer, template=families.QWEN))
    prompts = prompts_of(server)
    made = await compacted(server, input=[USER, {"role": "assistant", "content": "Tuesday."}])
    assert "Paris" in prompts[0] and "Tuesday." in prompts[0] and "Summarize" in prompts[0]
    [item] = made["output"]
    assert item["type"] == "compaction"

    last = {"role": "user", "content": "Go on."}
    response = await created(server, input=[*made["output"], last], instructions="Be brief.")
    assert "Paris" not in prompts[1] and "Launch on Tuesday." in prompts[1]
    assert "Be brief." in prompts[1] and "Hm." not in prompts[1] and "Go on." in prompts[1]
    _, items = await server.get(f"{PATH}/{response['id']}/input_items?order=asc")
    assert [each["type"] for each in items["data"]] == ["compaction", "message"]
    again = await compacted(server, previous_response_id=response["id"])
    assert "Launch on Tuesday." in prompts[2] and len(again["output"]) == 1
    assert (await server.get(f"{PATH}/{made['id']}"))[0] == 404, "it is not stored"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": None}, "model"),
        ({"stream": True}, "stream"),
        ({"background": True}, "background"),
        ({"input": None}, "input"),
        ({"previous_response_id": "resp_missing"}, "previous_response_id"),
    ],
)
async def test_impossible_compaction_is_rejected(start, body, param):
    server = await start(scripted_engine("x", template=families.QWEN))
    body = {"model": server.model, "input": [USER], **body}
    status, answer = await server.post(f"{PATH}/compact", body)
    assert status in (400, 404) and answer["error"]["param"] == param


async def test_model_without_a_summary_gives_no_compaction(start):
    server = await start(scripted_engine(THOUGHT, template=families.QWEN))
    body = {"model": server.model, "input": [USER]}
    status, answer = await server.post(f"{PATH}/compact", body)
    assert status == 400 and "no summary" in answer["error"]["message"]


@pytest.mark.parametrize(
    "content", [None, "", "gAAAAB", "forge-jax-1.", "forge-jax-1.%", "forge-jax-1._w=="]
)
async def test_compaction_of_another_tenant_is_rejected(start, content):
    server = await start(scripted_engine("x", template=families.QWEN))
    item = {"type": "compaction", "encrypted_content": content}
    status, answer = await server.post(PATH, ask(input=[item, USER]))
    assert (status, answer["error"]["param"]) == (400, "input[0].encrypted_content")


async def test_excluded_tool_is_validated(start):
    server = await start(Engine.fake())
    left_out = {"type": "allowed_tools", "mode": "auto", "tools": []}
    bad = {**TOOL, "parameters": [None]}
    status, answer = await server.post(PATH, ask(tools=[bad], tool_choice=left_out))
    assert (status, answer["error"]["param"]) == (400, "tools[0].parameters")
