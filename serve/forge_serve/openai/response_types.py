"""The objects that OpenAI's endpoints send: responses, stream events and errors.

Serializers and handlers build these structs, and `/openapi.json` is generated from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType, field

from forge_serve.generation.generation import PromptTokensDetails, Usage
from forge_serve.openapi.payload import Payload

StopReason = int | str | None
FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class PromptLogprob(Payload):
    logprob: float
    rank: int | None
    decoded_token: str | None


# One entry per prompt token: logprobs of the token itself and of the most likely ones, by token id.
# The first entry is null.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Payload):
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)


class ActivationArray(Payload):
    """Rows of one activation, in C order and little-endian."""

    dtype: str  # NumPy's name, or bfloat16
    shape: Sequence[int]
    data: str  # base64


class ReturnedActivations(Payload):
    """Activations of consecutive token positions, by name."""

    start: int  # position of the first row
    arrays: dict[str, ActivationArray]


class CompletionChoice(Payload):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason  # vLLM's: the stop string or stop token id
    matched_stop: StopReason  # SGLang's: the same, or the id of the EOS token
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: Sequence[int] | None
    token_ids: Sequence[int] | None
    activations: ReturnedActivations | UnsetType = UNSET


class CompletionAnswer(Payload, kw_only=True):
    """Response of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage


class CompletionEventChoice(Payload, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    matched_stop: StopReason | UnsetType = UNSET
    activations: ReturnedActivations | UnsetType = UNSET


class CompletionEvent(Payload, kw_only=True):
    """Event of a streamed completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionEventChoice]
    usage: Usage | UnsetType | None = UNSET


class AlternativeLogprob(Payload):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(AlternativeLogprob):
    top_logprobs: list[AlternativeLogprob]


class ChatLogprobs(Payload):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(Payload):
    name: str
    arguments: str  # JSON


class AnswerToolCall(Payload, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(Payload):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


class ChatChoice(Payload):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    matched_stop: StopReason
    token_ids: Sequence[int] | None
    activations: ReturnedActivations | UnsetType = UNSET


class ChatAnswer(Payload, kw_only=True):
    """Response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: Sequence[int] | None
    choices: list[ChatChoice]
    usage: Usage


class FunctionPiece(Payload, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallPiece(Payload, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionPiece


class ChatDelta(Payload):
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChatEventChoice(Payload):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    matched_stop: StopReason | UnsetType = UNSET
    activations: ReturnedActivations | UnsetType = UNSET


class ChatEvent(Payload, kw_only=True):
    """Event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    choices: list[ChatEventChoice]
    usage: Usage | UnsetType | None = UNSET


class GenerateAnswer(Payload):
    """Response of /generate."""

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    generated_tokens: int
    request_id: str
    model: str
    latency_ms: float
    token_ids: Sequence[int] | UnsetType = UNSET


class GenerateEvent(Payload):
    """Event of a streamed response of /generate."""

    text: str
    finish_reason: FinishReason | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class PooledUsage(Payload, kw_only=True):
    """Token counts of a request without output."""

    prompt_tokens: int
    completion_tokens: Literal[0] = 0
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingData(Payload, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Annotated[
        list[float] | str,
        Meta(description="A list of numbers, or little-endian float32 values in base64."),
    ]


class ScoreData(Payload, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class RankedDocument(Payload):
    text: str


class RankedResult(Payload):
    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class PooledAnswer(Payload, kw_only=True):
    id: str
    created: int
    model: str
    usage: PooledUsage


class EmbeddingAnswer(PooledAnswer, kw_only=True):
    """Response of /v1/embeddings."""

    object: Literal["list"] = "list"
    data: list[EmbeddingData]


class ScoreAnswer(PooledAnswer, kw_only=True):
    """Response of /v1/score: the cosine similarity of each pair of texts, from -1 to 1."""

    object: Literal["list"] = "list"
    data: list[ScoreData]


class RerankAnswer(PooledAnswer, kw_only=True):
    """Response of /v1/rerank: the documents, most similar first."""

    results: list[RankedResult]


class TokenizeAnswer(Payload):
    """Response of /tokenize: the tokens of one text or of each text in a list."""

    count: int | list[int]
    max_model_len: int
    tokens: Sequence[int | Sequence[int]]
    token_strs: Sequence[str | list[str]] | None


class DetokenizeAnswer(Payload):
    """Response of /detokenize: one text, or one for each list of token ids."""

    prompt: str | list[str]
    text: str | list[str]  # the same value under another name


class ModelCard(Payload, kw_only=True):
    """The served model, or one of its LoRA adapters, whose `parent` is the model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "forge-jax"
    root: str
    parent: str | None = None
    max_model_len: int


class Models(Payload, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]
