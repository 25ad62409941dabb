"""Llama 3.1 to 3.3: `{"name": "f", "parameters": {...}}`, alone or after `<|python_tag|>`.

Several calls follow each other directly or after a semicolon.
"""

from __future__ import annotations

from collections.abc import Collection

from forge_serve.parsers.reading import Malformed, Read, space
from forge_serve.parsers.tool_calls import CallSink, ToolCallFormat, Written, call_begin, json_call


class Llama3JsonFormat(ToolCallFormat):
    name = "llama3_json"
    markers = ("<|python_tag|>",)
    bare = "{"

    def read(self, calls: CallSink) -> Read[None]:
        c = yield from space((yield))
        while True:
            yield from json_call(c, calls, ("parameters", "arguments"), strict=True)
            c = yield from space((yield))
            if c == ";":
                c = yield from space((yield))
            if not c:
                return
            if c != "{":
                raise Malformed

    def written(self, special_tokens: Collection[str]) -> Written:
        return Written(begin=lambda name: call_begin(name, "parameters"), end="}", between="; ")
