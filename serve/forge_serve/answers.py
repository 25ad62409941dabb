"""What clients get back, as types: for `/openapi.json`, and for tests that hold answers to them.

`responses` and `messages` write the answers; nothing is built from these types. A field that is
`UNSET` by default may be missing; all others are always there, and there are no others.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """Any object in an answer."""


class PromptTokensDetails(Answer):
    cached_tokens: int


class CompletionTokensDetails(Answer):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageAnswer(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionAnswer(Answer):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: UsageAnswer


class CompletionEventChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionEvent(Answer):
    """An event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionEventChoice]
    usage: UsageAnswer | UnsetType | None = UNSET


class AlternativeLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[AlternativeLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Answer):
    name: str
    arguments: str  # JSON


class AnswerToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


class ChatChoice(Answer):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionPiece(Answer):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallPiece(Answer):
    index: int
    function: FunctionPiece
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Answer):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChatEventChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatEvent(Answer):
    """An event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatEventChoice]
    usage: UsageAnswer | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class GenerateAnswer(Answer):
    """The answer of /generate."""

    text: str
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    token_ids: list[int] | UnsetType = UNSET


class GenerateEvent(Answer):
    """An event of a streamed answer of /generate."""

    text: str
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | UnsetType = UNSET


class TextBlock(Answer, tag="text"):
    text: str


class ThinkingBlock(Answer, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Answer, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(Answer):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesAnswer(Answer):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesBegun(Answer):
    """The answer of /v1/messages as its stream begins."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Any]
    stop_reason: None
    stop_sequence: None
    usage: MessagesUsage


class MessageStart(Answer, tag="message_start"):
    message: MessagesBegun


class ThinkingStart(Answer, tag="thinking"):
    thinking: str


class BlockStart(Answer, tag="content_block_start"):
    index: int
    content_block: TextBlock | ThinkingStart | ToolUseBlock


class TextDelta(Answer, tag="text_delta"):
    text: str


class ThinkingDelta(Answer, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Answer, tag="signature_delta"):
    signature: str


class InputDelta(Answer, tag="input_json_delta"):
    partial_json: str


class BlockDelta(Answer, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Answer, tag="content_block_stop"):
    index: int


class StopDelta(Answer):
    stop_reason: StopReason
    stop_sequence: str | None


class OutputTokens(Answer):
    output_tokens: int


class MessageDelta(Answer, tag="message_delta"):
    delta: StopDelta
    usage: OutputTokens


class MessageStop(Answer, tag="message_stop"):
    pass


MessagesEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class CountAnswer(Answer):
    """How many tokens a prompt has."""

    input_tokens: int


class TokenizeAnswer(Answer):
    """The tokens of a text, or of each of several."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int | list[int]]
    token_strs: list[str | list[str]] | None


class DetokenizeAnswer(Answer):
    """The text of tokens, or the texts of several lists of them."""

    prompt: str | list[str]
    text: str | list[str]


class TokenizerInfo(msgspec.Struct):
    """Special tokens are further fields, by their names in the tokenizer."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class Version(Answer):
    version: str


class Load(Answer):
    """The samples that run or wait."""

    server_load: int


class ModelCard(Answer):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class Models(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Health(Answer):
    """Requests are served when the status is serving or ready."""

    status: Literal[
        "starting", "serving", "ready", "recovering", "stopping", "stopped", "failed", "stalled"
    ]


class DetailedHealth(Health):
    """The same with the model and the size of the queue, once there is an engine."""

    model: str | None
    max_model_len: int | UnsetType = UNSET
    num_running: int | UnsetType = UNSET
    num_waiting: int | UnsetType = UNSET
    steps: int | UnsetType = UNSET


class Error(Answer):
    message: str
    type: str
    param: str | None  # the path of the field to change
    code: str | None


class ErrorAnswer(Answer):
    """An error in OpenAI's form."""

    error: Error


class MessagesError(Answer):
    type: str
    message: str


class MessagesErrorAnswer(Answer):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: MessagesError
