"""The operations of OpenAI's endpoints, and of vLLM's and SGLang's, in `/openapi.json`."""

from __future__ import annotations

from typing import Any

from forge_serve.openai.embeddings import (
    SCORE_PAIRS,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from forge_serve.openai.loras import LoadLoraRequest, UnloadLoraRequest
from forge_serve.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    GenerationRequest,
    TokenizeRequest,
)
from forge_serve.openai.response_types import (
    ChatAnswer,
    ChatEvent,
    CompletionAnswer,
    CompletionEvent,
    DetokenizeAnswer,
    EmbeddingAnswer,
    GenerateAnswer,
    GenerateEvent,
    ModelCard,
    Models,
    RerankAnswer,
    ScoreAnswer,
    TokenizeAnswer,
)
from forge_serve.openai.tokens import TokenizerInfo
from forge_serve.openapi.operation import GENERATES, NOT_READY, READS, TEXT, Operation, Parameter

MODEL_NAME = Parameter("name", "path", None)
USER = {"role": "user", "content": "Tell me a story."}

# For each kind of request to /invocations, the fields that select it. The first match wins.
INVOKED: dict[type[GenerationRequest], frozenset[str]] = {
    ChatRequest: frozenset({"messages"}),
    CompletionRequest: frozenset({"prompt"}),
    RerankRequest: frozenset({"query"}),
    ScoreRequest: frozenset(name for pair in SCORE_PAIRS for name in pair),
    EmbeddingRequest: frozenset({"input"}),
}

OPERATIONS = {
    "completions": Operation(
        summary="Continue a prompt",
        request=CompletionRequest,
        example={"prompt": "Once upon a time", "max_tokens": 8},
        answer=CompletionAnswer,
        events=CompletionEvent,
        errors=GENERATES,
    ),
    "chat_completions": Operation(
        summary="Continue a conversation",
        request=ChatRequest,
        example={"messages": [USER], "max_tokens": 8},
        answer=ChatAnswer,
        events=ChatEvent,
        errors=GENERATES,
    ),
    "generate": Operation(
        summary="Continue one prompt",
        request=GenerateRequest,
        example={"prompt": "Once upon a time", "max_new_tokens": 8},
        answer=GenerateAnswer,
        events=GenerateEvent,
        errors=GENERATES,
    ),
    "embeddings": Operation(
        summary="Embed texts as vectors",
        request=EmbeddingRequest,
        example={"input": ["a dog", "a cat"]},
        answer=EmbeddingAnswer,
        errors=GENERATES,
    ),
    "score": Operation(
        summary="Score the similarity of texts",
        request=ScoreRequest,
        example={"text_1": "a dog", "text_2": ["a cat", "a stone"]},
        answer=ScoreAnswer,
        errors=GENERATES,
    ),
    "rerank": Operation(
        summary="Sort documents by their similarity to a query",
        request=RerankRequest,
        example={"query": "a dog", "documents": ["a stone", "a cat"]},
        answer=RerankAnswer,
        errors=GENERATES,
    ),
    "tokenize": Operation(
        summary="Tokenize a text or a chat",
        request=TokenizeRequest,
        example={"prompt": "Once upon a time"},
        answer=TokenizeAnswer,
        errors=READS,
    ),
    "detokenize": Operation(
        summary="Convert token IDs to text",
        request=DetokenizeRequest,
        example={"tokens": [5, 6, 7]},
        answer=DetokenizeAnswer,
        errors=READS,
    ),
    "tokenizer_info": Operation(
        summary="Get the special tokens and the chat template",
        answer=TokenizerInfo,
        errors=(400, *NOT_READY),
    ),
    "models": Operation(summary="List the models", answer=Models, errors=NOT_READY),
    "model": Operation(
        summary="Get one model",
        answer=ModelCard,
        errors=(404, *NOT_READY),
        parameters=(MODEL_NAME,),
    ),
    "load_lora_adapter": Operation(
        summary="Load a LoRA adapter from a folder below --lora-folder",
        request=LoadLoraRequest,
        example={"lora_name": "my-adapter", "lora_path": "my-adapter"},
        content_type=TEXT,
        errors=READS,
    ),
    "unload_lora_adapter": Operation(
        summary="Unload a LoRA adapter that no request uses",
        request=UnloadLoraRequest,
        example={"lora_name": "my-adapter"},
        content_type=TEXT,
        errors=READS,
    ),
    "invocations": Operation(
        summary="Serve a chat, completion, embedding, reranking or score request",
        request=ChatRequest,
        or_requests=tuple(INVOKED)[1:],  # the order matters, see INVOKED
        chosen_by=INVOKED,
        example={"messages": [USER], "max_tokens": 8},
        answer=dict[str, Any],
        events=dict[str, Any],
        errors=GENERATES,
    ),
}
