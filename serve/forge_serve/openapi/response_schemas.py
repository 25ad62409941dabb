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


class Error(Answer):
    message: str
    type: str
    param: str | None  # the path of the field to change
    code: str | None


class PromptTokensDetails(Answer):
    cached_tokens: int


class CompletionTokensDetails(Answer):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int


class UsageAnswer(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptLogprob(Answer):
    logprob: float
    rank: int | None
    decoded_token: str | None


# For each token of a prompt, by id: that token and the likeliest; nothing comes before the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


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
    stop_reason: int | str | None  # what ended it: a stop string or a stop token id
    matched_stop: int | str | None  # the same, or the end token
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None


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
    stop_reason: int | str | UnsetType | None = UNSET
    matched_stop: int | str | UnsetType | None = UNSET
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
    stop_reason: int | str | None
    matched_stop: int | str | None
    token_ids: list[int] | None


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


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
    stop_reason: int | str | UnsetType | None = UNSET
    matched_stop: int | str | UnsetType | None = UNSET
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
    generated_tokens: int
    request_id: str
    model: str
    latency_ms: float
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


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer, tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob] | UnsetType = UNSET  # those of an input have none


class ReasoningText(Answer, tag="reasoning_text"):
    text: str


class OutputMessage(Answer, tag="message"):
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputReasoning(Answer, tag="reasoning"):
    id: str
    summary: list[Any]  # nothing
    content: list[ReasoningText]
    status: ItemStatus


