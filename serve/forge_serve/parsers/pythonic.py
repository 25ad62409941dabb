"""Tool calls in Python syntax: `[f(a=1, b="x"), g()]`. Llama 4 puts them between tags."""

from __future__ import annotations

import json
import math
from typing import ClassVar

from forge_serve.parsers.reading import (
    JSON_NUMBER,
    MAX_NAME_CHARS,
    Emit,
    JsonSyntax,
    Malformed,
    Read,
    closing,
    hex_digits,
    space,
    value,
    word,
)
from forge_serve.parsers.tool_calls import CallSink, ToolCallFormat

_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_CONSTANTS |= {name: name for name in _CONSTANTS.values()}  # models also write JSON's
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_ESCAPES |= {c: c for c in "\\'\""}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


class PythonicFormat(ToolCallFormat):
    name = "pythonic"
    bare = "["

    end_marker: ClassVar[str] = ""

    def read(self, calls: CallSink) -> Read[None]:
        c = yield from space((yield))
        if c != "[":
            raise Malformed
        c = yield from space((yield))
        while True:
            yield from self._call(c, calls)
            c = yield from space((yield))
            if c == ",":
                c = yield from space((yield))
            elif c and c != "]":
                raise Malformed
            if c == "]":
                break
            if not c:
                return
        if self.end_marker:
            yield from closing(self.end_marker)

    def _call(self, c: str, calls: CallSink) -> Read[None]:
        name, c = yield from word(c, _in_name, MAX_NAME_CHARS)
        calls.check(name)
        c = yield from space(c)
        if c != "(":
            raise Malformed
        calls.begin(name)
        calls.arguments("{")
        c = yield from space((yield))
        seen: set[str] = set()
        while c != ")":
            key, c = yield from word(c, _in_name, MAX_NAME_CHARS)
            c = yield from space(c)
            if c != "=" or key in seen:
                raise Malformed
            calls.arguments(f"{', ' if seen else ''}{json.dumps(key)}: ")
            seen.add(key)
            c = yield from space((yield))
            after = yield from value(c, calls.arguments, PYTHON)
            c = yield from space((yield) if after is None else after)
            if c == ",":
                c = yield from space((yield))
            elif c != ")":
                raise Malformed
        calls.arguments("}")
        calls.end()


class Llama4PythonicForm(PythonicFormat):
    name = "llama4_pythonic"
    markers = ("<|python_start|>",)
    end_marker = "<|python_end|>"
    syntax_tokens = ("<|python_end|>",)


class PythonSyntax(JsonSyntax):
    """Python's literals that JSON can express, emitted as JSON."""

    quotes = "\"'"
    trailing_commas = True

    def string(self, quote: str, emit: Emit) -> Read[None]:
        emit('"')
        while (c := (yield)) != quote:
            if not c:
                raise Malformed
            emit(_escaped((yield from _escape()) if c == "\\" else c))
        emit('"')

    def scalar(self, text: str) -> str:
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if JSON_NUMBER.fullmatch(text):
            return text
        if text[0] not in "0123456789+-.":  # a name, such as "nan", which `float` would accept
            raise Malformed
        try:
            return str(int(text))
        except ValueError:
            pass
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise Malformed
        return repr(number)


PYTHON = PythonSyntax()


def _escape() -> Read[str]:
    """Read an escape sequence after its backslash, and return its text.

    The text of an unknown sequence is the sequence itself.
    """
    c = yield
    if c in _ESCAPES:
        return _ESCAPES[c]
    if c in _HEX_ESCAPES:
        code = int((yield from hex_digits(_HEX_ESCAPES[c])), 16)
        if code > 0x10FFFF:
            raise Malformed
        return chr(code)
    if not c or c in "01234567N":  # octal and named escapes, which models do not write
        raise Malformed
    return "\\" + c


def _escaped(text: str) -> str:
    """Return a text as it appears inside a JSON string."""
    plain = len(text) == 1 and text >= " " and text not in '"\\' and not "\ud800" <= text < "\ue000"
    return text if plain else json.dumps(text)[1:-1]


def _in_name(c: str) -> bool:
    return c.isalnum() or c in "_.-"
