"""Harmony, gpt-oss's format: its parser, its grammars and its requests in all three protocols."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest

from forge_serve.config import ServerConfig
from forge_serve.openai.call_grammar import reasoning_lead
from forge_serve.parsers.families import CALL_FORMS, REASONING_FORMS
from forge_serve.parsers.harmony import (
    FINAL,
    MAX_HEADER_CHARS,
    HarmonyParser,
    HarmonyTokens,
    opening_of,
)
from forge_serve.parsers.tool_calls import ToolCallParser
from tests.serve import families
from tests.serve import test_http_messages as messages
from tests.serve import test_http_responses as responses
from tests.serve.conftest import Server, scripted_engine
from tests.serve.test_call_grammar import Held
from tests.serve.test_http_tools import CHAT, chat, joined, prompt_of
from tests.serve.test_parsers import FUNCTIONS, cuts, read

ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
SPECIAL = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>",
)  # fmt: skip
ARGS = r'{"city": "São \"Paulo\" }]", "n": [1, -2.5e3, {"a": null}], "<|": true}'

# text, content, reasoning, calls
OUTPUTS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (f"{ANALYSIS}Hm.\n\nYes.{NEXT}{FINAL}No.\n", "No.\n", "Hm.\n\nYes.", []),
    (f"{ANALYSIS}Hm.{NEXT}{FINAL}No.<|return|>", "No.", "Hm.", []),
    (f"{FINAL} a < b <| c ", " a < b <| c ", "", []),
    (f"{ANALYSIS}a{NEXT}{CALL}{ARGS}", "", "a", [("f", ARGS)]),
    (f"{ANALYSIS}a{NEXT}{CALL}\n{ARGS}\n<|call|>", "", "a", [("f", ARGS)]),
    (
        f"{ANALYSIS}a{NEXT}{PREAMBLE}b{NEXT}{ANALYSIS}c{NEXT}{CALL}{{}}",
        "b",
        "a\n\nc",
        [("f", "{}")],
    ),
    (f"{PREAMBLE}a{NEXT}{FINAL}b", "a\n\nb", "", []),
    (
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>assistant to=functions.other<|channel|>analysis<|message|>{"a": 1}',
        "",
        "",
        [("f", "{}"), ("other", '{"a": 1}')],
    ),
    ("<|channel|>commentary to=get_weather<|message|>{}", "", "", [("get_weather", "{}")]),
    (f"{ANALYSIS}a{NEXT}{CALL}{{}}{NEXT}{FINAL}b", "b", "a", [("f", "{}")]),
    # A break in a message also ends it, as does a header without its beginning.
    (f"{ANALYSIS}a{FINAL}b", "b", "a", []),
    (f"{ANALYSIS}a<|end|>\n{FINAL}b", "b", "a", []),
    (f"{ANALYSIS}a{NEXT}<|channel|>commentary{FINAL}b", "b", "a", []),
    # Built-in tools are called in the chain of thought.
    (f"<|channel|>analysis to=python code<|message|>1+1{NEXT}{FINAL}2", "2", "1+1", []),
    # Unfinished outputs.
    (f"{ANALYSIS}a", "", "a", []),
    (f"{ANALYSIS}a<|end", "", "a<|end", []),
    (f"{ANALYSIS}a{NEXT}<|channel|>final", "", "a", []),
    ("<|channel|>anal", "", "", []),
    (f"{CALL}{{", "", "", [("f", "{")]),
    (f'{CALL}{{"a": 12', "", "", [("f", '{"a": 12')]),
    (f'{CALL}{{"a": "b<|call|>{FINAL}c', "c", "", [("f", '{"a": "b')]),
    ("", "", "", []),
    # Malformed outputs.
    ("Hello", "Hello", "", []),
    (" to", " to", "", []),
    (" \n ", " \n ", "", []),
    (f"Hello{NEXT}Hello", "Hello\n\nHello", "", []),
    (f"{NEXT} Hello.<|return|>", " Hello.", "", []),
    ("Hello<|end|>Hello", "Hello\n\nHello", "", []),
    ("<|message|>a", "a", "", []),
    ("<|start|>assistant<|message|>a", "a", "", []),
    ("<|channel|>secret<|message|>a", "a", "", []),
    ("<|channel|>final a<|end|>b", "<|channel|>final a\n\nb", "", []),
    (
        "<|channel|>commentary to=browser.open<|message|>{}",
        "<|channel|>commentary to=browser.open<|message|>{}",
        "",
        [],
    ),
    (
        "<|start|>functions.f to=assistant<|channel|>commentary<|message|>9",
        "<|start|>functions.f to=assistant<|channel|>commentary<|message|>9",
        "",
        [],
    ),
    (f"{CALL}oh<|end|>", f"{CALL}oh", "", []),
    (f"{CALL}<|call|>", CALL, "", []),
    (f"{CALL}{{}} so", " so", "", [("f", "{}")]),
    (
        "<|channel|>final" + " x" * MAX_HEADER_CHARS + FINAL + "y",
        "<|channel|>final" + " x" * MAX_HEADER_CHARS + "\n\ny",
        "",
        [],
    ),
]


def parser(*, whole: bool = True, parallel: bool = True, **more: Any) -> HarmonyParser:
    tools = ToolCallParser(CALL_FORMS["harmony"], FUNCTIONS, whole=whole, parallel=parallel)
    return HarmonyParser(tools, functions=FUNCTIONS, **more)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "streamed"])
@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), OUTPUTS)
def test_output_is_split_at_any_token_boundary(text, content, reasoning, calls, whole):
    for pieces in cuts(text)[:: 1 + len(text) // 200]:
        assert read(parser(whole=whole), pieces) == (content, reasoning, calls), pieces


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), OUTPUTS)
def test_truncated_output_is_a_prefix_streamed_and_whole(text, content, reasoning, calls):
    for end in range(0, len(text) + 1, 1 + len(text) // 200):
        whole = read(parser(), [text[:end]])
        assert read(parser(whole=False), list(text[:end])) == whole, text[:end]
        assert reasoning.startswith(whole[1].rstrip("<|")) or "<|" in whole[1], text[:end]


def test_random_markup_gives_the_same_parts_streamed_and_whole():
    rng = random.Random(7)
    words = [*SPECIAL, "assistant", "analysis", "final", "commentary", " to=functions.f", " ", "{}",
             '{"a": "', "x", "\n", "to=", "<|", "json", ANALYSIS, FINAL, CALL, NEXT]  # fmt: skip
    for _ in range(3000):
        text = "".join(rng.choices(words, k=rng.randrange(12)))
        first = read(parser(whole=False), [text])
        middle = rng.randrange(len(text) + 1)
        for pieces in ([text[:middle], text[middle:]], list(text)):
            assert read(parser(whole=False), pieces) == first, text


def test_parts_of_one_piece_are_in_order():
    answer = f"{PREAMBLE}a{NEXT}{ANALYSIS}b{NEXT}{CALL}{{}}{NEXT}{FINAL}c"
    parts = parser(whole=False).read(answer, last=True)
    kinds = [p[0] if isinstance(p, tuple) else p.name for p in parts.in_order(None)]
    assert kinds == ["content", "reasoning", "f", "content"]


def test_only_the_first_call_stays_without_parallel_calls():
    text = f"{CALL}{{}}<|call|><|start|>assistant{CALL}{{}}"
    assert read(parser(parallel=False), [text])[2] == [("f", "{}")]
    assert len(read(parser(), [text])[2]) == 2


def test_calls_and_reasoning_without_a_parser_are_content():
    text = f"{ANALYSIS}a{NEXT}{CALL}{{}}"
    assert read(HarmonyParser(), [text]) == (CALL + "{}", "a", [])
    assert read(HarmonyParser(reasons=False), [text])[0] == f"{ANALYSIS}a\n\n{CALL}{{}}"


@pytest.mark.parametrize(
    ("prompt", "text", "content", "reasoning"),
    [
        ("<|end|><|start|>assistant", f"{ANALYSIS}a{NEXT}{FINAL}b", "b", "a"),
        (f"<|start|>assistant{ANALYSIS}", f"a{NEXT}{FINAL}b", "b", "a"),
        (f"<|start|>assistant{FINAL}So", " b", " b", ""),
        ("<|start|>user<|message|>x<|end|>", f"<|start|>assistant{FINAL}b", "b", ""),
        ("x", "b", "b", ""),
    ],
)
def test_prompt_may_have_begun_the_first_message(prompt, text, content, reasoning):
    for pieces in cuts(text):
        begun = parser(opening=opening_of(prompt))
        assert read(begun, pieces) == (content, reasoning, [])


def test_last_final_message_may_contain_markers():
    last = parser(final_is_last=True)
    assert read(last, [f"{FINAL}a<|e", "nd|>b"]) == ("a<|end|>b", "", [])
    assert last.over


@pytest.mark.parametrize(
    ("tokens", "reasoning"),
    [
        (["<|channel|>", "final", "<|message|>", "a"], 0),
        (["<|channel|>", "analysis", "<|message|>", "a", "é", "<|end|>"], 5),
        (["<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|start|>", "assistant",
          "<|channel|>", "final", "<|message|>", "b", "c"], 10),
        (["<|channel|>", "commentary", "<|message|>", "a", "<|end|>", "<|channel|>", "analysis",
          "<|message|>", "b", "<|end|>", "<|channel|>", "final", "<|message|>", "c"], 9),
        (["Hello", "."], 0),
    ],
)  # fmt: skip
def test_reasoning_tokens_include_headers(tokens, reasoning):
    pieces = [piece.encode() for piece in tokens]
    for size in range(1, len(tokens) + 1):
        counter = HarmonyTokens(HarmonyParser(), pieces.__getitem__)
        for begin in range(0, len(tokens), size):
            counter.push(range(len(tokens))[begin : begin + size])
        assert counter.number == reasoning


@pytest.mark.parametrize("again", ["<|", "<|end|>", " ", "x", "<|start|>", ANALYSIS, "to="])
def test_parse_time_is_linear_in_the_length(again):
    def seconds(length: int) -> float:
        text = again * (length // len(again))
        begin_s = time.process_time()
        read(parser(whole=False), [text[i : i + 3] for i in range(0, len(text), 3)])
        return time.process_time() - begin_s

    short_s = min(seconds(4_000) for _ in range(3))
    assert min(seconds(64_000) for _ in range(2)) < 80 * short_s + 0.01


# ---- grammars ----------------------------------------------------------------------------------


def test_grammar_allows_only_reasoning_before_a_required_call():
    held = Held("harmony", special=SPECIAL, thinks="harmony")
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    weather = call.replace("now", "get_weather").replace("{}", '{"city": "Paris"}')
    for text in (call, f"{ANALYSIS}a{NEXT}{call}", f"{ANALYSIS}{NEXT}{ANALYSIS}b{NEXT}{call}"):
        assert held.takes(text), text
        assert read(parser(), [text])[2] == [("now", "{}")]
    assert held.takes(f"{call}{NEXT}{weather}")
    assert not held.takes(weather.replace('"Paris"', "5"), ends=False)
    assert not held.takes(f"{FINAL}a", ends=False)
    assert not held.takes(f"{PREAMBLE}a", ends=False)
    assert not held.takes("a", ends=False)
    open = Held("harmony", special=SPECIAL, thinks="harmony", thinking=True)
    assert open.takes(f"a{NEXT}{call}")
    assert not open.takes(call)


def test_grammar_of_strict_calls_allows_answers_and_preambles():
    held = Held("harmony", "auto", special=SPECIAL, thinks="harmony")
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    for text in (call, f"{FINAL}a {{", f"{ANALYSIS}a{NEXT}{PREAMBLE}b{NEXT}{call}"):
        assert held.takes(text), text
    assert not held.takes(f"{PREAMBLE}a{NEXT}{call}".replace("{}", '{"a"'), ends=False)


def test_calls_have_no_grammar_without_special_tokens():
    assert CALL_FORMS["harmony"].written(()) is None


def test_output_format_begins_in_the_final_channel():
    tokens = {token: i for i, token in enumerate(SPECIAL)}
    lead = reasoning_lead(REASONING_FORMS["harmony"], is_open=False, special_tokens=tokens)
    start, end, message, channel = (f"<[{i}]>" for i in range(4))
    assert f'lead:  ({channel} "analysis" {message} thoughts)* {channel} "final" {message}' in lead
    assert f'thoughts: TEXT {end} {start} "assistant"' in lead


# ---- requests ----------------------------------------------------------------------------------

WEATHER = f"{ANALYSIS}Paris.{NEXT}{CALL.replace('functions.f', 'functions.get_weather')}"
WEATHER_CALL = WEATHER + '{"city": "Paris"}<|call|>'
SUNNY = f"{ANALYSIS}Paris.{NEXT}{PREAMBLE}Let me see.{NEXT}{FINAL}Sunny."


@pytest.fixture
async def serve(start):
    async def serve(*answers: str, special: tuple[str, ...] = SPECIAL, **config: Any) -> Server:
        engine = scripted_engine(*answers, template=families.HARMONY, special_tokens=special)
        return await start(engine, ServerConfig(**config))

    return serve


@pytest.mark.parametrize("special", [SPECIAL, ()], ids=["special tokens", "text"])
async def test_chat_has_reasoning_content_and_calls(serve, special):
    server = await serve(WEATHER_CALL, special=special)
    _, whole = await server.post(CHAT, chat())
    [choice] = whole["choices"]
    streamed = joined(await server.events(CHAT, chat(stream=True)))
    assert choice["finish_reason"] == streamed["finish_reason"] == "tool_calls"
    for message in (choice["message"], streamed):
        assert message["reasoning"] == message["reasoning_content"] == "Paris."
        assert not message.get("content")
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert streamed["tool_calls"][0]["arguments"] == '{"city": "Paris"}'
    assert len(streamed["chunks"]) > 10, "the arguments come as they are written"

    server = await serve(SUNNY, special=special)
    for tools in ({}, {"tools": chat()["tools"]}):
        body = {"messages": chat()["messages"], **tools}
        _, whole = await server.post(CHAT, body)
        streamed = joined(await server.events(CHAT, {**body, "stream": True}))
        for message in (whole["choices"][0]["message"], streamed):
            assert message["reasoning"] == "Paris."
            assert message["content"] == "Let me see.\n\nSunny."
        assert whole["choices"][0]["finish_reason"] == "stop"
        used = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert len("Paris.") < used < whole["usage"]["completion_tokens"] - len("Sunny.")


async def test_responses_have_items_in_order(serve):
    answer = f"{ANALYSIS}a{NEXT}{PREAMBLE}b{NEXT}{WEATHER_CALL}"
    server = await serve(answer)
    more: dict[str, Any] = {"tools": [responses.TOOL]}
    whole = await responses.created(server, **more)
    events = await responses.streamed(server, **more)
    output = responses.put_together(events)
    assert output == events[-1]["response"]["output"]
    for items in (whole["output"], output):
        kinds = [item["type"] for item in items]
        assert kinds == ["reasoning", "message", "reasoning", "function_call"]
        assert items[0]["content"][0]["text"] == "a"
        assert items[1]["content"][0]["text"] == "b"
        assert (items[3]["name"], items[3]["arguments"]) == ("get_weather", '{"city": "Paris"}')


async def test_messages_have_blocks(serve):
    server = await serve(WEATHER_CALL)
    body = messages.message(tools=[messages.TOOL])
    _, whole = await server.post(messages.PATH, body)
    streamed = messages.put_together(await messages.streamed(server, body))
    for answer in (whole, streamed):
        assert [block["type"] for block in answer["content"]] == ["thinking", "tool_use"]
        assert answer["content"][0]["thinking"] == "Paris."
        assert answer["content"][1]["input"] == {"city": "Paris"}
        assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_truncated_reasoning_leaves_no_content(serve, stream):
    server = await serve(SUNNY)
    body = chat(max_tokens=1 + len("analysis") + 1 + len("Par"))
    if stream:
        message = joined(await server.events(CHAT, {**body, "stream": True}))
    else:
        message = (await server.post(CHAT, body))[1]["choices"][0]["message"]
    assert message["reasoning"] == "Par" and not message.get("content")


@pytest.mark.parametrize("answer", [SUNNY, f"{ANALYSIS}Paris.{NEXT}{FINAL}7"])
async def test_output_format_applies_to_the_final_channel(serve, answer):
    server = await serve(answer)
    body = chat(response_format={"type": "json_schema", "json_schema": {"schema": {"enum": [5]}}})
    status, whole = await server.post(CHAT, body)
    assert status == 200, whole
    streamed = joined(await server.events(CHAT, {**body, "stream": True}))
    for message in (whole["choices"][0]["message"], streamed):
        assert (message["content"], message["reasoning"]) == ("5", "Paris.")
    named = {**body, "tool_choice": "required"}
    status, answer = await server.post(CHAT, named)
    assert (status, answer["error"]["param"]) == (400, "tool_choice")


async def test_required_call_follows_the_reasoning(serve):
    server = await serve(SUNNY)
    _, whole = await server.post(CHAT, chat(tool_choice="required", max_tokens=300))
    message = whole["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Paris.", None)
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"


async def test_final_message_can_be_continued(serve):
    server = await serve(" sunny.")
    begun = [*chat()["messages"], {"role": "assistant", "content": "It is"}]
    body = {"messages": begun, "continue_final_message": True}
    assert (await prompt_of(server, body)).endswith(f"{FINAL}It is")
    _, whole = await server.post(CHAT, body)
    assert whole["choices"][0]["message"]["content"] == " sunny."


async def test_variables_and_previous_turns_reach_the_template(serve):
    server = await serve("x")
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    user = {"role": "user", "content": "Hi <|end|>"}
    turns = [
        {"role": "developer", "content": "Be brief."},
        user,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "9"}]},
    ]
    variables = {"builtin_tools": ["python"], "model_identity": "You are X."}
    body = {
        "messages": turns, "tools": chat()["tools"], "reasoning_effort": "high",
        "chat_template_kwargs": variables,
    }  # fmt: skip
    prompt = await prompt_of(server, body)
    today = r"\d{4}-\d\d-\d\d"
    head = rf"<\|start\|>system<\|message\|>You are X.\nDate: {today}\nReasoning: high\n"
    assert re.match(head + r"Tools: python\n<\|end\|>", prompt)
    assert "<|start|>developer<|message|>Be brief.\nnamespace functions {\n" in prompt
    assert "type get_weather = (_: {\ncity?: string,\n}) => any;" in prompt
    assert prompt.endswith(
        f"<|start|>user<|message|>Hi <|end|><|end|><|start|>assistant{ANALYSIS}Hm.{NEXT} "
        'to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|><|start|>functions.f '
        'to=assistant<|channel|>commentary<|message|>"9"<|end|><|start|>assistant'
    )
    answered = [*turns, {"role": "assistant", "content": "9", "reasoning": "So."}, user]
    prompt = await prompt_of(server, {"messages": answered})
    assert "Reasoning: medium" in prompt and "Hm." not in prompt and "So." not in prompt


async def test_preamble_of_a_previous_call_joins_its_reasoning(serve):
    """The template rejects calls with both content and reasoning."""
    server = await serve("x")
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    for reasoning, shown in (({"reasoning": "Hm."}, "Hm.\n\nLet me see."), ({}, "Let me see.")):
        body = {"messages": [*chat()["messages"], {**turn, **reasoning}]}
        assert f"{ANALYSIS}{shown}{NEXT} to=functions.f" in await prompt_of(server, body)


def prompt_tokens(answer: dict[str, Any]) -> int:
    usage = answer["usage"]  # in /v1/messages, cached tokens are counted apart
    return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi", "reasoning": {"effort": "low"}}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9,
                          "output_config": {"effort": "low"}}),
    ],
)  # fmt: skip
async def test_reasoning_effort_of_other_protocols_reaches_the_template(serve, path, body):
    server = await serve(f"{FINAL}x")
    rendered = server.engine.chat_template.render
    low = rendered([{"role": "user", "content": "Hi"}], reasoning_effort="low")
    num_tokens = len(server.engine.tokenizer.encode(low, False))
    _, answer = await server.post(path, body)
    assert prompt_tokens(answer) == num_tokens
    _, answer = await server.post(path, {**body, "reasoning": None, "output_config": None})
    assert prompt_tokens(answer) == num_tokens + len("medium") - len("low")


async def test_disabled_parsers_leave_the_format_in_the_text(serve):
    server = await serve(SUNNY, reasoning_parser="none", tool_call_parser="none")
    body = {"messages": chat()["messages"], "skip_special_tokens": False}
    _, whole = await server.post(CHAT, body)
    assert whole["choices"][0]["message"]["content"] == SUNNY
