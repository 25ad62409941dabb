"""The objects that /v1/responses sends: responses, their items, events and errors.

The serializer and the endpoints build these structs, and `/openapi.json` is generated from them.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType, field

from forge_serve.errors import Error
from forge_serve.openai.response_types import TokenLogprob
from forge_serve.openapi.payload import Payload

# ---- items -------------------------------------------------------------------------------------

ItemStatus = Literal["in_progress", "completed", "incomplete"]
DoneStatus = Literal["completed", "incomplete"]


class OutputText(Payload, tag="output_text"):
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[TokenLogprob] | UnsetType = UNSET  # absent in input items


class ReasoningText(Payload, tag="reasoning_text"):
    text: str


class OutputMessage(Payload, tag="message", kw_only=True):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class OutputReasoning(Payload, tag="reasoning", kw_only=True):
    id: str
    summary: list[Any] = field(default_factory=list)
    content: list[ReasoningText]
    status: ItemStatus


class OutputCall(Payload, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str  # valid JSON if the item is completed
    status: ItemStatus


Output = OutputMessage | OutputReasoning | OutputCall


class InputText(Payload, tag="input_text"):
    text: str


class InputFile(Payload, tag="input_file", kw_only=True):
    filename: str | None
    file_data: str


class RefusalText(Payload, tag="refusal"):
    refusal: str


class SummaryText(Payload, tag="summary_text"):
    text: str


class ListedMessage(Payload, tag="message", kw_only=True):
    id: str
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus = "completed"
    content: list[InputText | InputFile | OutputText | RefusalText]


class ListedReasoning(Payload, tag="reasoning"):
    id: str
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: UnsetType | None = UNSET
    status: ItemStatus | UnsetType = UNSET


class ListedCallOutput(Payload, tag="function_call_output"):
    id: str
    call_id: str
    output: str | list[InputText | InputFile]
    status: ItemStatus = "completed"


class Compaction(Payload, tag="compaction"):
    """Item that replaces a conversation by its summary."""

    id: str
    encrypted_content: str


Listed = ListedMessage | ListedReasoning | OutputCall | ListedCallOutput | Compaction


class InputItems(Payload, kw_only=True):
    """Page of a response's input items."""

    object: Literal["list"] = "list"
    data: list[Listed]
    first_id: str | None
    last_id: str | None
    has_more: bool


# ---- responses ---------------------------------------------------------------------------------


class ResponseFailure(Payload, kw_only=True):
    code: Literal["server_error"] = "server_error"
    message: str
    type: str


class IncompleteDetails(Payload):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseReasoning(Payload):
    effort: str | None
    summary: None = None


class ResponseText(Payload):
    format: dict[str, Any]
    verbosity: str | UnsetType = UNSET


class InputTokensDetails(Payload):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Payload):
    reasoning_tokens: int


class ResponseUsage(Payload):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseHead(Payload, kw_only=True):
    """Response without its output, which is stored separately because continuations share it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    background: bool
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class ResponseAnswer(ResponseHead, kw_only=True):
    """Response of /v1/responses."""

    output: list[Output]


class DeletedResponse(Payload, kw_only=True):
    """Confirmation that a response was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(Payload, kw_only=True):
    """Number of tokens in the prompt of a response."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class CompactedResponse(Payload, kw_only=True):
    """Response of /v1/responses/compact."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[Compaction]
    usage: ResponseUsage


# ---- events ------------------------------------------------------------------------------------


class Event(Payload, kw_only=True):
    """Event of a stream, with its name as the tag. The serializer sets the common fields."""

    sequence_number: int = 0
    stream_id: str | UnsetType = UNSET  # repeats the id of a WebSocket message


class ResponseCreated(Event, tag="response.created", kw_only=True):
    response: ResponseAnswer


class ResponseQueued(Event, tag="response.queued", kw_only=True):
    response: ResponseAnswer


class ResponseInProgress(Event, tag="response.in_progress", kw_only=True):
    response: ResponseAnswer


class ResponseCompleted(Event, tag="response.completed", kw_only=True):
    response: ResponseAnswer


class ResponseIncomplete(Event, tag="response.incomplete", kw_only=True):
    response: ResponseAnswer


class ResponseFailed(Event, tag="response.failed", kw_only=True):
    response: ResponseAnswer


class ResponseErrorEvent(Event, tag="error", kw_only=True):
    code: str | None
    message: str
    param: str | None
    error: Error  # the same fields: OpenAI sends them at the top level, Open Responses nested


class ItemAdded(Event, tag="response.output_item.added", kw_only=True):
    output_index: int
    item: Output


class ItemDone(Event, tag="response.output_item.done", kw_only=True):
    output_index: int
    item: Output


class _OfItem(Event, kw_only=True):
    item_id: str
    output_index: int


class _OfPart(_OfItem, kw_only=True):
    content_index: int = 0


class PartAdded(_OfPart, tag="response.content_part.added", kw_only=True):
    part: OutputText | ReasoningText


class PartDone(_OfPart, tag="response.content_part.done", kw_only=True):
    part: OutputText | ReasoningText


class OutputTextDelta(_OfPart, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(_OfPart, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDelta(_OfPart, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningTextDone(_OfPart, tag="response.reasoning_text.done", kw_only=True):
    text: str


class ArgumentsDelta(_OfItem, tag="response.function_call_arguments.delta", kw_only=True):
    delta: str


class ArgumentsDone(_OfItem, tag="response.function_call_arguments.done", kw_only=True):
    name: str
    arguments: str


ResponseEvent = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ItemAdded
    | PartAdded
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | PartDone
    | ArgumentsDelta
    | ArgumentsDone
    | ItemDone
    | ResponseErrorEvent
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)


# ---- WebSocket ---------------------------------------------------------------------------------


class SocketErrorDetails(Payload):
    type: str
    code: str
    message: str
    param: str | None
    headers: dict[str, str] | UnsetType = UNSET  # the headers that a POST would get


class SocketError(Payload, tag="error"):
    """Error event for a WebSocket message without a response."""

    status: int  # the HTTP status that a POST would get
    error: SocketErrorDetails
    stream_id: str | UnsetType = UNSET
