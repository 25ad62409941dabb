"""How the answers to one chat are to be read: which calls of tools and what reasoning may be in
them. An answer of which nothing is expected but text has no parser at all.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_jax.errors import RequestError
from forge_jax.grammar import GrammarSpec
from forge_jax.sampling_params import SamplingParams
from forge_serve.openai.call_grammar import call_grammar, reasoning_lead
from forge_serve.openai.requests import ChatRequest, text_of, thinking_variables
from forge_serve.openai.structured import demand
from forge_serve.openai.tools import ToolChoice
from forge_serve.parsers.answer import AnswerParser
from forge_serve.parsers.families import CALL_FORMS, Families
from forge_serve.parsers.reasoning import ReasoningParser, ReasoningTokens
from forge_serve.parsers.tool_calls import ToolCallFormat, ToolCallParser

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_jax.text import Tokenizer
    from forge_serve.generation.prompts import Prompt

COMMON_FORM = CALL_FORMS["llama3_json"]
PROMPT_END_TOKENS = 32  # in which a template would open the reasoning


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """The parsers of one request's choices, and what they need of the engine."""

    request: ChatRequest
    families: Families
    choice: ToolChoice
    other_form: bool = False  # the request demands one, behind the reasoning, that is no calls

    @classmethod
    def of(cls, request: ChatRequest, families: Families) -> ChatOutput:
        """Raises `RequestError` for tools that this model, or this server, cannot be given."""
        choice = request.chosen_tools()
        if choice.mode != "none":
            _check_tools(choice, families)
        other_form = demand(request) is not None
        if other_form and choice.mode == "required":
            raise RequestError(
                "tool_choice: calls of tools cannot be demanded of an output in another form",
                param="tool_choice",
            )
        return cls(request, families, choice, other_form)

    async def params(
        self, params: SamplingParams, prompt: Prompt, engine: AsyncEngine
    ) -> SamplingParams:
        """The request's, with all of the text that the parsers need, and the grammar of the calls
        that it demands; this has been compiled.

        Raises:
          RequestError: calls cannot be demanded so; `param` names the tools or the choice.
          OverloadedError: the grammar could not be tried now.
        """
        form, families = self._form, self.families
        if families.hides(families.reasoning) or families.hides(form):
            params = dataclasses.replace(params, skip_special_tokens=False)
        if self.other_form:
            return self._behind_reasoning(params, prompt, engine.tokenizer)
        if form is None or not self._demands(form, params):
            return params
        grammar = self._grammar(form, prompt, engine.tokenizer)
        params = dataclasses.replace(params, structured_outputs=grammar)
        try:
            await engine.prepare(params)
        except RequestError as error:
            raise RequestError(f"tools: {error}", param="tools") from error
        return params

    def _behind_reasoning(
        self, params: SamplingParams, prompt: Prompt, tokenizer: Tokenizer | None
    ) -> SamplingParams:
        """With the demanded form after the reasoning, where the model writes some."""
        form, demanded = self.families.reasoning, params.structured_outputs
        is_open = self._reasoning_is_open(prompt, tokenizer)
        if form is None or demanded is None or is_open is None:
            return params
        lead = reasoning_lead(
            form,
            is_open=is_open,
            special_tokens=self.families.special_tokens,
        )
        return dataclasses.replace(params, structured_outputs=demanded.behind(lead))

    @property
    def _form(self) -> ToolCallFormat | None:
        """How calls are written; None: nothing counts as one.

        What no grammar can say, and what is not known, is demanded in the most common form.
        """
        form = self.families.calls
        if self.other_form:
            return None
        match self.choice.mode:
            case "none":
                return None
            case "required" if form is None or not self._can_be_demanded(form):
                return COMMON_FORM
        return form

    def _can_be_demanded(self, form: ToolCallFormat) -> bool:
        return form.written(self.families.special_tokens.keys()) is not None

    def _demands(self, form: ToolCallFormat, params: SamplingParams) -> bool:
        """Whether a grammar has to see to it that the answer is what the request asks for."""
        if self.choice.mode == "required":
            return True
        strict = any(function.strict for function in self.choice.functions)
        # Of an answer that may be text: a grammar would have it go on beyond a stop string.
        free = not params.stop and not params.stop_token_ids
        return strict and free and self._can_be_demanded(form)

    def _grammar(
        self, form: ToolCallFormat, prompt: Prompt, tokenizer: Tokenizer | None
    ) -> GrammarSpec:
        parallel = self.request.parallel_tool_calls is not False and not self.choice.named
        is_open = self._reasoning_is_open(prompt, tokenizer)
        return call_grammar(
            form,
            self.choice,
            parallel=parallel,
            reasoning=None if is_open is None else self.families.reasoning,
            reasoning_is_open=bool(is_open),
            special_tokens=self.families.special_tokens,
        )

    def parser(self, prompt: Prompt, tokenizer: Tokenizer | None) -> AnswerParser | None:
        """A parser for one choice; None if its text is content as it is."""
        reasoning, tools = self._reasoning_parser(prompt, tokenizer), self._tool_parser()
        return None if reasoning is None and tools is None else AnswerParser(reasoning, tools)

    def reasoning_tokens(
        self, prompt: Prompt, tokenizer: Tokenizer | None
    ) -> ReasoningTokens | None:
        """A counter for one choice; None if no reasoning is looked for."""
        parser = None if self.other_form else self._reasoning_parser(prompt, tokenizer)
        if parser is None or tokenizer is None:
            return None
        return ReasoningTokens(parser, tokenizer.token_bytes)

    def _tool_parser(self) -> ToolCallParser | None:
        form = self._form
        if form is None:
            return None
        return ToolCallParser(
            form,
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
        is_open = self._reasoning_is_open(prompt, tokenizer)
        if is_open is None and self.other_form:  # the form may begin with what looks like a tag
            return None
        return ReasoningParser(form, open=bool(is_open))

    def _reasoning_is_open(self, prompt: Prompt, tokenizer: Tokenizer | None) -> bool | None:
        """Whether an answer begins in the middle of reasoning; None: reasoning is over, or
        switched off, so a grammar allows none.
        """
        form = self.families.reasoning
        if form is None:
            return None
        if self.request.continue_final_message:
            begun = text_of(self.request.template_messages()[-1])
            return form.is_open_in(begun) or (None if begun.strip() else False)
        end = prompt.token_ids[-PROMPT_END_TOKENS:]
        text = tokenizer.decode(end, skip_special_tokens=False) if tokenizer else ""
        if form.is_open_after(text):
            return True
        variables = self.request.chat_template_kwargs or {}
        off = any(variables.get(name) is False for name in thinking_variables(False))
        return None if off or form.is_over_after(text) else False


def _check_tools(choice: ToolChoice, families: Families) -> None:
    if not families.takes_tools:
        raise RequestError(
            "tools: this model's chat template has no place for them; the server's "
            "--chat-template sets another",
            param="tools",
        )
    if families.calls is None and choice.mode != "required":
        raise RequestError(
            "tools: this server has no parser for this model's calls; --tool-call-parser sets it",
            param="tools",
        )
