"""The operations of the Responses API in `/openapi.json`."""

from __future__ import annotations

from forge_serve.openapi.operation import (
    DEFECT,
    GENERATES,
    NOT_READY,
    READS,
    WHOLE,
    Operation,
    Parameter,
)
from forge_serve.responses_api.compaction import CompactRequest
from forge_serve.responses_api.endpoints import DEFAULT_PAGE, MAX_PAGE
from forge_serve.responses_api.requests import ResponseCreate, ResponsesRequest
from forge_serve.responses_api.response_types import (
    CompactedResponse,
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseAnswer,
    ResponseEvent,
    SocketError,
)

RESPONSE_ID = Parameter("id", "path", {"type": "string", "pattern": "^resp_[0-9a-f]{48}$"})

OPERATIONS = {
    "responses": Operation(
        summary="Continue a conversation, in OpenAI's newer protocol",
        request=ResponsesRequest,
        example={"input": "Tell me a story.", "max_output_tokens": 8},
        answer=ResponseAnswer,
        events=ResponseEvent,
        errors=GENERATES,
    ),
    "responses_socket": Operation(
        summary="Continue conversations over a WebSocket, in OpenAI's newer protocol",
        content_type=None,
        message=ResponseCreate,
        message_error=SocketError,
        message_example={
            "type": "response.create",
            "input": "Tell me a story.",
            "max_output_tokens": 8,
        },
        events=ResponseEvent,
        errors=(426, *NOT_READY),
    ),
    "compact_response": Operation(
        summary="Summarize a conversation as one item",
        request=CompactRequest,
        example={"model": "", "input": "Tell me a story.", "max_output_tokens": 64},
        answer=CompactedResponse,
        errors=GENERATES,
    ),
    "count_input_tokens": Operation(
        summary="Count the tokens of a response's prompt",
        request=ResponsesRequest,
        example={"input": "Tell me a story.", "max_output_tokens": 8},
        answer=InputTokens,
        errors=READS,
    ),
    "response": Operation(
        summary="A response that is kept, or its events",
        answer=ResponseAnswer,
        events=ResponseEvent,
        errors=(400, 404, *DEFECT),
        parameters=(
            RESPONSE_ID,
            Parameter(
                "stream",
                "query",
                {"type": "string"},
                "true or 1: the events of a response made with background and stream",
            ),
            Parameter("starting_after", "query", WHOLE, "the events after that number"),
        ),
    ),
    "delete_response": Operation(
        summary="Forget a response",
        answer=DeletedResponse,
        errors=(404, *DEFECT),
        parameters=(RESPONSE_ID,),
    ),
    "cancel_response": Operation(
        summary="End a response in the background",
        answer=ResponseAnswer,
        errors=(400, 404, *DEFECT),
        parameters=(RESPONSE_ID,),
    ),
    "input_items": Operation(
        summary="The items that a response was made from",
        answer=InputItems,
        errors=(400, 404, *DEFECT),
        parameters=(
            RESPONSE_ID,
            Parameter("order", "query", {"enum": ["asc", "desc"], "default": "desc"}),
            Parameter(
                "limit",
                "query",
                {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE},
            ),
            Parameter("after", "query", {"type": "string"}, "the id of one of the items"),
        ),
    ),
}
