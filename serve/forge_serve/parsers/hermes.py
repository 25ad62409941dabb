"""Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Collection

from forge_serve.parsers.reading import Read, closing, space
from forge_serve.parsers.tool_calls import CallSink, ToolCallFormat, Written, call_begin, json_call


class HermesFormat(ToolCallFormat):
    name = "hermes"
    markers = ("<tool_call>",)
    syntax_tokens = ("</tool_call>",)

    def read(self, calls: CallSink) -> Read[None]:
        c = yield from space((yield))
        yield from json_call(c, calls, ("arguments",), strict=False)
        yield from closing("</tool_call>")

    def written(self, special_tokens: Collection[str]) -> Written:
        return Written(
            marker="<tool_call>",
            first="\n",
            begin=lambda name: call_begin(name, "arguments"),
            end="}\n</tool_call>",
            between="\n<tool_call>\n",
        )
