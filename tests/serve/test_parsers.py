"""Tool calls and reasoning in a text, independent of its splits."""

from __future__ import annotations

import json
import random
import time

import pytest

from forge_serve.config import ReasoningParserName, ToolCallParserName
from forge_serve.parsers import tool_calls
from forge_serve.parsers.answer import AnswerParser
from forge_serve.parsers.families import CALL_FORMS, REASONING_FORMS
from forge_serve.parsers.hermes import HermesFormat
from forge_serve.parsers.parts import Parts
from forge_serve.parsers.reasoning import ReasoningParser, ReasoningTokens
from forge_serve.parsers.tool_calls import MAX_HELD_CHARS, ToolCallParser

FUNCTIONS = frozenset({"f", "get_weather"})
type Answer = tuple[str, str, list[tuple[str, str]]]


def tool_parser(form: str, *, whole: bool = True, parallel: bool = True) -> AnswerParser:
    parser = ToolCallParser(CALL_FORMS[form], FUNCTIONS, whole=whole, parallel=parallel)
    return AnswerParser(None, parser)


def read(parser: AnswerParser, pieces: list[str]) -> Answer:
    """Return content, reasoning and (name, arguments) of the calls, assembled from all events."""
    events = [parser.push(piece) for piece in pieces] + [parser.finish()]
    total = Parts()
    for event in events:
        for piece in event.calls:
            new = piece.index == len(total.calls)
            assert new or piece.index == len(total.calls) - 1, "calls come one after the other"
            assert (piece.id is not None) == (piece.name is not None) == new
            total.add(Parts(calls=[piece]))
        total.add(Parts(event.content, event.reasoning))
    assert len({call.id for call in total.calls}) == len(total.calls)
    calls = [(call.name or "", "".join(call.arguments)) for call in total.calls]
    return "".join(total.content), "".join(total.reasoning), calls


ARGS = r'{"city": "São \"Paulo\" }]", "n": [1, -2.5e3, {"a": null}], "😀": true}'
# family, text, content, calls
WELL_FORMED: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "hermes",
        f'<tool_call>\n{{"name": "f", "arguments": {ARGS}}}\n</tool_call>',
        "",
        [("f", ARGS)],
    ),
    (
        "hermes",
        'Let me see.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
        '<tool_call>{"arguments": {"a": 1}, "name": "other"}</tool_call>\n',
        "Let me see.\n",
        [("f", "{}"), ("other", '{"a": 1}')],
    ),
    ("hermes", '\n\n<tool_call>{"name":"f","arguments":{}}', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":{}}</tool_', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":{}} so.', " so.", [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"id": 3, "name": "f", "why": ["x"], "arguments": {}}</tool_call>tail',
        "tail",
        [("f", "{}")],
    ),
    ("llama3_json", f'{{"name": "f", "parameters": {ARGS}}}', "", [("f", ARGS)]),
    ("llama3_json", ' {"type": "function", "name": "f", "parameters": {}}\n', "", [("f", "{}")]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "get_weather", "arguments": {}}',
        "",
        [("f", '{"a": 1}'), ("get_weather", "{}")],
    ),
    ("llama3_json", 'Hm. <|python_tag|>{"name": "x", "parameters": {}}', "Hm. ", [("x", "{}")]),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGS}}}, {{"name": "g", "arguments": {{}}}}]',
        "",
        [("f", ARGS), ("g", "{}")],
    ),
    (
        "mistral",
        'So: [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]h{}',
        "So: ",
        [("f", '{"a": 1}'), ("g", "{}"), ("h", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    (
        "pythonic",
        "[f(a='it\\'s \"x\"\\n\\u00e9\\x41\\q', b=[1, 2.50, .5, 1_000, +3, -4,], c={'k': None, }, "
        "d=True, e=false,), get_weather()]",
        "",
        [
            (
                "f",
                '{"a": "it\'s \\"x\\"\\né' + 'A\\\\q", "b": [1, 2.50, 0.5, 1000, 3, -4], '
                '"c": {"k": null}, "d": true, "e": false}',
            ),
            ("get_weather", "{}"),
        ],
    ),
    ("pythonic", "\n[ f ( ) , f(a = 1) ]\n", "", [("f", "{}"), ("f", '{"a": 1}')]),
    (
        "llama4_pythonic",
        "<|python_start|>[any.name(a=\"b\")]<|python_end|>",
        "",
        [("any.name", '{"a": "b"}')],
    ),
    ("llama4_pythonic", "[f(a=1)]", "", [("f", '{"a": 1}')]),
]  # fmt: skip

# Invalid calls, whose text becomes the content, except for white space at its ends.
MALFORMED: list[tuple[str, str]] = [
    ("hermes", "plain text"),
    ("hermes", "a < b <tool <tool_call"),
    ("hermes", " \n "),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>I would call f</tool_call>"),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {bad}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 70 + "1" + "}" * 71),
    ("hermes", '<tool_call>{"name": "' + "f" * 300 + '", "arguments": {}}</tool_call>'),
    ("llama3_json", '{"name": "Alice", "parameters": {}}'),
    ("llama3_json", '{"name": "f", "age": 3}'),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", 'Use {"name": "f", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("mistral", "[TOOL_CALLS] I cannot do that"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]f[XRGS]{}"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a"}'),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[]"),
    ("pythonic", "[print(a=1)]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=b)]"),
    ("pythonic", "[f(a=1, a=2)]"),
    ("pythonic", "[f(a={1: 2})]"),
    ("pythonic", "[f(a=(None))]"),
    ("pythonic", "[f(a=nan)]"),
    ("pythonic", "[f(a=1e999999_)]"),
    ("pythonic", "[f(a='\\N{BULLET}')]"),
    ("pythonic", "f(a=1)"),
]


