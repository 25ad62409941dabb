"""The known parsers, and detection of a model's parsers from its chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from forge_serve.parsers.harmony import CHANNEL, HarmonyFormat, HarmonyReasoning
from forge_serve.parsers.hermes import HermesFormat
from forge_serve.parsers.llama3_json import Llama3JsonFormat
from forge_serve.parsers.mistral import MistralFormat
from forge_serve.parsers.pythonic import Llama4PythonicForm, PythonicFormat
from forge_serve.parsers.reasoning import ReasoningFormat
from forge_serve.parsers.tool_calls import ToolCallFormat

if TYPE_CHECKING:
    from forge_jax.text import ChatTemplate, Tokenizer

CALL_FORMS: dict[str, ToolCallFormat] = {
    form.name: form
    for form in (
        HermesFormat(),
        Llama3JsonFormat(),
        MistralFormat(),
        PythonicFormat(),
        Llama4PythonicForm(),
        HarmonyFormat(),
    )
}
REASONING_FORMS: dict[str, ReasoningFormat] = {
    form.name: form
    for form in (
        ReasoningFormat(name="deepseek_r1", begin="<think>", end="</think>", always=True),
        ReasoningFormat(name="qwen3", begin="<think>", end="</think>"),
        ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]"),
        HarmonyReasoning(),
    )
}

# Patterns in a chat template that identify its tool call format. The first match wins.
_SHOWN_BY: tuple[tuple[str, str | None], ...] = (
    (r"<\|channel\|>", "harmony"),
    (r"<function=|<arg_key>|<\|tool_call", None),  # unsupported formats, some in Hermes' tags
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"<tool_call>", "hermes"),
    (r"<\|python_start\|>", "llama4_pythonic"),
    (r"\[func_name1?\(", "pythonic"),
    (r"<\|python_tag\|>|\"parameters\": dictionary of argument name", "llama3_json"),
)
_TAKES_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class Families:
    """The formats of the served model's tool calls and reasoning; None: no known format."""

    calls: ToolCallFormat | None
    reasoning: ReasoningFormat | None
    takes_tools: bool  # True if the template uses the variable `tools`
    special_tokens: Mapping[str, int]  # decoded text omits them by default

    def hides(self, form: ToolCallFormat | ReasoningFormat | None) -> bool:
        """Return True if the format uses special tokens, which must then stay in the text."""
        return form is not None and not self.special_tokens.keys().isdisjoint(form.markup)


@lru_cache(maxsize=4)
def families(
    tokenizer: Tokenizer | None, template: ChatTemplate | None, calls: str, reasoning: str
) -> Families:
    """Return the parsers of a model.

    Args:
      calls: the name of a tool call parser, "none", or "auto" to detect it from the template.
      reasoning: the same for the reasoning parser.
    """
    sources = "\n".join(template.sources.values()).replace('\\"', '"') if template else ""
    if calls == "auto":
        calls = _calls_shown(sources)
    if reasoning == "auto":
        reasoning = _reasoning_shown(sources)
    special = {tokenizer.token_text(i): i for i in tokenizer.special_ids} if tokenizer else {}
    return Families(
        calls=CALL_FORMS.get(calls),
        reasoning=REASONING_FORMS.get(reasoning),
        takes_tools=bool(_TAKES_TOOLS.search(sources)),
        special_tokens=special,
    )


def _calls_shown(sources: str) -> str:
    for pattern, name in _SHOWN_BY:
        if re.search(pattern, sources):
            return name or "none"
    return "none"


def _reasoning_shown(sources: str) -> str:
    if CHANNEL in sources:
        return "harmony"
    for name in ("qwen3", "mistral"):
        form = REASONING_FORMS[name]
        if form.begin in sources or form.end in sources:
            return name
    return "none"
