"""The operations of Anthropic's endpoints in `/openapi.json`."""

from __future__ import annotations

from forge_serve.anthropic.requests import MessagesRequest
from forge_serve.anthropic.response_types import (
    CountAnswer,
    MessagesAnswer,
    MessagesErrorAnswer,
    MessagesEvent,
)
from forge_serve.openapi.operation import GENERATES, READS, Operation

_USER = {"role": "user", "content": "Tell me a story."}

OPERATIONS = {
    "messages": Operation(
        summary="Continue a conversation, in Anthropic's protocol",
        request=MessagesRequest,
        example={"messages": [_USER], "max_tokens": 8},
        answer=MessagesAnswer,
        events=MessagesEvent,
        error=MessagesErrorAnswer,
        errors=GENERATES,
    ),
    "count_tokens": Operation(
        summary="Count the tokens of a prompt, in Anthropic's protocol",
        request=MessagesRequest,
        example={"messages": [_USER], "max_tokens": 8},
        answer=CountAnswer,
        error=MessagesErrorAnswer,
        errors=READS,
    ),
}
