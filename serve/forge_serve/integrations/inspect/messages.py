"""Translation of Inspect's messages, tools and options into OpenAI's chats, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from inspect_ai.model import (  # pyright: ignore[reportMissingImports]
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelOutput,
    ModelUsage,
    TopLogprob,
)
from inspect_ai.tool import (  # pyright: ignore[reportMissingImports]
    ToolCall,
    ToolChoice,
    ToolFunction,
    ToolInfo,
)

from forge_jax.errors import RequestError

_SAME_NAME = (
    *("max_tokens", "temperature", "top_p", "top_k", "seed", "logit_bias", "best_of"),
    *("frequency_penalty", "presence_penalty", "logprobs", "top_logprobs", "prompt_logprobs"),
    *("reasoning_effort", "verbosity", "parallel_tool_calls", "modalities"),
)
_OTHER_NAME = {
    "stop_seqs": "stop",
    "num_choices": "n",
    "reasoning_tokens": "thinking_token_budget",  # which the chat rejects by name
}
_STOP_REASONS = {"length": "max_tokens"}


def chat_body(
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolInfo],
    tool_choice: ToolChoice,
    config: GenerateConfig,
) -> dict[str, Any]:
    """Return the body of a chat request.

    Raises:
      RequestError: a message has content other than text and reasoning.
    """
    body: dict[str, Any] = {"messages": [_message(i, each) for i, each in enumerate(messages)]}
    names = {name: name for name in _SAME_NAME} | _OTHER_NAME
    for name, ours in names.items():
        value = getattr(config, name, None)  # older versions of Inspect lack some options
        if value is not None:
            body[ours] = value
    if tools:
        body["tools"] = [_tool(tool) for tool in tools]
        body["tool_choice"] = _choice(tool_choice)
    else:
        body.pop("parallel_tool_calls", None)
    if config.response_schema is not None:
        schema = config.response_schema
        described = {
            "name": schema.name,
            "schema": schema.json_schema.model_dump(exclude_none=True, by_alias=True),
            "strict": schema.strict,
        }
        body["response_format"] = {"type": "json_schema", "json_schema": described}
    return body | (config.extra_body or {})


def _message(i: int, message: ChatMessage) -> dict[str, Any]:
    content: str | list[dict[str, str]]
    reasoning: list[str] = []
    if isinstance(message.content, str):
        content = message.content
    else:
        content = []
        for j, part in enumerate(message.content):
            if isinstance(part, ContentReasoning):
                if not part.redacted:  # otherwise it is another provider's ciphertext
                    reasoning.append(part.reasoning)
            elif isinstance(part, ContentText):
                content.append({"type": "text", "text": part.text})
            else:
                path = f"messages[{i}].content[{j}]"
                raise RequestError(
                    f"{path}: only text is supported, not {part.type}: send the message without it",
                    param=path,
                )
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "assistant":
        if reasoning:
            plain["reasoning_content"] = "\n".join(reasoning)
        if message.tool_calls:
            plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    elif message.role == "tool":
        plain["tool_call_id"] = message.tool_call_id
        if message.function:
            plain["name"] = message.function
        if message.error is not None:
            plain["content"] = f"Error: {message.error.message}"
    return plain


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function, "arguments": json.dumps(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: ToolInfo) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters.model_dump(exclude_none=True, by_alias=True),
    }
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    if isinstance(choice, ToolFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice == "any" else choice


def model_output(response: dict[str, Any], model: str) -> ModelOutput:
    """Return a chat's response as Inspect's output."""
    usage = response["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    prompt_logprobs = _prompt_logprobs(response.get("prompt_logprobs"))
    choices = sorted(response["choices"], key=lambda choice: choice["index"])
    return ModelOutput(
        model=model,
        choices=[_output_choice(choice, model, prompt_logprobs) for choice in choices],
        usage=ModelUsage(
            input_tokens=usage["prompt_tokens"] - cached,
            input_tokens_cache_read=cached,
            output_tokens=usage["completion_tokens"],
            total_tokens=usage["total_tokens"],
            reasoning_tokens=usage["completion_tokens_details"]["reasoning_tokens"],
        ),
        response_id=response["id"],
    )


def _output_choice(
    choice: dict[str, Any], model: str, prompt_logprobs: Logprobs | None
) -> ChatCompletionChoice:
    message, logprobs = choice["message"], choice.get("logprobs")
    text, reasoning = message.get("content") or "", message.get("reasoning_content")
    calls = [_output_call(call) for call in message.get("tool_calls") or ()]
    reason = choice["finish_reason"]
    return ChatCompletionChoice(
        message=ChatMessageAssistant(
            content=[ContentReasoning(reasoning=reasoning), ContentText(text=text)]
            if reasoning
            else text,
            tool_calls=calls or None,
            model=model,
            source="generate",
        ),
        stop_reason=_STOP_REASONS.get(reason, reason),
        logprobs=None if logprobs is None else Logprobs.model_validate(logprobs),
        prompt_logprobs=prompt_logprobs,
    )


def _output_call(call: dict[str, Any]) -> ToolCall:
    """Return a tool call. Arguments that are not a JSON object become a parse error."""
    function = call["function"]
    problem, arguments = None, {}
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        problem = f"the arguments of {function['name']} are not valid JSON: {error}"
    if not isinstance(arguments, dict):
        problem, arguments = f"the arguments of {function['name']} are not a JSON object", {}
    return ToolCall(
        id=call["id"], function=function["name"], arguments=arguments, parse_error=problem
    )


def _prompt_logprobs(entries: list[dict[str, Any] | None] | None) -> Logprobs | None:
    """Return the logprobs of the prompt, except for its first token, which has none.

    The first alternative of an entry is the prompt's token.
    """
    if entries is None:
        return None
    content = []
    for entry in entries:
        if entry is None:
            continue
        own, *others = [
            TopLogprob(token=each["decoded_token"], logprob=each["logprob"])
            for each in entry.values()
        ]
        content.append(Logprob(token=own.token, logprob=own.logprob, top_logprobs=others or None))
    return Logprobs(content=content)
