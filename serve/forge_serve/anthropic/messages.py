"""POST /v1/messages: Anthropic's protocol, as another form of a chat.

A request becomes a `ChatRequest`, so that everything behind it is the same; an answer is written in
blocks, streamed or whole; an error has Anthropic's own body.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

import msgspec

from forge_jax.errors import RequestError
from forge_serve.anthropic.response_types import (
    BlockDelta,
    BlockStart,
    BlockStop,
    BlockUpdate,
    InputDelta,
    MessageDelta,
    MessagesAnswer,
    MessagesBegun,
    MessagesError,
    MessagesErrorAnswer,
    MessagesEvent,
    MessageStart,
    MessageStop,
    MessagesUsage,
    OutputTokens,
    SignatureDelta,
    StopDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ThinkingStart,
    ToolUseBlock,
)
from forge_serve.errors import ErrorReply, UnsupportedThreadError
from forge_serve.generation.generation import Usage
from forge_serve.openai.requests import (
    CHOICE_RULE,
    MESSAGES_RULE,
    TOOLS_RULE,
    ChatRequest,
    ContentPart,
    FunctionCall,
    GenerationRequest,
    Message,
    NoPromptLogprobs,
    OneSample,
    Role,
    TemplateKwargs,
    ToolCall,
    stop_strings,
    thinking_variables,
)
from forge_serve.openai.serializers import ChatSerializer
from forge_serve.openai.structured import FORMAT_SCHEMA, asks_for_something
from forge_serve.openai.tools import NAME_SCHEMA
from forge_serve.openapi.schema import (
    NOTHING,
    TEXT_OR_PARTS,
    About,
    Schema,
    nullable,
    refused,
    rule,
    tagged,
)
from forge_serve.parsers.parts import CallPiece

if TYPE_CHECKING:
    from forge_jax.schedule.outputs import Delta

PATH = "/v1/messages"

_json = msgspec.json.Encoder().encode

_NO_THREADS = "this server keeps no conversations: send all messages, system and tools"
_TEXT = ("text",)
_TOOL_ID = "toolu_"  # before the ids of calls; templates get them without, as the model's own
_STOP_REASONS: dict[str, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Block(msgspec.Struct):
    """A content block of a request, of any type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentPart] | None = None


TurnRole = Literal["user", "assistant", "system"]


def _tool_result() -> Schema:
    block = tagged("tool_result", "tool_use_id")
    block["properties"]["content"] = TEXT_OR_PARTS
    return block


# The blocks that a role may have.
_BLOCKS = {
    "user": [tagged("text", "text"), _tool_result()],
    "assistant": [
        tagged("text", "text"),
        tagged("thinking"),
        tagged("redacted_thinking"),
        tagged("tool_use", "name"),
    ],
    "system": [tagged("text", "text")],
}


class Turn(msgspec.Struct):
    role: TurnRole
    content: str | list[Block]
    clear_at: Literal["never", "next_user_message"] | None = None  # of a system message
    output_config: Annotated[
        dict[str, Any] | None,
        rule(schema=nullable({"type": "object", "additionalProperties": NOTHING})),
    ] = None

    @classmethod
    def narrow_schema(cls, schema: Schema, about: About) -> None:
        def turn(role: str, blocks: list[Schema]) -> Schema:
            content = {"anyOf": [{"type": "string"}, {"items": {"anyOf": blocks}}]}
            return {"properties": {"role": {"const": role}, "content": content}}

        schema["anyOf"] = [turn(role, blocks) for role, blocks in _BLOCKS.items()]


class Tool(msgspec.Struct):
    name: Annotated[str, rule(**NAME_SCHEMA)]
    type: Annotated[str | None, rule(schema={"enum": ["custom", None]})] = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: Annotated[
        Annotated[list[str], rule(anyOf=[{"contains": {"const": "direct"}}, {"maxItems": 0}])]
        | None,
        rule(),
    ] = None
    strict: bool | None = None


class Choice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @classmethod
    def narrow_schema(cls, schema: Schema, about: About) -> None:
        schema["anyOf"] = [
            {"properties": {"type": {"enum": ["auto", "any", "none"]}}},
            {"required": ["name"], "properties": {"name": {"type": "string"}}},
        ]


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputConfig(msgspec.Struct):
    format: Annotated[dict[str, Any] | None, rule(schema=FORMAT_SCHEMA)] = None
    effort: str | None = None
    task_budget: Annotated[Any, rule(**NOTHING)] = None


