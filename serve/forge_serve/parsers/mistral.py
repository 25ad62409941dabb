"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`.

Since tokenizer version 11: `[TOOL_CALLS]f[ARGS]{...}`, with the marker before each call.
"""

from __future__ import annotations

from collections.abc import Collection

from forge_serve.parsers.reading import (
    MAX_NAME_CHARS,
    Malformed,
    Read,
    exactly,
    space,
    value,
    word,
)
from forge_serve.parsers.tool_calls import (
    CallSink,
    ToolCallFormat,
    Written,
    call_begin,
    json_call,
    short_id,
)


class MistralFormat(ToolCallFormat):
    name = "mistral"
    markers = ("[TOOL_CALLS]",)
    syntax_tokens = ("[ARGS]", "[CALL_ID]")

    def read(self, calls: CallSink) -> Read[None]:
        c = yield from space((yield))
        if c == "[":
            yield from self._list(calls)
        elif c == "{":
            yield from json_call(c, calls, ("arguments",), strict=False)
        else:
            yield from self._named(c, calls)

    def written(self, special_tokens: Collection[str]) -> Written:
        [marker] = self.markers
        if "[ARGS]" in special_tokens:
            return Written(marker=marker, begin=lambda name: f"{name}[ARGS]", between=marker)
        return Written(
            marker=marker,
            first="[",
            begin=lambda name: call_begin(name, "arguments"),
            end="}",
            between=", ",
            last="]",
        )

    def new_id(self) -> str:
        return short_id()  # Mistral's templates reject other ids

    def _list(self, calls: CallSink) -> Read[None]:
        c = yield from space((yield))
        while True:
            yield from json_call(c, calls, ("arguments",), strict=False)
            c = yield from space((yield))
            if c == "]" or not c:
                return
            if c != ",":
                raise Malformed
            c = yield from space((yield))

    def _named(self, c: str, calls: CallSink) -> Read[None]:
        name, c = yield from word(c, lambda c: c not in "[{" and not c.isspace(), MAX_NAME_CHARS)
        calls.check(name)
        c = yield from space(c)
        if c == "[":
            c = yield
            if c == "C":
                yield from exactly("ALL_ID]")
                yield from word((yield), lambda c: c != "[", MAX_NAME_CHARS)
                c = yield
            if c != "A":
                raise Malformed
            yield from exactly("RGS]")
            c = yield from space((yield))
        if c != "{":
            raise Malformed
        calls.begin(name)
        yield from value(c, calls.arguments)
        calls.end()
