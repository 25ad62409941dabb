"""The tool calls and reasoning that a chat's output may contain.

They determine the output's parsers and grammar. Plain text output has neither.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_jax.errors import RequestError
from forge_jax.grammar import GrammarSpec
from forge_jax.sampling_params import SamplingParams
from forge_serve.openai.call_grammar import call_grammar, reasoning_lead
from forge_serve.openai.content import text_of
from forge_serve.openai.requests import ChatRequest, thinking_variables
from forge_serve.openai.structured import demand
from forge_serve.openai.tools import ToolChoice
from forge_serve.parsers.answer import AnswerParser
from forge_serve.parsers.families import CALL_FORMS, Families
from forge_serve.parsers.harmony import (
    FINAL,
    HarmonyFormat,
    HarmonyParser,
    HarmonyReasoning,
    HarmonyTokens,
    opening_of,
)
from forge_serve.parsers.reasoning import ReasoningParser, ReasoningTokens, TokenCounter
from forge_serve.parsers.tool_calls import ToolCallFormat, ToolCallParser

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_jax.text import Tokenizer
    from forge_serve.generation.prompts import Prompt

FALLBACK_FORMAT = CALL_FORMS["llama3_json"]
PROMPT_END_TOKENS = 32  # a template that opens the reasoning does so in the prompt's last tokens


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """The parsers and the grammar of one request's choices.

    Attributes:
      choice: the tools that the model may or must call.
      is_structured: True if the request constrains the format of the content, which then has no
        tool calls.
    """

    request: ChatRequest
    families: Families
    choice: ToolChoice
    is_structured: bool = False

    @classmethod
    def of(cls, request: ChatRequest, families: Families) -> ChatOutput:
        """Return the output of a request to a model.

        Raises:
          RequestError: the model or the server does not support the tools.
        """
        choice = request.chosen_tools()
        if choice.mode != "none":
            _check_tools(choice, families)
        is_structured = demand(request) is not None
        if is_structured and choice.mode == "required":
            raise RequestError(
                "tool_choice: required tool calls cannot be combined with an output format",
                param="tool_choice",
            )
        return cls(request, families, choice, is_structured)

    async def params(
        self, params: SamplingParams, prompt: Prompt, engine: AsyncEngine
    ) -> SamplingParams:
        """Return the sampling parameters with the compiled grammar that the tool calls need.

        Special tokens stay in the text if a parser needs them.

        Raises:
          RequestError: the calls have no grammar. `param` names the tools or the choice.
          OverloadedError: the server is too busy to compile the grammar.
        """
        call_format, families = self._call_format, self.families
        if families.hides(families.reasoning) or families.hides(call_format):
            params = dataclasses.replace(params, skip_special_tokens=False)
        if self.is_structured:
            return self._after_reasoning(params, prompt, engine.tokenizer)
        if call_format is None or not self._demands(call_format, params):
            return params
        grammar = self._grammar(call_format, prompt, engine.tokenizer)
        params = dataclasses.replace(params, structured_outputs=grammar)
        try:
            await engine.prepare(params)
        except RequestError as error:
            raise RequestError(f"tools: {error}", param="tools") from error
        return params

    def _after_reasoning(
        self, params: SamplingParams, prompt: Prompt, tokenizer: Tokenizer | None
    ) -> SamplingParams:
        """Return the parameters with a grammar that permits reasoning before the output format."""
        reasoning, demanded = self.families.reasoning, params.structured_outputs
        is_open = self._reasoning_is_open(prompt, tokenizer)
        if reasoning is None or demanded is None or is_open is None:
            return params
        lead = reasoning_lead(
            reasoning,
            is_open=is_open,
            special_tokens=self.families.special_tokens,
        )
        return dataclasses.replace(params, structured_outputs=demanded.behind(lead))

    @property
    def _call_format(self) -> ToolCallFormat | None:
        """The format of tool calls; None: the output has none.

        Required calls use `FALLBACK_FORMAT` if the model's own format is unknown or has no grammar.
        """
        call_format = self.families.calls
        if self.is_structured:
            return None
        match self.choice.mode:
            case "none":
                return None
            case "required" if call_format is None or not self._has_grammar(call_format):
                return FALLBACK_FORMAT
        return call_format

    def _has_grammar(self, call_format: ToolCallFormat) -> bool:
        return call_format.written(self.families.special_tokens.keys()) is not None

    def _demands(self, call_format: ToolCallFormat, params: SamplingParams) -> bool:
        """Return True if a grammar must enforce the calls."""
        if self.choice.mode == "required":
            return True
        strict = any(function.strict for function in self.choice.functions)
        # A grammar would let plain text output continue after a stop string.
        stops = bool(params.stop or params.stop_token_ids)
        return strict and not stops and self._has_grammar(call_format)

    def _grammar(
        self, call_format: ToolCallFormat, prompt: Prompt, tokenizer: Tokenizer | None
    ) -> GrammarSpec:
        parallel = self.request.parallel_tool_calls is not False and not self.choice.named
        is_open = self._reasoning_is_open(prompt, tokenizer)
        return call_grammar(
            call_format,
            self.choice,
            parallel=parallel,
            reasoning=None if is_open is None else self.families.reasoning,
            reasoning_is_open=bool(is_open),
            special_tokens=self.families.special_tokens,
        )

    def parser(self, prompt: Prompt, tokenizer: Tokenizer | None) -> AnswerParser | None:
        """Return the parser of one choice; None if all of its text is content."""
        if self._is_harmony:
            return self._harmony_parser(prompt, tokenizer, self._tool_parser())
        reasoning, tools = self._reasoning_parser(prompt, tokenizer), self._tool_parser()
        return None if reasoning is None and tools is None else AnswerParser(reasoning, tools)

    def reasoning_tokens(self, prompt: Prompt, tokenizer: Tokenizer | None) -> TokenCounter | None:
        """Return the counter of one choice; None if its reasoning is not counted."""
        if tokenizer is not None and isinstance(self.families.reasoning, HarmonyReasoning):
            return HarmonyTokens(
                self._harmony_parser(prompt, tokenizer, None), tokenizer.token_bytes
            )
        parser = None if self.is_structured else self._reasoning_parser(prompt, tokenizer)
        if parser is None or tokenizer is None:
            return None
        return ReasoningTokens(parser, tokenizer.token_bytes)

    @property
    def _is_harmony(self) -> bool:
        return isinstance(self.families.reasoning, HarmonyReasoning) or isinstance(
            self._call_format, HarmonyFormat
        )

    def _harmony_parser(
        self, prompt: Prompt, tokenizer: Tokenizer | None, tools: ToolCallParser | None
    ) -> HarmonyParser:
        if self.request.continue_final_message:
            opening = FINAL
        else:
            opening = opening_of(_end_of(prompt, tokenizer))
        return HarmonyParser(
            tools,
            functions=self.choice.names,
            reasons=isinstance(self.families.reasoning, HarmonyReasoning),
            opening=opening,
            final_is_last=self.is_structured,
        )

    def _tool_parser(self) -> ToolCallParser | None:
        call_format = self._call_format
        if call_format is None:
            return None
        return ToolCallParser(
            call_format,
            self.choice.names,
            whole=not self.request.streams,
            parallel=self.request.parallel_tool_calls is not False,
        )

    def _reasoning_parser(
        self, prompt: Prompt, tokenizer: Tokenizer | None
    ) -> ReasoningParser | None:
        reasoning = self.families.reasoning
        if reasoning is None:
            return None
        is_open = self._reasoning_is_open(prompt, tokenizer)
        if is_open is None and self.is_structured:  # the content may begin with text like a tag
            return None
        return ReasoningParser(reasoning, open=bool(is_open))

    def _reasoning_is_open(self, prompt: Prompt, tokenizer: Tokenizer | None) -> bool | None:
        """Return True if the output begins inside reasoning, False if it may begin with reasoning.

        None means that reasoning is over or switched off, so a grammar must not allow any.
        """
        reasoning = self.families.reasoning
        if reasoning is None:
            return None
        if self.request.continue_final_message:
            begun = text_of(self.request.template_messages()[-1])
            over = bool(begun.strip() or reasoning.answer)
            return reasoning.is_open_in(begun) or (None if over else False)
        text = _end_of(prompt, tokenizer)
        if reasoning.is_open_after(text):
            return True
        variables = self.request.chat_template_kwargs or {}
        off = reasoning.switchable and any(
            variables.get(name) is False for name in thinking_variables(False)
        )
        return None if off or reasoning.is_over_after(text) else False


def _end_of(prompt: Prompt, tokenizer: Tokenizer | None) -> str:
    """Return the text of the prompt's last tokens, with special tokens."""
    end = prompt.token_ids[-PROMPT_END_TOKENS:]
    return tokenizer.decode(end, skip_special_tokens=False) if tokenizer else ""


def _check_tools(choice: ToolChoice, families: Families) -> None:
    if not families.takes_tools:
        raise RequestError(
            "tools: this model's chat template does not support them; start the server with "
            "--chat-template FILE to use another template",
            param="tools",
        )
    if families.calls is None and choice.mode != "required":
        raise RequestError(
            "tools: this model's tool call format was not detected; start the server with "
            "--tool-call-parser NAME",
            param="tools",
        )