def _stop_sequences(about: About) -> Schema:
    return nullable(stop_strings(about))


class MessagesRequest(GenerationRequest, kw_only=True):
    """POST /v1/messages, and /v1/messages/count_tokens."""

    messages: Annotated[
        list[Turn],
        rule(MESSAGES_RULE, most=("messages", "messages"), minItems=1),
    ]
    n: OneSample = None
    best_of: OneSample = None
    prompt_logprobs: NoPromptLogprobs = None
    system: Annotated[str | list[ContentPart] | None, rule(schema=TEXT_OR_PARTS)] = None
    stop_sequences: Annotated[list[str] | None, rule(schema=_stop_sequences)] = None
    tools: Annotated[
        list[Tool] | None,
        rule(TOOLS_RULE, most=("tools", "entries")),
    ] = None
    tool_choice: Annotated[Choice | None, rule(CHOICE_RULE)] = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # The older name of output_config.format.
    output_format: Annotated[dict[str, Any] | None, rule(schema=FORMAT_SCHEMA)] = None
    chat_template_kwargs: TemplateKwargs = None

    thread: Annotated[Any, refused(_NO_THREADS)] = None
    container: Annotated[Any, refused("this server runs no code and loads no skills")] = None
    mcp_servers: Annotated[
        Any, refused("this server calls no other servers: run the tools in the client")
    ] = None
    compaction: Annotated[
        Any, refused("this server summarizes no conversations: ask for a summary in a message")
    ] = None

    ROLES: ClassVar[tuple[str, ...]] = get_args(TurnRole)

    def check(self) -> None:
        if asks_for_something(self.thread):  # first: clients answer it by sending another request
            raise UnsupportedThreadError(f"thread: {_NO_THREADS}", param="thread")
        GenerationRequest.check(self)
        if self.num_samples != 1:
            raise RequestError("n must be 1 here: ask for a chat completion", param="n")
        if self.stop is not None and self.stop_sequences is not None:
            raise RequestError("stop and stop_sequences are the same: send one", param="stop")
        if not self.messages:
            raise RequestError("messages must not be empty", param="messages")
        if self.output_config is not None:
            if asks_for_something(self.output_config.task_budget):
                raise RequestError(
                    "output_config.task_budget: not supported: use max_tokens",
                    param="output_config.task_budget",
                )
            if self.output_config.format is not None and self.output_format is not None:
                raise RequestError(
                    "output_format and output_config.format are the same: send one",
                    param="output_format",
                )

    def _check_prompt_logprobs(self) -> None:
        raise RequestError(
            "prompt_logprobs are not supported here: ask for a chat completion",
            param="prompt_logprobs",
        )

    def chat(self) -> ChatRequest:
        """The same as a chat.

        Raises:
          RequestError: for a block that is not supported, or lacks something; `param` is its path.
        """
        shared = {name: getattr(self, name) for name in GenerationRequest.__struct_fields__}
        if self.stop_sequences is not None:
            shared["stop"] = self.stop_sequences
        output = self.output_config or OutputConfig()
        if output.format is not None or self.output_format is not None:
            shared["response_format"] = output.format or self.output_format
        turns = self._turns()
        last = self.messages[-1]
        thinking = self.thinking
        return ChatRequest(
            **shared,
            messages=turns,
            continue_final_message=last.role == "assistant" and not turns[-1].tool_calls,
            chat_template_kwargs=self._template_kwargs(),
            tools=[_tool(f"tools[{i}]", tool) for i, tool in enumerate(self.tools or ())] or None,
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=not (
                self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
            ),
            include_reasoning=thinking is None
            or (thinking.type != "disabled" and thinking.display != "omitted"),
            reasoning_effort=output.effort,
        )

    def _turns(self) -> list[Message]:
        """The system prompt and the messages.

        System messages before all others are part of the system prompt, because templates take it
        from one message. Later ones stay where they are.
        """
        prompt = [_text("system", self.system or "")]
        turns: list[Message] = []
        last_user = max((i for i, t in enumerate(self.messages) if t.role == "user"), default=-1)
        for i, turn in enumerate(self.messages):
            path = f"messages[{i}]"
            if any(asks_for_something(value) for value in (turn.output_config or {}).values()):
                path += ".output_config"
                raise RequestError(f"{path}: send it beside messages instead", param=path)
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

    def _template_kwargs(self) -> dict[str, Any] | None:
        if self.thinking is None:
            return self.chat_template_kwargs
        thinks = self.thinking.type != "disabled"
        return {**thinking_variables(thinks), **(self.chat_template_kwargs or {})}