class OutputCall(Answer, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str  # JSON, if the item is completed
    status: ItemStatus


Output = OutputMessage | OutputReasoning | OutputCall


class ResponseFailure(Answer):
    code: Literal["server_error"]
    message: str
    type: str


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(Answer):
    effort: str | None
    summary: None


class ResponseText(Answer):
    format: dict[str, Any]
    verbosity: str | UnsetType = UNSET


class InputTokensDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseAnswer(Answer):
    """The answer of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    completed_at: int | None
    error: ResponseFailure | None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Output]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class _ResponseEvent(Answer, kw_only=True):
    sequence_number: int
    stream_id: str | UnsetType = UNSET  # of the message of a WebSocket that asked with one


class _WithResponse(_ResponseEvent):
    response: ResponseAnswer


class ResponseCreated(_WithResponse, tag="response.created"):
    pass


class ResponseQueued(_WithResponse, tag="response.queued"):
    pass


class ResponseInProgress(_WithResponse, tag="response.in_progress"):
    pass


class ResponseCompleted(_WithResponse, tag="response.completed"):
    pass


class ResponseIncomplete(_WithResponse, tag="response.incomplete"):
    pass


class ResponseFailed(_WithResponse, tag="response.failed"):
    pass


class ResponseErrorEvent(_ResponseEvent, tag="error"):
    code: str | None
    message: str
    param: str | None
    error: Error


class ItemAdded(_ResponseEvent, tag="response.output_item.added"):
    output_index: int
    item: Output


class ItemDone(_ResponseEvent, tag="response.output_item.done"):
    output_index: int
    item: Output


class _OfItem(_ResponseEvent):
    item_id: str
    output_index: int


class _OfPart(_OfItem):
    content_index: int


class PartAdded(_OfPart, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_OfPart, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(_OfPart, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(_OfPart, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDelta(_OfPart, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(_OfPart, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_OfItem, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_OfItem, tag="response.function_call_arguments.done"):
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


class DeletedResponse(Answer):
    """A response that is not there any more."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(Answer):
    """How many tokens the prompt of a response has."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class InputText(Answer, tag="input_text"):
    text: str


class RefusalText(Answer, tag="refusal"):
    refusal: str


class SummaryText(Answer, tag="summary_text"):
    text: str


class ListedMessage(Answer, tag="message"):
    id: str
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus
    content: list[InputText | OutputText | RefusalText]


class ListedReasoning(Answer, tag="reasoning"):
    id: str
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: UnsetType | None = UNSET
    status: ItemStatus | UnsetType = UNSET


class ListedCallOutput(Answer, tag="function_call_output"):
    id: str
    call_id: str
    output: str
    status: ItemStatus


class Compaction(Answer, tag="compaction"):
    """A conversation as one item of an input."""

    id: str
    encrypted_content: str


class CompactedResponse(Answer):
    """The answer of /v1/responses/compact."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[Compaction]
    usage: ResponseUsage


class InputItems(Answer):
    """A page of the items that a response was made from."""

    object: Literal["list"]
    data: list[ListedMessage | ListedReasoning | OutputCall | ListedCallOutput | Compaction]
    first_id: str | None
    last_id: str | None
    has_more: bool


class PooledUsage(Answer):
    """Tokens of a request that has no output."""

    prompt_tokens: int
    completion_tokens: Literal[0]
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingData(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # base64 of little-endian float32 values


class EmbeddingAnswer(Answer):
    """The answer of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingData]
    usage: PooledUsage


class ScoreData(Answer):
    object: Literal["score"]
    index: int
    score: float


class ScoreAnswer(Answer):
    """The similarity of pairs of texts, from -1 to 1."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreData]
    usage: PooledUsage


class RankedDocument(Answer):
    text: str


class RankedResult(Answer):
    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class RerankAnswer(Answer):
    """Documents, the most similar first."""

    id: str
    created: int
    model: str
    results: list[RankedResult]
    usage: PooledUsage


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


class OllamaDetails(Answer):
    """What a model is made of; empty where it is not known."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Answer):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaTags(Answer):
    """The models, in Ollama's words."""

    models: list[OllamaModel]


class Load(Answer):
    """The samples that run or wait."""

    server_load: int


class WorkerLoad(Answer):
    """How much there is to do."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    cache_hit_rate: float
    max_running_requests: int
    utilization: float


class ReplicaLoad(WorkerLoad):
    """The same of one replica."""

    dp_rank: int
    timestamp: float


class Loads(Answer):
    """How much there is to do, for each replica."""

    timestamp: str
    version: str
    loads: list[ReplicaLoad]


class SequenceAnswer(Answer):
    """A sample that runs or waits. `request_id` is null where it is another tenant's."""

    request_id: str | None
    prompt: int
    sample: int
    status: Literal["running", "waiting"]
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    cached_tokens: int
    blocks: int
    shared_blocks: int
    preemptions: int
    draft_tokens: int
    accepted_tokens: int


class BlocksAnswer(Answer):
    """The KV blocks: how many there are of each kind, and runs of cells that show where.

    A run is the number of its cells and what they are: a number is a place in `sequences`.
    """

    block_size: int
    num_blocks: int
    num_free: int
    num_cached: int
    num_shared: int
    num_owned: int
    blocks_per_cell: int
    runs: list[tuple[int, int | Literal["free", "cached", "shared", "other"]]]


class StepAnswer(Answer):
    """A step whose result has been read."""

    step: int
    end_s: float
    seconds: float
    sequences: int
    tokens: int
    rows: int
    draft_tokens: int
    accepted_tokens: int


class SpeculationAnswer(Answer):
    """Drafts since the start."""

    num_drafts: int
    num_draft_tokens: int
    accepted_per_position: list[int]


class EngineStateAnswer(Answer):
    """What the engine holds and does. Times are of a clock without a date."""

    time_s: float
    num_running: int
    num_waiting: int
    num_slots: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    speculation: SpeculationAnswer | None
    sequences: list[SequenceAnswer]
    blocks: BlocksAnswer
    steps: list[StepAnswer]


class ModelInfo(Answer):
    """The model, in SGLang's words."""

    model_path: str
    tokenizer_path: str | None
    served_model_name: str
    is_generation: bool
    architectures: list[str] | None
    max_model_len: int
    vocab_size: int
    has_image_understanding: bool
    has_audio_understanding: bool
    preferred_sampling_params: None
    weight_version: str


class Profile(Answer):
    """The name of a profile's folder."""

    profile: str


class ServerInfo(Answer):
    """What the server can hold, and what it does now, in SGLang's words."""

    model_id: str
    model_path: str
    served_model_name: str
    status: str
    version: str
    max_model_len: int
    context_length: int
    max_req_input_len: int
    max_total_num_tokens: int
    max_total_tokens: int
    max_running_requests: int
    max_num_reqs: int
    tp_size: int
    dp_size: int
    disaggregation_mode: str
    system_fingerprint: str | None
    internal_states: list[WorkerLoad]


class ModelCard(Answer):
    """The model that is served, or a LoRA adapter of it, which has it for a parent."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
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


class ErrorAnswer(Answer):
    """An error in OpenAI's form."""

    error: Error


class SocketErrorDetails(Answer):
    type: str
    code: str
    message: str
    param: str | None
    headers: dict[str, str] | UnsetType = UNSET  # what an answer to a POST would have


class SocketError(Answer):
    """The event that answers a message of a WebSocket without a response."""

    type: Literal["error"]
    status: int  # as of an answer to a POST
    error: SocketErrorDetails
    stream_id: str | UnsetType = UNSET


class ThreadErrorDetails(Answer):
    error_code: Literal["thread_unsupported_request"]
    unsupported: list[str]


class MessagesError(Answer):
    type: str
    message: str
    details: ThreadErrorDetails | UnsetType = UNSET


class MessagesErrorAnswer(Answer):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: MessagesError
