"""Conversion of Anthropic's requests to chats: turns, content blocks, tools and tool choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from forge_jax.errors import RequestError
from forge_serve.anthropic.requests import (
    SOURCES,
    Block,
    Choice,
    ContentBlock,
    MessagesRequest,
    OutputConfig,
    Tool,
    Turn,
)
from forge_serve.generation.files import Attachment
from forge_serve.openai.content import ContentPart, FilePart
from forge_serve.openai.requests import (
    ChatRequest,
    FunctionCall,
    GenerationRequest,
    Message,
    ToolCall,
    thinking_variables,
)
from forge_serve.openai.structured import asks_for_something

# The prefix of call ids in Anthropic's protocol. Templates get the ids without it.
TOOL_ID_PREFIX = "toolu_"
_TEXT = ("text",)
_GIVEN = ("text", "document")  # blocks that users and tools may send
_REMEDY = f"send a source of the type {' or '.join(SOURCES)}"
_REFUSED_SOURCES = {"url": "the server downloads no files", "file": "the server stores no files"}


def chat_request(request: MessagesRequest) -> ChatRequest:
    """Return the request as a chat.

    Raises:
      RequestError: a block is unsupported or incomplete. `param` is its path.
    """
    shared = {name: getattr(request, name) for name in GenerationRequest.__struct_fields__}
    if request.stop_sequences is not None:
        shared["stop"] = request.stop_sequences
    output = request.output_config or OutputConfig()
    if output.format is not None or request.output_format is not None:
        shared["response_format"] = output.format or request.output_format
    turns = _turns(request)
    last = request.messages[-1]
    thinking = request.thinking
    return ChatRequest(
        **shared,
        messages=turns,
        continue_final_message=last.role == "assistant" and not turns[-1].tool_calls,
        chat_template_kwargs=_template_kwargs(request),
        tools=[_tool(f"tools[{i}]", tool) for i, tool in enumerate(request.tools or ())] or None,
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=not (
            request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use
        ),
        include_reasoning=thinking is None
        or (thinking.type != "disabled" and thinking.display != "omitted"),
        reasoning_effort=output.effort,
    )


def _turns(request: MessagesRequest) -> list[Message]:
    """Return the system prompt and the messages.

    Leading system messages join the system prompt, because templates read it from one message.
    Later ones keep their positions.
    """
    prompt = [_text("system", request.system or "")]
    turns: list[Message] = []
    last_user = max((i for i, t in enumerate(request.messages) if t.role == "user"), default=-1)
    for i, turn in enumerate(request.messages):
        path = f"messages[{i}]"
        if any(asks_for_something(value) for value in (turn.output_config or {}).values()):
            path += ".output_config"
            raise RequestError(f"{path}: send output_config at the top level", param=path)
        if turn.role != "system":
            turns += _turn(path, turn)
            continue
        text = _text(f"{path}.content", turn.content)
        if turn.clear_at == "next_user_message" and i < last_user:
            continue
        if turns:
            turns.append(Message("system", text))
        else:
            prompt.append(text)
    system = "\n\n".join(text for text in prompt if text)
    return [Message("system", system), *turns] if system else turns


def _template_kwargs(request: MessagesRequest) -> dict[str, Any] | None:
    if request.thinking is None:
        return request.chat_template_kwargs
    thinks = request.thinking.type != "disabled"
    return {**thinking_variables(thinks), **(request.chat_template_kwargs or {})}


def _turn(path: str, turn: Turn) -> Iterator[Message]:
    """Yield the messages of a turn. Each tool result becomes a separate message."""
    if isinstance(turn.content, str):
        yield Message(turn.role, turn.content)
        return
    if turn.role == "assistant":
        yield _assistant(path, turn.content)
        return
    parts: list[ContentPart] = []
    for j, block in enumerate(turn.content):
        at = f"{path}.content[{j}]"
        if block.type != "tool_result":
            parts.append(_part(at, block))
            continue
        if block.tool_use_id is None:
            raise RequestError(f"{at}.tool_use_id is required", param=f"{at}.tool_use_id")
        if parts:
            yield Message("user", _content(parts))
            parts = []
        result = _result(f"{at}.content", block.content or "")
        yield Message("tool", result, tool_call_id=block.tool_use_id.removeprefix(TOOL_ID_PREFIX))
    if parts or not turn.content:
        yield Message("user", _content(parts))


def _result(path: str, content: str | Sequence[ContentBlock]) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    return _content([_part(f"{path}[{j}]", block) for j, block in enumerate(content)])


def _content(parts: list[ContentPart]) -> str | list[ContentPart]:
    """Return the parts as one text, unless a file is among them."""
    if any(part.type == "file" for part in parts):
        return parts
    return "".join(part.text or "" for part in parts)


def _part(path: str, block: ContentBlock) -> ContentPart:
    _known(path, block, _GIVEN)
    if block.type == "text":
        return ContentPart("text", block.text)
    return FilePart("file", given=_attachment(path, block))


def _attachment(path: str, block: ContentBlock) -> Attachment:
    """Return the file of a document."""
    source = block.source
    if source is None:
        raise RequestError(f"{path}.source is required", param=f"{path}.source")
    if source.type not in SOURCES:
        reason = _REFUSED_SOURCES.get(source.type, "this type is not supported")
        raise RequestError(f"{path}.source.type: {reason}; {_REMEDY}", param=f"{path}.source.type")
    if source.data is None:
        raise RequestError(f"{path}.source.data is required", param=f"{path}.source.data")
    citations = block.citations if isinstance(block.citations, dict) else {}
    for name, value, why in (
        ("context", block.context, "not supported; send it in a text block"),
        ("citations.enabled", citations.get("enabled"), "not supported; omit it"),
    ):
        if asks_for_something(value):
            raise RequestError(f"{path}.{name}: {why}", param=f"{path}.{name}")
    return Attachment(
        f"{path}.source.data",
        block.title,
        source.data,
        media_type=source.media_type or "",
        plain=source.type == "text",
    )


def _assistant(path: str, blocks: list[Block]) -> Message:
    texts, thoughts, calls = [], [], []
    for j, block in enumerate(blocks):
        at = f"{path}.content[{j}]"
        _known(at, block, ("text", "thinking", "redacted_thinking", "tool_use"))
        match block.type:
            case "text":
                texts.append(block)
            case "thinking":
                thoughts.append(block.thinking or "")
            case "tool_use":
                if block.name is None:
                    raise RequestError(f"{at}.name is required", param=f"{at}.name")
                function = FunctionCall(block.name, block.input or {})
                id = None if block.id is None else block.id.removeprefix(TOOL_ID_PREFIX)
                calls.append(ToolCall(id=id, type="function", function=function))
    message = Message("assistant", _text(f"{path}.content", texts))
    message.tool_calls = calls or None
    message.reasoning_content = "".join(thoughts) or None
    return message


def _text(path: str, content: str | Sequence[ContentBlock | ContentPart]) -> str:
    if isinstance(content, str):
        return content
    for j, block in enumerate(content):
        _known(f"{path}[{j}]", block, _TEXT)
    return "".join(block.text or "" for block in content)


def _known(path: str, block: ContentBlock | ContentPart, types: tuple[str, ...]) -> None:
    if block.type not in types:
        raise RequestError(
            f"{path}: unsupported type; the supported types are {', '.join(types)}",
            param=path,
        )
    if block.type == "text" and block.text is None:
        raise RequestError(f"{path}.text is required", param=f"{path}.text")


def _tool(path: str, tool: Tool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"{path}.type: server tools are not supported; use custom", param=f"{path}.type"
        )
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        raise RequestError(
            f"{path}.allowed_callers must contain direct, because code execution is not supported",
            param=f"{path}.allowed_callers",
        )
    function = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    function["parameters"] = tool.input_schema
    if tool.input_examples:
        function["parameters"] = {**(tool.input_schema or {}), "examples": tool.input_examples}
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def _choice(choice: Choice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice.name is required", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
