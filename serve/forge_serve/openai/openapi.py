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

# Of /invocations: the fields that choose among its requests, first come first.
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
        summary="Texts as vectors",
        request=EmbeddingRequest,
        example={"input": ["a dog", "a cat"]},
        answer=EmbeddingAnswer,
        errors=GENERATES,
    ),
    "score": Operation(
        summary="How similar texts are",
        request=ScoreRequest,
        example={"text_1": "a dog", "text_2": ["a cat", "a stone"]},
        answer=ScoreAnswer,
        errors=GENERATES,
    ),
    "rerank": Operation(
        summary="Documents by their similarity to a query",
        request=RerankRequest,
        example={"query": "a dog", "documents": ["a stone", "a cat"]},
        answer=RerankAnswer,
        errors=GENERATES,
    ),
    "tokenize": Operation(
        summary="The tokens of a text or a chat",
        request=TokenizeRequest,
        example={"prompt": "Once upon a time"},
        answer=TokenizeAnswer,
        errors=READS,
    ),
    "detokenize": Operation(
        summary="The text of tokens",
        request=DetokenizeRequest,
        example={"tokens": [5, 6, 7]},
        answer=DetokenizeAnswer,
        errors=READS,
    ),
    "tokenizer_info": Operation(
        summary="Special tokens and the chat template",
        answer=TokenizerInfo,
        errors=(400, *NOT_READY),
    ),
    "models": Operation(summary="The models", answer=Models, errors=NOT_READY),
    "model": Operation(
        summary="One model",
        answer=ModelCard,
        errors=(404, *NOT_READY),
        parameters=(MODEL_NAME,),
    ),
    "load_lora_adapter": Operation(
        summary="Load a LoRA adapter, from the folder that --lora-folder names",
        request=LoadLoraRequest,
        example={"lora_name": "my-adapter", "lora_path": "my-adapter"},
        content_type=TEXT,
        errors=READS,
    ),
    "unload_lora_adapter": Operation(
        summary="Unload a LoRA adapter that no request takes",
        request=UnloadLoraRequest,
        example={"lora_name": "my-adapter"},
        content_type=TEXT,
        errors=READS,
    ),
    "invocations": Operation(
        summary="A chat, completion, embedding, ranking or score, whichever the body is",
        request=ChatRequest,
        or_requests=tuple(INVOKED)[1:],  # in the order in which they are looked for
        chosen_by=INVOKED,
        example={"messages": [USER], "max_tokens": 8},
        answer=dict[str, Any],
        events=dict[str, Any],
        errors=GENERATES,
    ),
}
