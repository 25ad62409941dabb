"""How the answers to one chat are to be read: which calls of tools and what reasoning may be in
them. An answer of which nothing is expected but text has no parser at all.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_jax.errors import RequestError
from forge_jax.sampling_params import SamplingParams
from forge_serve.parsers.answer import AnswerParser
from forge_serve.parsers.families import Families
from forge_serve.parsers.reasoning import ReasoningParser
from forge_serve.parsers.tool_calls import ToolCallParser
from forge_serve.protocol import ChatRequest
from forge_serve.tools import ToolChoice

if TYPE_CHECKING:
    from forge_jax.text import Tokenizer
    from forge_serve.generation import Prompt

PROMPT_END_TOKENS = 32  # in which a template would open the reasoning


@dataclass(frozen=True, slots=True)
class ChatAnswers:
    """The parsers of one request's choices, and what they need of the engine."""

    request: ChatRequest
    families: Families
    choice: ToolChoice

    @classmethod
    def of(cls, request: ChatRequest, families: Families) -> ChatAnswers:
        """Raises `RequestError` for tools that this model, or this server, cannot be given."""
        choice = request.chosen_tools()
        if choice.mode != "none":
            _check_tools(choice, families)
        return cls(request, families, choice)

    def params(self, params: SamplingParams) -> SamplingParams:
        """The request's, with all of the text that the parsers need."""
        hidden = self.families.hides_reasoning()
        hidden |= self.choice.mode != "none" and self.families.hides_calls()
        return dataclasses.replace(params, skip_special_tokens=False) if hidden else params

    def parser(self, prompt: Prompt, tokenizer: Tokenizer | None) -> AnswerParser | None:
        """A parser for one choice; None if its text is content as it is."""
        reasoning, tools = self._reasoning_parser(prompt, tokenizer), self._tool_parser()
        return None if reasoning is None and tools is None else AnswerParser(reasoning, tools)

    def _tool_parser(self) -> ToolCallParser | None:
        if self.choice.mode == "none" or self.families.calls is None:
            return None
        return ToolCallParser(
            self.families.calls,
            self.choice.names,
            whole=not self.request.streams,
            parallel=self.request.parallel_tool_calls is not False,
        )

    def _reasoning_parser(
        self, prompt: Prompt, tokenizer: Tokenizer | None
    ) -> ReasoningParser | None:
        form = self.families.reasoning
        if form is None:
            return None
        if self.request.continue_final_message:
            last = self.request.template_messages()[-1]
            return ReasoningParser(form, open=form.is_open_in(last["content"]))
        end = prompt.token_ids[-PROMPT_END_TOKENS:]
        text = tokenizer.decode(end, skip_special_tokens=False) if tokenizer else ""
        return ReasoningParser(form, open=form.is_open_after(text))


def _check_tools(choice: ToolChoice, families: Families) -> None:
    if not families.takes_tools:
        raise RequestError(
            "tools: this model's chat template has no place for them; the server's "
            "--chat-template sets another",
            param="tools",
        )
    if families.calls is None:
        raise RequestError(
            "tools: this server has no parser for this model's calls; --tool-call-parser sets it",
            param="tools",
        )
    if choice.mode == "required":
        raise RequestError(
            "tool_choice: only none and auto are supported: nothing makes the model call a tool",
            param="tool_choice",
        )
