"""Grammars of tool calls: the allowed texts of each format, and their parsing."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from forge_jax.engine.fake import fake_tokenizer
from forge_jax.errors import GrammarError, RequestError
from forge_jax.grammar import GrammarCompiler
from forge_jax.text import Tokenizer
from forge_serve.openai.call_grammar import call_grammar
from forge_serve.openai.tools import tool_choice
from forge_serve.parsers.answer import AnswerParser
from forge_serve.parsers.families import CALL_FORMS, REASONING_FORMS
from forge_serve.parsers.tool_calls import ToolCallParser

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "description": "start: ::=",
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
SPECIAL = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")
NAMED = {"type": "function", "function": {"name": "now"}}

WEATHER = ("get_weather", '{"city": "Paris", "days": 3}')
NOW = ("now", "{}")
# The text of calls of these two functions, by format; Mistral's newer tokens come last.
WRITTEN = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    "llama3_json": (
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; '
        '{"name": "now", "parameters": {}}'
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "now", "arguments": {}}]'
    ),
    "mistral new": (
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[ARGS]{}'
    ),
}


class Held:
    """A grammar applied to texts."""

    def __init__(
        self,
        form: str,
        choice: Any = "required",
        *,
        special: tuple[str, ...] = (),
        tools: list[dict[str, Any]] = TOOLS,
        thinks: str = "",
        thinking: bool = False,
        parallel: bool = True,
    ):
        backend = copy.deepcopy(fake_tokenizer().backend)
        backend.add_special_tokens(list(special))
        self.tokenizer = Tokenizer(backend, {"eos_token": "</s>"})
        self.end = self.tokenizer.eos_token_id
        assert self.end is not None
        self.form = CALL_FORMS[form.split()[0]]
        spec = call_grammar(
            self.form,
            tool_choice(tools, choice),
            parallel=parallel,
            reasoning=REASONING_FORMS[thinks] if thinks else None,
            reasoning_is_open=thinking,
            special_tokens={self.tokenizer.token_text(i): i for i in self.tokenizer.special_ids},
        )
        self.compiler = GrammarCompiler(
            self.tokenizer, self.tokenizer.vocab_size, (self.end,), limits=None
        )
        self.grammar = self.compiler.compile(spec)

    def takes(self, text: str, *, ends: bool = True) -> bool:
        """Return True if the text is allowed and, with `ends`, complete."""
        matcher = self.grammar.matcher()
        try:
            matcher.accept(self.tokenizer.encode(text, False))
            return matcher.accepting or not ends
        except GrammarError:
            return False

    def read(self, text: str) -> list[tuple[str | None, str]]:
        names = frozenset({"get_weather", "now"})
        parser = AnswerParser(None, ToolCallParser(self.form, names, whole=True))
        parts = parser.push(text)
        parts.add(parser.finish())
        assert not parts.content
        return [(call.name, "".join(call.arguments)) for call in parts.calls]


@pytest.mark.parametrize("special", [(), SPECIAL], ids=["text", "special tokens"])
@pytest.mark.parametrize("form", WRITTEN)
def test_parser_reads_the_calls_that_the_grammar_demands(form, special):
    if form.startswith("mistral") and (form == "mistral new") != bool(special):
        special = ("[TOOL_CALLS]", "[ARGS]") if form == "mistral new" else ("[TOOL_CALLS]",)
    held = Held(form, special=special)
    text = WRITTEN[form]
    assert held.takes(text)
    assert held.read(text) == [WEATHER, NOW]
    assert not held.takes("")
    assert not held.takes("Hello", ends=False)
    assert not held.takes(text[:40])
    assert not held.takes(text.replace('"Paris"', "5"), ends=False)
    assert not held.takes(text.replace("get_weather", "forecast"), ends=False)
    assert not held.takes(text.replace('"city": "Paris", ', ""), ends=False)
    assert not held.takes(text.replace("{}", '{"a": 1}'), ends=False)
    assert not held.takes(text + " and", ends=False)
    alone = Held(form, special=special, parallel=False)
    assert not alone.takes(text, ends=False)


@pytest.mark.parametrize("form", WRITTEN)
def test_named_function_is_the_only_one_allowed(form):
    held = Held(form, NAMED, special=("[TOOL_CALLS]", "[ARGS]") if "new" in form else ())
    assert not held.takes(WRITTEN[form], ends=False)
    for call in (
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        '{"name": "now", "parameters": {}}',
        '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
        "[TOOL_CALLS]now[ARGS]{}",
    ):
        if held.takes(call):
            assert held.read(call) == [NOW]
            break
    else:
        raise AssertionError("no call of it is allowed")


@pytest.mark.parametrize("special", [(), SPECIAL], ids=["text", "special tokens"])
def test_reasoning_may_precede_a_call(special):
    text = WRITTEN["hermes"]
    closed = Held("hermes", special=special, thinks="qwen3")
    assert closed.takes(text)
    assert closed.takes(f"<think>\nHm, a <call>\n</think>\n\n{text}")
    assert not closed.takes(f"<think></think>So: {text}", ends=False)
    open = Held("hermes", special=special, thinks="qwen3", thinking=True)
    assert open.takes(f"Hm.</think>\n\n{text}")
    assert not open.takes("Hm.")
    assert not open.takes("Hm.</think>So", ends=False)


@pytest.mark.parametrize("special", [(), SPECIAL], ids=["text", "special tokens"])
def test_strict_calls_may_occur_in_free_text(special):
    held = Held("hermes", "auto", special=special)
    text = WRITTEN["hermes"]
    for free in ("", "Hello { [ <tool> there.\n", text, f"Let me see.\n{text}", f"{text}\nDone."):
        assert held.takes(free), free
    assert not held.takes("So: <tool_call>now", ends=False)
    assert not held.takes(text.replace('"Paris"', "5"), ends=False)
    bare = Held("llama3_json", "auto")
    for free in ("", "Hello {", WRITTEN["llama3_json"]):
        assert bare.takes(free), free
    assert not bare.takes('{"name": "x', ends=False)


def test_unsupported_schema_keywords_are_ignored_unless_strict():
    odd = {"properties": {"a": {"type": "string", "contains": {"type": "integer"}}}}
    tool = {"type": "function", "function": {"name": "now", "parameters": odd}}
    held = Held("llama3_json", tools=[tool])
    assert held.takes('{"name": "now", "parameters": {"a": "b"}}')
    tool = {"type": "function", "function": {**tool["function"], "strict": True}}
    with pytest.raises(RequestError, match="cannot be used"):
        Held("llama3_json", tools=[tool])
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
    with pytest.raises(RequestError, match='schema of type "object"'):
        Held("hermes", tools=[tool])


def test_schema_strings_are_escaped_in_the_grammar():
    odd = {"properties": {'"}\nstart: "x': {"enum": ['\n"', "::="]}}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "now", "parameters": odd}}
    held = Held("llama3_json", tools=[tool])
    arguments = json.dumps({'"}\nstart: "x': "::="})
    assert held.takes('{"name": "now", "parameters": ' + arguments + "}")
    assert not held.takes("x", ends=False)