class MessagesSerializer(ChatSerializer):
    """`message` objects: blocks of thinking, text and calls of tools.

    In a stream each block has its own beginning and end, and only the last one is open.
    """

    id_prefix = "msg_"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.usage_always = False  # no event in the middle has the usage here
        self._num_blocks = 0
        self._open: str | int | None = None  # "thinking", "text", or the index of a call

    def events(self, choice: int, delta: Delta, usage: Usage | None = None) -> bytes:
        return b"".join(self._events(delta))

    def end(self, usage: Usage) -> bytes:
        stop = StopDelta(self._stop_reason(), self._stop_sequence())
        delta = MessageDelta(stop, OutputTokens(usage.completion_tokens))
        return _event(delta) + _event(MessageStop())

    def error_event(self, reply: ErrorReply) -> bytes:
        return b"event: error\ndata: " + error_body(reply) + b"\n\n"

    def body(self, usage: Usage) -> bytes:
        [state] = self._choices
        parts = self._all_parts(state)
        blocks: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
        if self.with_reasoning and parts.reasoning:
            blocks.append(ThinkingBlock("".join(parts.reasoning)))
        text = "".join(parts.content)
        if text:
            blocks.append(TextBlock(text))
        for call in parts.calls:
            arguments = complete_values("".join(call.arguments))
            blocks.append(_tool_use(call, msgspec.Raw(arguments.encode())))
        cached = usage.prompt_tokens_details.cached_tokens
        answer = MessagesAnswer(
            id=self.id,
            model=self.model,
            content=blocks,
            stop_reason=self._stop_reason(),
            stop_sequence=self._stop_sequence(),
            usage=_usage(usage.prompt_tokens, cached, usage.completion_tokens),
        )
        return _json(answer)

    def _events(self, delta: Delta) -> Iterator[bytes]:
        [state] = self._choices
        if not state.started:
            state.started = True
            usage = _usage(len(state.of.prompt.token_ids), delta.num_cached_tokens, 0)
            yield _event(MessageStart(MessagesBegun(id=self.id, model=self.model, usage=usage)))
        parts = self._read(state, delta)
        state.finish_reason, state.stop_reason = delta.finish_reason, delta.stop_reason
        open_call = self._open if isinstance(self._open, int) else None
        for piece in parts.in_order(open_call):
            match piece:
                case "reasoning", text:
                    if self.with_reasoning:
                        yield from self._say("thinking", ThinkingStart(), ThinkingDelta(text))
                case "content", text:
                    yield from self._say("text", TextBlock(""), TextDelta(text))
                case CallPiece():
                    if piece.index != self._open:
                        yield from self._begin(piece.index, _tool_use(piece, {}))
                    yield self._update(InputDelta("".join(piece.arguments)))
        if delta.finish_reason is not None:
            yield from self._close()

    def _say(
        self, kind: str, block: TextBlock | ThinkingStart, update: BlockUpdate
    ) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._begin(kind, block)
        yield self._update(update)

    def _update(self, update: BlockUpdate) -> bytes:
        """The event of the block that is open."""
        return _event(BlockDelta(self._num_blocks - 1, update))

    def _begin(
        self, what: str | int, block: TextBlock | ThinkingStart | ToolUseBlock
    ) -> Iterator[bytes]:
        yield from self._close()
        self._open = what
        yield _event(BlockStart(self._num_blocks, block))
        self._num_blocks += 1

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":  # nothing vouches for it
            yield self._update(SignatureDelta())
        if self._open is not None:
            yield _event(BlockStop(self._num_blocks - 1))
        self._open = None

    def _stop_reason(self) -> StopReason:
        [state] = self._choices
        reason = state.finish_reason or "stop"
        if reason == "stop" and state.parser is not None and state.parser.called:
            return "tool_use"
        return "stop_sequence" if self._stop_sequence() is not None else _STOP_REASONS[reason]

    def _stop_sequence(self) -> str | None:
        stop = self._choices[0].stop_reason
        return stop if isinstance(stop, str) else None