def cuts(text: str) -> list[list[str]]:
    """Split in two at every position, in single characters, and at random positions."""
    rng = random.Random(text)
    ways = [[text[:i], text[i:]] for i in range(len(text) + 1)]
    ways += [[text], list(text)]
    for _ in range(20):
        places = sorted(rng.choices(range(len(text) + 1), k=6))
        ends = [*places, len(text)]
        ways.append([text[a:b] for a, b in zip([0, *places], ends, strict=True)])
    return ways


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("form", "text", "content", "calls"), WELL_FORMED)
def test_calls_are_found_at_any_token_boundary(form, text, content, calls, whole):
    for pieces in cuts(text):
        assert read(tool_parser(form, whole=whole), pieces) == (content, "", calls), pieces
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(("form", "text"), MALFORMED)
def test_text_without_a_call_is_content(form, text):
    for pieces in cuts(text):
        assert read(tool_parser(form), pieces) == (text, "", []), pieces


@pytest.mark.parametrize(("form", "text"), MALFORMED)
def test_stream_loses_no_text_outside_calls(form, text):
    """Streamed arguments cannot be withdrawn; the rest is content."""
    first = read(tool_parser(form, whole=False), [text])
    for pieces in cuts(text):
        assert read(tool_parser(form, whole=False), pieces) == first, pieces
    content, _, calls = first
    if form.endswith("pythonic"):
        return  # its arguments are rewritten
    for _, arguments in calls:
        assert text.endswith(arguments + content)
    assert calls or content == text


@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "one call"])
@pytest.mark.parametrize(("form", "text", "content", "calls"), WELL_FORMED)
def test_truncated_answer_is_the_same_streamed_and_whole(form, text, content, calls, parallel):
    calls = calls if parallel else calls[:1]
    for end in range(len(text) + 1):
        cut = text[:end]
        whole = read(tool_parser(form, parallel=parallel), [cut])
        for pieces in ([cut], list(cut)):
            streamed = read(tool_parser(form, whole=False, parallel=parallel), pieces)
            assert streamed == whole, cut
        got_content, _, got_calls = whole
        for (name, got), (whole_name, arguments) in zip(got_calls, calls, strict=False):
            assert name == whole_name and arguments.startswith(got.removesuffix(".0")), cut
            assert got == arguments or content.startswith(got_content), cut


