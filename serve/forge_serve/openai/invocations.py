"""SageMaker's /invocations: one path for several kinds of requests, told apart by their fields."""

from __future__ import annotations

from collections.abc import Mapping

from forge_serve.openai.embeddings import SCORE_PAIRS, EmbeddingRequest, RerankRequest, ScoreRequest
from forge_serve.openai.requests import ChatRequest, CompletionRequest, GenerationRequest

# The fields of each kind that no kind before it has: the first kind with one of them is meant.
INVOKED: Mapping[type[GenerationRequest], frozenset[str]] = {
    ChatRequest: frozenset({"messages"}),
    CompletionRequest: frozenset({"prompt"}),
    RerankRequest: frozenset({"query"}),
    ScoreRequest: frozenset(name for pair in SCORE_PAIRS for name in pair),
    EmbeddingRequest: frozenset({"input"}),
}