def error_body(reply: ErrorReply) -> bytes:
    """`{"type": "error", "error": {...}}`, as JSON."""
    kind = _ERROR_TYPES.get(
        reply.status, "invalid_request_error" if reply.status < 500 else "api_error"
    )
    error = MessagesError(kind, reply.text)
    if reply.details is not None:
        error.details = reply.details
    return _json(MessagesErrorAnswer(error))


_HEADS = {
    kind: f"event: {kind.__struct_config__.tag}\ndata: ".encode()
    for kind in get_args(MessagesEvent)
}


def _event(event: MessagesEvent) -> bytes:
    return b"%b%b\n\n" % (_HEADS[type(event)], _json(event))


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> MessagesUsage:
    return MessagesUsage(
        input_tokens=prompt_tokens - cached_tokens,
        cache_read_input_tokens=cached_tokens,
        output_tokens=output_tokens,
    )


def _tool_use(call: CallPiece, arguments: Any) -> ToolUseBlock:
    id = f"{_TOOL_ID}{(call.id or '').removeprefix('call_')}"
    return ToolUseBlock(id, call.name or "", arguments)


_JSON_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+)')


def complete_values(text: str) -> str:
    """The JSON object that `text` begins, with the values in it that are complete: the token limit
    may have cut off the rest.
    """
    closers: list[str] = []
    end, closing, key_next, at = 0, "{}", False, 0
    while (token := _JSON_TOKEN.match(text, at)) is not None:
        what, at, complete = token[1], token.end(), True
        if what in "{[":
            closers.append("}" if what == "{" else "]")
            key_next = what == "{"
        elif what in "}]":
            closers.pop()
        elif what == ",":
            key_next, complete = closers[-1] == "}", False
        elif what == ":":
            complete = False
        elif key_next:
            key_next = complete = False
        elif what[0] != '"':
            complete = at < len(text)  # else there may be more of it
        if complete:
            end, closing = at, "".join(reversed(closers))
    return text[:end] + closing


def _turn(path: str, turn: Turn) -> Iterator[Message]:
    """A turn as messages: results of tools are messages of their own."""
    if isinstance(turn.content, str):
        yield Message(turn.role, turn.content)
        return
    if turn.role == "assistant":
        yield _assistant(path, turn.content)
        return
    texts: list[Block] = []
    for j, block in enumerate(turn.content):
        at = f"{path}.content[{j}]"
        if block.type != "tool_result":
            _known(at, block, _TEXT)
            texts.append(block)
            continue
        if block.tool_use_id is None:
            raise RequestError(f"{at}.tool_use_id is required", param=f"{at}.tool_use_id")
        if texts:
            yield _message("user", path, texts)
            texts = []
        result = _text(f"{at}.content", block.content or "")
        yield Message("tool", result, tool_call_id=block.tool_use_id.removeprefix(_TOOL_ID))
    if texts or not turn.content:
        yield _message("user", path, texts)


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
                id = None if block.id is None else block.id.removeprefix(_TOOL_ID)
                calls.append(ToolCall(id=id, type="function", function=function))
    message = _message("assistant", path, texts)
    message.tool_calls = calls or None
    message.reasoning_content = "".join(thoughts) or None
    return message


def _message(role: Role, path: str, texts: list[Block]) -> Message:
    return Message(role, _text(f"{path}.content", texts))


def _text(path: str, content: str | Sequence[Block | ContentPart]) -> str:
    if isinstance(content, str):
        return content
    for j, block in enumerate(content):
        _known(f"{path}[{j}]", block, _TEXT)
    return "".join(block.text or "" for block in content)


def _known(path: str, block: Block | ContentPart, types: tuple[str, ...]) -> None:
    if block.type not in types:
        raise RequestError(
            f"{path}: blocks of this type are not supported here; these are: {', '.join(types)}",
            param=path,
        )
    if block.type == "text" and block.text is None:
        raise RequestError(f"{path}.text is required", param=f"{path}.text")


def _tool(path: str, tool: Tool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(f"{path}.type: the server has no tools of its own", param=f"{path}.type")
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        raise RequestError(
            f"{path}.allowed_callers must have direct: the server runs no code that could call it",
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