@pytest.mark.parametrize(("form", "text"), MALFORMED)
def test_only_streamed_arguments_distinguish_broken_calls(form, text):
    for end in range(0, len(text) + 1, 1 + len(text) // 100):
        cut = text[:end]
        whole = read(tool_parser(form), [cut])
        content, _, calls = streamed = read(tool_parser(form, whole=False), list(cut))
        if streamed != whole:
            assert whole == (cut, "", []) and calls and cut.endswith(content), cut


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 12', '{"x": 12'),
        ("hermes", '\n<tool_call>{"name": "f", "arguments": {"x": -', '{"x": '),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": tru', '{"x": '),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "a\\u00', '{"x": "a'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}', '{"x": 1}'),
        ("llama3_json", '{"name": "f", "parameters": {"x": [1, 2', '{"x": [1, 2'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 12', '{"x": 12'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": 12', '{"x": 12'),
        ("pythonic", "[f(x=12", '{"x": 12'),
        ("pythonic", "[f(x=Tru", '{"x": '),
        ("llama4_pythonic", "<|python_start|>[f(x='a", '{"x": "a'),
    ],
)
def test_truncated_call_keeps_its_arguments_once(form, text, arguments, whole):
    parser = tool_parser(form, whole=whole)
    assert read(parser, [text]) == ("", "", [("f", arguments)])
    assert not parser.called


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "streamed"])
def test_truncated_second_call_is_dropped_without_parallel_calls(whole):
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
    for end in range(len("<tool_call>"), len(call) - 1):
        parser = tool_parser("hermes", whole=whole, parallel=False)
        assert read(parser, [call + call[:end]]) == ("", "", [("f", '{"a": 1}')])


def test_broken_call_does_not_hide_the_next():
    broken = '<tool_call>{"name": "f", "arguments": {"a": "1"'
    good = '<tool_call>{"name": "f", "arguments": {"b": 2}}</tool_call>'
    for pieces in cuts(broken + good):
        assert read(tool_parser("hermes"), pieces) == (broken, "", [("f", '{"b": 2}')])
        content, _, calls = read(tool_parser("hermes", whole=False), pieces)
        assert (content, calls) == ("", [("f", '{"a": "1"'), ("f", '{"b": 2}')])


def test_only_complete_calls_count():
    parser = tool_parser("hermes", whole=False)
    read(parser, ['<tool_call>{"name": "f", "arguments": {"a": '])
    assert not parser.called
    parser = tool_parser("hermes", whole=False)
    read(parser, ['<tool_call>{"name": "f", "arguments": {}}'])
    assert parser.called


@pytest.mark.parametrize("whole", [True, False])
def test_only_the_first_call_stays_without_parallel_calls(whole):
    call = '<tool_call>{"name": "f", "arguments": {"a": %d}}</tool_call>\n'
    text = call % 1 + call % 2 + "end"
    for pieces in cuts(text):
        parser = tool_parser("hermes", whole=whole, parallel=False)
        assert read(parser, pieces) == ("\nend", "", [("f", '{"a": 1}')])


def test_arguments_are_streamed_as_they_come():
    parser = tool_parser("hermes", whole=False)
    assert not parser.push('<tool_call>{"name": "get_weather", "argum').calls
    [piece] = parser.push('ents": {"city": "Par').calls
    assert (piece.index, piece.name, piece.arguments) == (0, "get_weather", list('{"city": "Par'))
    [piece] = parser.push("is").calls
    assert (piece.index, piece.id, piece.name, piece.arguments) == (0, None, None, ["i", "s"])


