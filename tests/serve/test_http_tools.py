"""Tools and reasoning in a chat, through OpenAI's client, on a scripted model."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from forge_serve.config import ServerConfig
from tests.serve import families
from tests.serve.conftest import Server, scripted_engine

USER = {"role": "user", "content": "What is the weather in Paris?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ARGS = '{"city": "Paris", "n": [1, {"é": null}]}'
ANSWERS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>',
    "llama3_json": f'{{"name": "get_weather", "parameters": {ARGS}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGS}}}]',
    "pythonic": "[get_weather(city='Paris', n=[1, {'é': None}])]",
}
TEMPLATES = {
    "hermes": families.HERMES,
    "llama3_json": families.LLAMA3,
    "mistral": families.MISTRAL,
    "pythonic": families.PYTHONIC,
}
CHAT = "/v1/chat/completions"


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": [WEATHER], **more}


def joined(events: list[str], index: int = 0) -> dict[str, Any]:
    """Return a choice's message, assembled from its chunks like OpenAI's clients do it."""
    message: dict[str, Any] = {"tool_calls": [], "chunks": []}
    for event in events:
        for choice in json.loads(event)["choices"] if event != "[DONE]" else ():
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["chunks"].append(delta)
            for name in ("content", "reasoning", "reasoning_content"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for piece in delta.get("tool_calls", ()):
                if piece["index"] == len(message["tool_calls"]):
                    assert piece["type"] == "function" and piece["id"]
                    call = {"id": piece["id"], "name": piece["function"]["name"], "arguments": ""}
                    message["tool_calls"].append(call)
                else:
                    assert piece.keys() == {"index", "function"}
                    assert piece["function"].keys() == {"arguments"}
                message["tool_calls"][-1]["arguments"] += piece["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


async def prompt_of(server: Server, body: dict[str, Any]) -> str:
    body = {**body, "return_token_ids": True, "max_tokens": 1}
    status, answer = await server.post(CHAT, body)
    assert status == 200, answer
    return server.engine.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)


@pytest.mark.parametrize("special", [False, True], ids=["text", "special tokens"])
@pytest.mark.parametrize("family", ANSWERS)
async def test_call_format_is_detected_from_the_template(start, family, special):
    """The markers may be ordinary text, or special tokens that decode to no text."""
    markers = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]") if special else ()
    engine = scripted_engine(ANSWERS[family], template=TEMPLATES[family], special_tokens=markers)
    server = await start(engine)
    whole = await server.openai.chat.completions.create(model=server.model, **chat())
    [choice] = whole.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == json.loads(ARGS)
    assert len(call.id) == 9 if family == "mistral" else call.id.startswith("call_")

    message = joined(await server.events(CHAT, chat(stream=True)))
    [streamed] = message["tool_calls"]
    assert streamed["name"] == "get_weather" and streamed["arguments"] == call.function.arguments
    assert message["finish_reason"] == "tool_calls" and not message.get("content")
    assert len(message["chunks"]) > 10, "the arguments come as they are written"


async def test_openai_client_assembles_a_stream(start):
    server = await start(scripted_engine(ANSWERS["hermes"], template=families.HERMES))
    options = {"model": server.model, **chat()}
    async with server.openai.chat.completions.stream(**options) as stream:
        async for _ in stream:
            pass
        completion = await stream.get_final_completion()
    [call] = completion.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == json.loads(ARGS)
    assert completion.choices[0].finish_reason == "tool_calls"


async def test_each_choice_has_its_own_calls(start):
    answers = (ANSWERS["hermes"] + ANSWERS["hermes"], "It is sunny.")
    server = await start(scripted_engine(*answers, template=families.HERMES))
    body = chat(n=8, seed=5)
    _, whole = await server.post(CHAT, body)
    events = await server.events(CHAT, {**body, "stream": True})
    reasons = [choice["finish_reason"] for choice in whole["choices"]]
    assert set(reasons) == {"tool_calls", "stop"}
    for choice in whole["choices"]:
        message = joined(events, choice["index"])
        assert message["finish_reason"] == choice["finish_reason"]
        if choice["finish_reason"] == "stop":
            assert message["content"] == choice["message"]["content"] == "It is sunny."
            assert "tool_calls" not in choice["message"]
            continue
        assert len(message["tool_calls"]) == len(choice["message"]["tool_calls"]) == 2
        for call in choice["message"]["tool_calls"]:
            assert call.keys() == {"id", "type", "function"}
            assert json.loads(call["function"]["arguments"]) == json.loads(ARGS)


async def test_calls_work_with_logprobs_token_ids_and_usage(start):
    server = await start(scripted_engine("So:\n" + ANSWERS["hermes"], template=families.HERMES))
    body = chat(logprobs=True, return_token_ids=True)
    _, whole = await server.post(CHAT, body)
    num_tokens = whole["usage"]["completion_tokens"]
    [choice] = whole["choices"]
    assert choice["message"]["content"] == "So:\n"
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == num_tokens
    usage = {"include_usage": True, "continuous_usage_stats": True}
    events = await server.events(CHAT, {**body, "stream": True, "stream_options": usage})
    chunks = [json.loads(event) for event in events[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) == num_tokens
    assert sum(len(c.get("token_ids", ())) for c in choices) == num_tokens
    assert chunks[-1]["usage"]["completion_tokens"] == num_tokens
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts == list(range(num_tokens + 1)), "none with the role, then one more in each event"
    assert joined(events)["tool_calls"][0]["arguments"] == ARGS


@pytest.mark.parametrize("family", ANSWERS)
async def test_truncated_call_has_its_partial_arguments_streamed_and_whole(start, family):
    answer = "[get_weather(n=1234)]"
    if family != "pythonic":
        answer = ANSWERS[family].replace(ARGS, '{"n": 1234}')
    server = await start(scripted_engine(answer, template=TEMPLATES[family]))
    body = chat(max_tokens=answer.index("34"))
    [choice] = (await server.post(CHAT, body))[1]["choices"]
    streamed = joined(await server.events(CHAT, {**body, "stream": True}))
    assert choice["finish_reason"] == streamed["finish_reason"] == "length"
    assert choice["message"]["content"] is None and not streamed.get("content")
    [call], [streamed_call] = choice["message"]["tool_calls"], streamed["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"n": 12'}
    assert streamed_call["arguments"] == '{"n": 12'


async def test_call_truncated_before_its_arguments_is_content(start):
    server = await start(scripted_engine(ANSWERS["hermes"], template=families.HERMES))
    body = chat(max_tokens=40)
    [choice] = (await server.post(CHAT, body))[1]["choices"]
    streamed = joined(await server.events(CHAT, {**body, "stream": True}))
    assert choice["message"]["content"] == streamed["content"] == ANSWERS["hermes"][:40]
    assert choice["finish_reason"] == streamed["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"] and not streamed["tool_calls"]


async def test_stop_string_ends_a_call(start):
    server = await start(scripted_engine(ANSWERS["hermes"] + "more", template=families.HERMES))
    _, whole = await server.post(CHAT, chat(stop="</tool_call>"))
    [choice] = whole["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGS
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "</tool_call>")


async def test_malformed_call_is_content(start):
    text = 'I call <tool_call>{"name": "get_weather", "arguments": {city}}</tool_call>'
    server = await start(scripted_engine(text, template=families.HERMES))
    _, whole = await server.post(CHAT, chat())
    message = whole["choices"][0]["message"]
    assert message["content"] == text and "tool_calls" not in message
    assert whole["choices"][0]["finish_reason"] == "stop"


async def test_calls_are_text_without_tools(start):
    server = await start(scripted_engine(ANSWERS["hermes"], template=families.HERMES))
    for body in ({"messages": [USER]}, chat(tool_choice="none")):
        _, whole = await server.post(CHAT, body)
        assert whole["choices"][0]["message"]["content"] == ANSWERS["hermes"]
        assert whole["choices"][0]["finish_reason"] == "stop"
        events = await server.events(CHAT, {**body, "stream": True})
        assert joined(events)["content"] == ANSWERS["hermes"]


async def test_template_gets_only_the_callable_tools(start):
    server = await start(scripted_engine("x", template=families.HERMES))
    assert json.dumps(WEATHER) in await prompt_of(server, chat())
    assert json.dumps(WEATHER) in await prompt_of(server, chat(tool_choice="auto"))
    assert "tools" not in await prompt_of(server, chat(tool_choice="none"))


async def test_calls_and_results_reach_the_template(start):
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a":1}'},
    }
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": "9"}]},
    ]
    qwen = await start(scripted_engine("x", template=families.QWEN))
    prompt = await prompt_of(qwen, {"messages": messages})
    assert '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}' in prompt
    assert "<tool_response>\n9\n</tool_response>" in prompt
    llama = await start(scripted_engine("x", template=families.LLAMA3))
    prompt = await prompt_of(llama, {"messages": messages})
    assert '{"name": "f", "parameters": {"a": 1}}' in prompt and '"9"' in prompt
    mistral = await start(scripted_engine("x", template=families.MISTRAL))
    assert '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]' in await prompt_of(
        mistral, {"messages": messages}
    )
    empty = [USER, {"role": "assistant", "content": "Hi", "tool_calls": []}, USER]
    assert "single calls" not in await prompt_of(llama, {"messages": empty})


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [('{"a": 1}', '{"a": 1}'), ({"a": 1}, '{"a": 1}'), ("", "{}"), (None, "{}"), ("{a", '"{a"')],
)
async def test_call_arguments_in_messages_become_objects_if_possible(start, arguments, shown):
    server = await start(scripted_engine("x", template=families.LLAMA3))
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    assert f'"parameters": {shown}}}' in await prompt_of(server, {"messages": messages})


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": WEATHER}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
            "tools[0].function.description",
        ),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"type": "custom", "function": {"name": "f"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].type",
        ),
        (
            {"messages": [{"role": "tool", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
async def test_invalid_tool_is_named_in_the_error(start, more, param):
    server = await start(scripted_engine("x", template=families.HERMES))
    status, answer = await server.post(CHAT, chat(**more))
    assert (status, answer["error"]["param"]) == (400, param), answer


async def test_tools_are_rejected_without_template_or_parser_support(start):
    server = await start(scripted_engine("x"))
    with pytest.raises(openai.BadRequestError, match="does not support them") as refused:
        await server.openai.chat.completions.create(model=server.model, **chat())
    assert refused.value.param == "tools"
    config = ServerConfig(tool_call_parser="none")
    server = await start(scripted_engine("x", template=families.HERMES), config)
    status, answer = await server.post(CHAT, chat())
    assert status == 400 and "--tool-call-parser" in answer["error"]["message"]
    assert (await server.post(CHAT, chat(tool_choice="none")))[0] == 200
    xml = families.HERMES.replace("</tool_call> tags", "<function=f></tool_call> tags")
    server = await start(scripted_engine("x", template=xml))
    assert (await server.post(CHAT, chat()))[0] == 400, "a form that no parser knows"


async def test_parser_can_be_selected(start):
    config = ServerConfig(tool_call_parser="llama3_json")
    engine = scripted_engine(ANSWERS["llama3_json"], template=families.HERMES)
    server = await start(engine, config)
    _, whole = await server.post(CHAT, chat())
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == ARGS


async def test_only_one_call_is_returned_without_parallel_calls(start):
    server = await start(scripted_engine(ANSWERS["hermes"] * 3, template=families.HERMES))
    _, whole = await server.post(CHAT, chat(parallel_tool_calls=False))
    assert len(whole["choices"][0]["message"]["tool_calls"]) == 1
    events = await server.events(CHAT, chat(parallel_tool_calls=False, stream=True))
    assert len(joined(events)["tool_calls"]) == 1


CITIES = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
STRICT = {"type": "function", "function": {"name": "f", "parameters": CITIES, "strict": True}}
NOW = {"type": "function", "function": {"name": "now"}}


def demanding(choice: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": [NOW, STRICT], "tool_choice": choice, **more}


@pytest.mark.parametrize("special", [False, True], ids=["text", "special tokens"])
@pytest.mark.parametrize("family", ["hermes", "llama3_json", "mistral"])
async def test_required_tool_choice_forces_a_call(start, family, special):
    markers = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]") if special else ()
    engine = scripted_engine("Sunny!", template=TEMPLATES[family], special_tokens=markers)
    server = await start(engine)
    named = {"type": "function", "function": {"name": "f"}}
    for choice, names in (("required", ("now", "f")), (named, ("f",))):
        body = demanding(choice, n=2, parallel_tool_calls=False)
        status, whole = await server.post(CHAT, body)
        assert status == 200, whole
        events = await server.events(CHAT, {**body, "stream": True})
        for answer in whole["choices"]:
            assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
            [call] = answer["message"]["tool_calls"]
            assert call["function"]["name"] in names
            arguments = json.loads(call["function"]["arguments"])
            assert arguments in ({"city": "Paris"}, {"city": "Rome"}, {})
            assert (arguments == {}) == (call["function"]["name"] == "now")
            streamed = joined(events, answer["index"])
            assert streamed["finish_reason"] == "tool_calls"
            assert len(streamed["tool_calls"]) == 1 and not streamed.get("content")


async def test_reasoning_may_precede_a_required_call(start):
    engine = scripted_engine("Hm.\n</think>\n\nSunny!", template=families.QWEN)
    server = await start(engine)
    body = demanding("required", chat_template_kwargs={"thinking": True})
    _, whole = await server.post(CHAT, body)
    message = whole["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1 and message["content"] is None
    assert message["reasoning"] == "Hm."


async def test_strict_arguments_follow_their_schema_and_text_is_free(start):
    call = '<tool_call>\n{"name": "f", "arguments": {"city": "%s"}}\n</tool_call>'
    server = await start(scripted_engine("Let's see:\n" + call % "Pisa", template=families.HERMES))
    _, whole = await server.post(CHAT, demanding("auto"))
    message = whole["choices"][0]["message"]
    assert message["content"] == "Let's see:\n"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"])["city"] == "Paris"
    loose = {**STRICT, "function": {**STRICT["function"], "strict": False}}
    for more in ({"tools": [loose]}, {"stop": "never"}):
        _, whole = await server.post(CHAT, {**demanding("auto"), **more})
        [got] = whole["choices"][0]["message"]["tool_calls"]
        assert json.loads(got["function"]["arguments"]) == {"city": "Pisa"}
    server = await start(scripted_engine("It is sunny.", template=families.HERMES))
    _, whole = await server.post(CHAT, demanding("auto"))
    assert whole["choices"][0]["message"]["content"] == "It is sunny."


@pytest.mark.parametrize(
    ("template", "config"),
    [
        (families.PYTHONIC, ServerConfig()),
        (families.HERMES, ServerConfig(tool_call_parser="none")),
        (families.HERMES.replace("</tool_call> tags", "<function=f> tags"), ServerConfig()),
    ],
    ids=["pythonic", "no parser", "unknown"],
)
async def test_required_call_without_a_grammar_is_constrained_to_json(start, template, config):
    server = await start(scripted_engine("Sunny!", template=template), config)
    for body in (demanding("required"), demanding("required", stream=True)):
        if "stream" in body:
            message = joined(await server.events(CHAT, body))
            [call] = message["tool_calls"]
        else:
            _, whole = await server.post(CHAT, body)
            [call] = whole["choices"][0]["message"]["tool_calls"]
            call = call["function"]
        assert call["name"] in ("now", "f")
        assert isinstance(json.loads(call["arguments"]), dict)


async def test_schemas_without_a_grammar_are_rejected(start):
    server = await start(scripted_engine("x", template=families.HERMES))
    for schema, param in (
        ({"type": "array"}, "tools[0].function.parameters"),
        ({"properties": {"a": {"type": "strange"}}}, "tools"),
        ({"properties": {"a": {"pattern": "("}}}, "tools"),
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        status, answer = await server.post(CHAT, demanding("required", tools=[tool]))
        assert (status, answer["error"]["param"]) == (400, param), answer


FIVE = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [5]}}}}


async def test_structured_answer_has_no_calls(start):
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    server = await start(scripted_engine(call, template=families.HERMES))
    status, whole = await server.post(CHAT, demanding("auto", **FIVE))
    assert status == 200, whole
    message = whole["choices"][0]["message"]
    assert message["content"] == "5" and "tool_calls" not in message
    status, answer = await server.post(CHAT, demanding("required", **FIVE))
    assert (status, answer["error"]["param"]) == (400, "tool_choice")


async def test_usage_grows_with_the_tokens_of_each_event(start):
    thought, answer = "<think>\nHm.\n</think>", "\n\nSunny."
    server = await start(scripted_engine(thought + answer, template=families.QWEN))
    body = {"messages": [USER], "stream": True, "return_token_ids": True, "n": 2}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    *events, last, _ = await server.events(CHAT, body)
    total, per_choice = 0, [0, 0]
    for event in map(json.loads, events):
        [choice] = event["choices"]
        num_tokens = len(choice.get("token_ids", ()))
        assert ("role" in choice["delta"]) == (num_tokens == 0)
        total += num_tokens
        per_choice[choice["index"]] += num_tokens
        usage = event["usage"]
        assert usage["completion_tokens"] == total
        assert usage["total_tokens"] == usage["prompt_tokens"] + total
        reasoning = sum(min(num, len(thought)) for num in per_choice)
        found = usage["completion_tokens_details"]["reasoning_tokens"]
        assert found == reasoning or found < len("<think>") * 2
    assert json.loads(last)["usage"] == usage


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["text", "special tokens"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_grammar_starts_at_once_if_reasoning_is_over_or_disabled(start, special, stream):
    server = await start(
        scripted_engine("<think>Hm.</think>7", template=families.QWEN, special_tokens=special)
    )
    begun = [USER, {"role": "assistant", "content": "<think>So.</think> It is "}]
    for over in (
        {"chat_template_kwargs": {"thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"messages": begun, "continue_final_message": True},
    ):
        for demanded in (FIVE, {"tools": [NOW], "tool_choice": "required"}):
            body = {"messages": [USER], **over, **demanded}
            if stream:
                message = joined(await server.events(CHAT, {**body, "stream": True}))
            else:
                message = (await server.post(CHAT, body))[1]["choices"][0]["message"]
            assert "reasoning" not in message
            assert (message.get("content") == "5") == (demanded is FIVE)
    body = {"messages": [USER], "regex": "<think>5", **over}
    if not special:  # content in the requested format, although it looks like a tag
        _, whole = await server.post(CHAT, body)
        assert whole["choices"][0]["message"]["content"] == "<think>5"


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["text", "special tokens"])
@pytest.mark.parametrize(
    ("thinking", "answer", "thought"),
    [
        (True, "Hm.\n</think>\n\nSunny!", "Hm."),
        (None, "<think>\nHm.\n</think>\n\n7", "Hm."),
        (None, "5, sunny!", None),
        (None, "5</think>", None),
    ],
    ids=["opened", "by itself", "none", "an end without a beginning"],
)
async def test_format_applies_after_the_reasoning(start, thinking, answer, thought, special):
    engine = scripted_engine(answer, template=families.QWEN, special_tokens=special)
    server = await start(engine)
    variables = {} if thinking is None else {"thinking": thinking}
    body = chat(chat_template_kwargs=variables, **FIVE)
    status, whole = await server.post(CHAT, body)
    assert status == 200, whole
    streamed = joined(await server.events(CHAT, {**body, "stream": True}))
    for message in (whole["choices"][0]["message"], streamed):
        assert (message["content"], message.get("reasoning")) == ("5", thought)
    assert whole["choices"][0]["finish_reason"] == streamed["finish_reason"] == "stop"


THOUGHT = "<think>\nParis, then.\n</think>\n\nIt is sunny."


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["text", "special tokens"])
@pytest.mark.parametrize("opened", [False, True], ids=["by the model", "by the template"])
async def test_reasoning_has_two_names_and_is_not_content(start, opened, special):
    answer = THOUGHT.removeprefix("<think>\n") if opened else THOUGHT
    server = await start(scripted_engine(answer, template=families.QWEN, special_tokens=special))
    body: dict[str, Any] = {"messages": [USER]}
    if opened:
        body["chat_template_kwargs"] = {"thinking": True}
    _, whole = await server.post(CHAT, body)
    message = whole["choices"][0]["message"]
    streamed = joined(await server.events(CHAT, {**body, "stream": True}))
    for got in (message, streamed):
        assert got["reasoning"] == got["reasoning_content"] == "Paris, then."
        assert got["content"] == "It is sunny."
    for more in ({"include_reasoning": False}, {"include_reasoning": False, "stream": True}):
        if "stream" in more:
            got = joined(await server.events(CHAT, {**body, **more}))
        else:
            got = (await server.post(CHAT, {**body, **more}))[1]["choices"][0]["message"]
        assert "reasoning" not in got and got["content"] == "It is sunny."


async def test_unfinished_reasoning_leaves_no_content(start):
    server = await start(scripted_engine("<think>Hm", template=families.QWEN))
    _, whole = await server.post(CHAT, {"messages": [USER]})
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (None, "Hm")


async def test_template_that_closed_the_reasoning_leaves_only_content(start):
    server = await start(scripted_engine("Sunny.</think>", template=families.QWEN))
    body = {"messages": [USER], "chat_template_kwargs": {"thinking": False}}
    _, whole = await server.post(CHAT, body)
    message = whole["choices"][0]["message"]
    assert message["content"] == "Sunny.</think>" and "reasoning" not in message


async def test_reasoning_precedes_calls(start):
    answer = f"Paris.\n</think>\n\n{ANSWERS['hermes']}"
    server = await start(scripted_engine(answer, template=families.QWEN))
    body = chat(chat_template_kwargs={"thinking": True})
    _, whole = await server.post(CHAT, body)
    message = whole["choices"][0]["message"]
    assert message["reasoning"] == "Paris." and message["content"] is None
    assert message["tool_calls"][0]["function"]["arguments"] == ARGS
    streamed = joined(await server.events(CHAT, {**body, "stream": True}))
    assert streamed["reasoning"] == "Paris." and not streamed.get("content")
    assert streamed["tool_calls"][0]["arguments"] == ARGS


async def test_reasoning_effort_reaches_the_template(start):
    template = families.HERMES + "{{ reasoning_effort | default('none') }}"
    server = await start(scripted_engine("x", template=template))
    body: dict[str, Any] = {"messages": [USER]}
    assert (await prompt_of(server, body)).endswith("none")
    assert (await prompt_of(server, {**body, "reasoning_effort": "high"})).endswith("high")


async def test_disabled_parser_leaves_reasoning_in_the_content(start):
    config = ServerConfig(reasoning_parser="none")
    server = await start(scripted_engine(THOUGHT, template=families.QWEN), config)
    _, whole = await server.post(CHAT, {"messages": [USER]})
    assert whole["choices"][0]["message"]["content"] == THOUGHT
    assert (
        joined(await server.events(CHAT, {"messages": [USER], "stream": True}))["content"]
        == THOUGHT
    )


async def test_final_assistant_message_is_closed_unless_continued(start):
    server = await start(scripted_engine(" sunny.", template=families.QWEN))
    begun = [USER, {"role": "assistant", "content": "It is"}]
    prompt = await prompt_of(server, {"messages": begun})
    assert prompt.endswith("assistant\nIt is<|im_end|>\n<|im_start|>assistant\n")
    body = {"messages": begun, "continue_final_message": True}
    assert (await prompt_of(server, body)).endswith("assistant\nIt is")
    _, whole = await server.post(CHAT, body)
    assert whole["choices"][0]["message"]["content"] == " sunny."
    body = {"messages": begun, "add_generation_prompt": False}
    assert (await prompt_of(server, body)).endswith("It is<|im_end|>\n")


async def test_reasoning_can_be_continued(start):
    server = await start(scripted_engine(" then.</think>Sunny.", template=families.QWEN))
    begun = [USER, {"role": "assistant", "content": "<think>Paris,"}]
    _, whole = await server.post(CHAT, {"messages": begun, "continue_final_message": True})
    message = whole["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (" then.", "Sunny.")
