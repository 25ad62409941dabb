"""Readers, which parse a text one character at a time: the building blocks of tool call formats.

A reader is a generator that receives each character by `send`, and "" at the end of the text. The
result does not depend on how the text was split. Each character is read once, there is no
recursion, and memory is bounded.

A reader with a parameter `c` begins at that character. It returns the next unread character, or
None if it did not need to read past its own last one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import ClassVar

type Read[T] = Generator[None, str, T]
type Emit = Callable[[str], object]

MAX_DEPTH = 64  # nesting levels of arguments
MAX_NAME_CHARS = 256
MAX_SCALAR_CHARS = 400

_SPACE = frozenset(" \t\r\n")
_HEX = frozenset("0123456789abcdefABCDEF")
_SCALAR = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-._")
JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)


class Malformed(Exception):
    """The model's text does not have the format that a reader expects."""


def ignore(text: str) -> None:
    """Discard a text; an `Emit`."""


def space(c: str, emit: Emit = ignore) -> Read[str]:
    """Read whitespace, if there is any."""
    while c in _SPACE:
        emit(c)
        c = yield
    return c


def exactly(text: str) -> Read[None]:
    for expected in text:
        if (yield) != expected:
            raise Malformed


def closing(marker: str) -> Read[None]:
    """Read whitespace and the marker, which the end of the text may truncate or omit."""
    c = yield from space((yield))
    for i, expected in enumerate(marker):
        if i:
            c = yield
        if c == "":
            return
        if c != expected:
            raise Malformed


def hex_digits(count: int) -> Read[str]:
    digits = ""
    for _ in range(count):
        c = yield
        if c not in _HEX:
            raise Malformed
        digits += c
    return digits


def word(c: str, allowed: Callable[[str], bool], limit: int) -> Read[tuple[str, str]]:
    """Read 1 to `limit` allowed characters, and return them and the next character."""
    chars = []
    while c and allowed(c):
        if len(chars) == limit:
            raise Malformed
        chars.append(c)
        c = yield
    if not chars:
        raise Malformed
    return "".join(chars), c


class JsonSyntax:
    """Strict JSON, emitted unchanged."""

    quotes: ClassVar[str] = '"'
    trailing_commas: ClassVar[bool] = False

    def string(self, quote: str, emit: Emit) -> Read[None]:
        """Read the rest of a string, after its opening quote."""
        emit(quote)
        while (c := (yield)) != '"':
            if c < " ":  # also the end of the text
                raise Malformed
            if c != "\\":
                emit(c)
                continue
            c = yield
            if c == "u":
                emit("\\u" + (yield from hex_digits(4)))
            elif c and c in '"\\/bfnrt':
                emit("\\" + c)
            else:
                raise Malformed
        emit(c)

    def scalar(self, text: str) -> str:
        """Return a number or a constant as JSON."""
        if text in ("true", "false", "null") or JSON_NUMBER.fullmatch(text):
            return text
        raise Malformed


JSON = JsonSyntax()


def value(c: str, emit: Emit, syntax: JsonSyntax = JSON) -> Read[str | None]:
    """Read a value and emit it as JSON."""
    closers: list[str] = []  # closing brackets of the enclosing arrays and objects
    while True:
        if c and c in "{[":
            if len(closers) == MAX_DEPTH:
                raise Malformed
            emit(c)
            closers.append("}" if c == "{" else "]")
            c = after = yield from space((yield), emit)
            if c != closers[-1]:
                if closers[-1] == "}":
                    c = yield from _key(c, emit, syntax)
                continue
        elif c and c in syntax.quotes:
            yield from syntax.string(c, emit)
            after = None
        else:
            text, after = yield from word(c, _SCALAR.__contains__, MAX_SCALAR_CHARS)
            emit(syntax.scalar(text))
        while closers:
            c = yield from space((yield) if after is None else after, emit)
            if c == ",":
                c = yield from _comma(emit, closers[-1], syntax)
                if c != closers[-1]:
                    if closers[-1] == "}":
                        c = yield from _key(c, emit, syntax)
                    break
            if c != closers[-1]:
                raise Malformed
            emit(closers.pop())
            after = None
        else:
            return after


def _key(c: str, emit: Emit, syntax: JsonSyntax) -> Read[str]:
    """Read a key and its colon."""
    if not c or c not in syntax.quotes:
        raise Malformed
    yield from syntax.string(c, emit)
    c = yield from space((yield), emit)
    if c != ":":
        raise Malformed
    emit(c)
    return (yield from space((yield), emit))


def _comma(emit: Emit, closer: str, syntax: JsonSyntax) -> Read[str]:
    """Read past a comma and emit it, unless it precedes the closing bracket."""
    if syntax.trailing_commas:
        c = yield from space((yield))
        if c and c != closer:
            emit(", ")
        return c
    emit(",")
    c = yield from space((yield), emit)
    if c == closer:
        raise Malformed
    return c


def short_string(c: str) -> Read[str]:
    """Read a short JSON string with its quotes, such as a name or key, and return it decoded."""
    if c != '"':
        raise Malformed
    pieces: list[str] = []

    def emit(piece: str) -> None:
        if len(pieces) > MAX_NAME_CHARS:
            raise Malformed
        pieces.append(piece)

    yield from JSON.string(c, emit)
    return json.loads("".join(pieces))