def test_text_that_cannot_be_a_marker_is_not_delayed():
    parser = tool_parser("hermes", whole=False)
    assert "".join(parser.push("a <tool").content) == "a "
    assert "".join(parser.push("box").content) == "<toolbox"


def test_call_ids_have_the_form_that_templates_accept():
    for form, length in (("hermes", 29), ("mistral", 9)):
        ids = {CALL_FORMS[form].new_id() for _ in range(100)}
        assert len(ids) == 100 and {len(id) for id in ids} == {length}
        assert all(id.replace("_", "").isalnum() for id in ids)
        assert all(id.startswith("call_") for id in ids) == (form != "mistral")


def test_unfinished_call_start_is_held_back_for_a_bounded_length():
    text = '<tool_call>{"arguments": {"a": "' + "x" * MAX_HELD_CHARS
    for whole in (True, False):
        parser = tool_parser("hermes", whole=whole)
        parser.push(text[: len(text) // 2])
        assert "".join(parser.push(text[len(text) // 2 :]).content).startswith("<tool_call>")
        assert read(tool_parser("hermes", whole=whole), [text])[0] == text


HOSTILE = [
    ("hermes", "", "<"),
    ("hermes", "", "<tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "<tool_call>"),
    ("hermes", "", "\n"),
    ("hermes", "<think>", "\n"),
    ("hermes", "<think>", "</think"),
    ("mistral", "", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS][", '{"name": "f", "arguments": {}},'),
    ("llama3_json", '{"name": "f", "parameters": {', '"a": [1, 2, 3], '),
    ("llama3_json", '{"name": "f", "parameters": {"a": ', "["),
    ("llama3_json", '{"name": "f", "parameters": {"a": ', "1"),
    ("pythonic", "[f(a='", "\\"),
    ("pythonic", "[f(a='", "x"),
]


@pytest.mark.parametrize(("form", "begin", "again"), HOSTILE)
@pytest.mark.parametrize("piece", [3, 10**9])
def test_parse_time_is_linear_in_the_length(form, begin, again, piece):
    """Sixteen times the text must take about 16 times as long, not 256 times."""

    def seconds(length: int) -> float:
        text = begin + again * (length // len(again))
        pieces = [text[i : i + piece] for i in range(0, len(text), piece)]
        begin_s = time.process_time()
        reasoning = ReasoningParser(REASONING_FORMS["qwen3"], open=False)
        tools = ToolCallParser(CALL_FORMS[form], FUNCTIONS, whole=False)
        read(AnswerParser(reasoning, tools), pieces)
        return time.process_time() - begin_s

    short_s = min(seconds(2_000) for _ in range(3))
    assert min(seconds(32_000) for _ in range(2)) < 80 * short_s + 0.01


def test_failing_reader_leaves_the_text_as_content(monkeypatch, caplog):
    def read_and_fail(self, calls):
        yield
        yield
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(HermesFormat, "read", read_and_fail)
    text = "Well: <tool_call>abcd</tool_call> and <tool_call>more"
    for pieces in cuts(text):
        caplog.clear()
        assert read(tool_parser("hermes", whole=False), pieces) == (text, "", [])
        [record] = caplog.records
        assert record.name == tool_calls.__name__ and "secret" not in record.getMessage()
        assert "ZeroDivisionError in read_and_fail" in record.getMessage()


# name, open at the beginning, text, reasoning, content
REASONING = [
    ("qwen3", False, "<think>\nHm.\n\nYes.\n</think>\n\nNo.\n", "Hm.\n\nYes.", "No.\n"),
    ("qwen3", True, "Hm.\n</think>\n\nNo.", "Hm.", "No."),
    ("qwen3", True, "\nHm </think", "Hm </think", ""),
    ("qwen3", True, "Hm\n\n", "Hm\n\n", ""),
    ("qwen3", False, " \n<think></think>No.", "", "No."),
    ("qwen3", False, "No <think>Hm</think>", "", "No <think>Hm</think>"),
    ("qwen3", False, " <thi", "", " <thi"),
    ("qwen3", False, " \n ", "", " \n "),
    ("qwen3", False, "", "", ""),
    ("qwen3", False, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    ("mistral", False, "[THINK]Hm[/THINK]No", "Hm", "No"),
    ("deepseek_r1", True, "Hm</think>\n\n No", "Hm", " No"),
]


@pytest.mark.parametrize(("name", "open", "text", "reasoning", "content"), REASONING)
def test_reasoning_is_separated_at_any_token_boundary(name, open, text, reasoning, content):
    for pieces in cuts(text):
        parser = AnswerParser(ReasoningParser(REASONING_FORMS[name], open=open), None)
        assert read(parser, pieces) == (content, reasoning, []), pieces


def test_reasoning_may_be_followed_by_calls():
    text = '<think>\n<tool_call>no</tool_call></think>\n\n{"name": "f", "parameters": {"a": 1}}'
    for pieces in cuts(text):
        reasoning = ReasoningParser(REASONING_FORMS["qwen3"], open=False)
        tools = ToolCallParser(CALL_FORMS["llama3_json"], FUNCTIONS, whole=False)
        answer = read(AnswerParser(reasoning, tools), pieces)
        assert answer == ("", "<tool_call>no</tool_call>", [("f", '{"a": 1}')])


@pytest.mark.parametrize(
    ("name", "prompt", "open"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", "what is <think>?<|im_start|>assistant\n", False),
        ("deepseek_r1", "<|Assistant|>", True),
        ("deepseek_r1", "<|Assistant|></think>", False),
    ],
)
def test_template_may_have_opened_the_reasoning(name, prompt, open):
    assert REASONING_FORMS[name].is_open_after(prompt) == open


@pytest.mark.parametrize(
    ("name", "open", "tokens", "reasoning"),
    [
        ("qwen3", False, ["<think>", "\n", "Hm", ".", "</think>", "\n\n", "Yes"], 5),
        ("qwen3", False, ["\n", "<th", "ink", ">Hm.", "</thi", "nk>Yes", "."], 6),
        ("qwen3", False, ["\n", "<th", "is> </think>", "Yes"], 0),
        ("qwen3", False, ["Yes", "<think>", "Hm", "</think>"], 0),
        ("qwen3", False, ["<think>", "Hm", "<think>"], 3),
        ("qwen3", False, ["\n", "<thi"], 0),
        ("qwen3", True, ["Hm", "</think>", "Yes"], 2),
        ("qwen3", True, ["</think>", "Yes"], 1),
        ("deepseek_r1", True, ["Hm", "é", "</think>", "<think>"], 3),
        ("mistral", False, ["[THINK]", "Hm", "</think>", "[/THINK]", "Yes"], 4),
    ],
)
def test_reasoning_tokens_end_with_the_reasoning(name, open, tokens, reasoning):
    pieces = [piece.encode() for piece in tokens]
    for size in range(1, len(tokens) + 1):  # for any number of tokens at once
        counter = ReasoningTokens(
            ReasoningParser(REASONING_FORMS[name], open=open), pieces.__getitem__
        )
        for begin in range(0, len(tokens), size):
            counter.push(range(len(tokens))[begin : begin + size])
        assert counter.number == reasoning


def test_text_after_the_reasoning_needs_no_parser():
    parser = AnswerParser(ReasoningParser(REASONING_FORMS["qwen3"], open=True), None)
    parser.push("Hm.")
    assert not parser.over
    parser.push("</think>")
    assert not parser.over, "line breaks may follow"
    parser.push("\n\nNo.")
    assert parser.over


def test_flags_list_every_parser():
    assert set(ToolCallParserName.__args__) == {"auto", "none", *CALL_FORMS}
    assert set(ReasoningParserName.__args__) == {"auto", "none", *REASONING_FORMS}
