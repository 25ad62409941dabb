"""Grammars for outputs with tool calls, in the model family's tool call format.

The parser of the same format can read every output that the grammar allows. The arguments follow
the functions' schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from forge_jax.errors import RequestError
from forge_jax.grammar import GrammarSpec
from forge_serve.openai.tools import Function, ToolChoice
from forge_serve.parsers.reasoning import ReasoningFormat
from forge_serve.parsers.tool_calls import ToolCallFormat

# At most one space between the parts of the arguments, because weak models can emit endless
# whitespace.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def call_grammar(
    form: ToolCallFormat,
    choice: ToolChoice,
    *,
    parallel: bool,
    reasoning: ReasoningFormat | None,
    reasoning_is_open: bool,
    special_tokens: Mapping[str, int],
) -> GrammarSpec:
    """Return a grammar that enforces tool calls.

    If the choice is "required", the output consists of calls only. Otherwise it is any text, in
    which everything that begins like a call is a valid call.

    Args:
      form: the tool call format, which must have a grammar.
      parallel: True if the output may have several calls.
      reasoning: the format of reasoning before the answer; None: there is none.
      reasoning_is_open: True if the prompt has opened the reasoning. The output must then close it.
      special_tokens: the ids of the model's special tokens. They never match as text.

    Raises:
      RequestError: a function's schema does not describe an object.
    """
    written = form.written(special_tokens.keys())
    assert written is not None, "this format has no grammar"
    lark = _Lark(special_tokens)
    for i, function in enumerate(choice.functions):
        begin, end = lark.text(written.begin(function.name)), lark.text(written.end)
        lark.rule(f"call_{i}", f"{begin} %json {_schema(i, function)} {end}")
    lark.rule("call", " | ".join(f"call_{i}" for i in range(len(choice.functions))))
    more = f"({lark.text(written.between)} call)*" if parallel else ""
    lark.rule("calls", f"{lark.text(written.first)} call {more} {lark.text(written.last)}")
    marker = lark.text(written.marker)
    lark.text_rule()
    if choice.mode == "required":
        lark.rule("answer", f"{marker} calls")
    elif written.final:
        begin, end = map(lark.text, written.preamble)
        lark.rule("preamble", f"{begin} TEXT {end}")
        lark.rule("answer", f"preamble* ({marker} calls | {lark.text(written.final)} TEXT)")
    elif not written.marker:  # a call without a marker must be the whole answer
        lark.rule("PLAIN", rf"/([^ \t\r\n{re.escape(form.bare)}](.|\n)*)?/")
        lark.rule("answer", "calls | PLAIN")
    elif written.marker in special_tokens:
        lark.rule("answer", f"TEXT ({marker} calls TEXT)*")
    else:
        lark.rule("lead[lazy]", f"TEXT {marker}")  # lazy: ends at the first marker
        lark.rule("answer", "(lead calls)* TEXT")
    thought = "" if reasoning is None else _thought(lark, reasoning, reasoning_is_open)
    lark.rule("start", f"{thought} answer")
    return GrammarSpec.grammar(str(lark))


def reasoning_lead(
    form: ReasoningFormat, *, is_open: bool, special_tokens: Mapping[str, int]
) -> str:
    """Return the rule `lead` of a `GrammarSpec`: reasoning, which must close if it `is_open`.

    It also has the text that opens the answer.
    """
    lark = _Lark(special_tokens)
    lark.text_rule()
    lark.rule("lead", f"{_thought(lark, form, is_open)} {lark.text(form.answer)}")
    return str(lark)


class _Lark:
    """A grammar in llguidance's Lark syntax."""

    def __init__(self, special_tokens: Mapping[str, int]):
        self.special_tokens = special_tokens
        self._rules = ["%llguidance {}"]
        names = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)")

    def __str__(self) -> str:
        return "\n".join(self._rules)

    def rule(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")

    def text_rule(self) -> None:
        """Add the terminal TEXT, which matches any text."""
        self.rule("TEXT", r"/(.|\n)*/")

    def begins_special(self, text: str) -> bool:
        return self._special.match(text) is not None

    def text(self, text: str) -> str:
        """Return a text as part of a rule. Special tokens in it match their token ids."""
        tokens = self.special_tokens
        return " ".join(
            f"<[{tokens[piece]}]>" if piece in tokens else json.dumps(piece, ensure_ascii=False)
            for piece in self._special.split(text)
            if piece
        )


def _thought(lark: _Lark, form: ReasoningFormat, is_open: bool) -> str:
    """Add the rules for reasoning, and return the expression that precedes the answer."""
    begin, end = lark.text(form.begin), lark.text(form.end)
    if lark.begins_special(form.end):
        lark.rule("thoughts", f"TEXT {end}")
    else:
        lark.rule("thoughts[lazy]", f"TEXT {end}")
    if form.repeats:
        return f"{'thoughts' if is_open else ''} ({begin} thoughts)*"
    lark.rule("NEWLINES", r"/\n{0,2}/")
    return "thoughts NEWLINES" if is_open else f"({begin} thoughts NEWLINES)?"


def _schema(i: int, function: Function) -> str:
    """Return the schema of a function's arguments, including llguidance's options."""
    schema = dict(function.parameters or {"properties": {}, "additionalProperties": False})
    if schema.setdefault("type", "object") != "object":
        path = f"tools[{i}].function.parameters"
        raise RequestError(f'{path} must be a JSON schema of type "object"', param=path)
    lenient = {"lenient": not function.strict, "coerce_one_of": not function.strict}
    options: dict[str, Any] = {**_SPACES, **lenient}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
