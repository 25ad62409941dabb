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
        summary="Create a response (Responses API)",
        request=ResponsesRequest,
        example={"input": "Tell me a story.", "max_output_tokens": 8},
        answer=ResponseAnswer,
        events=ResponseEvent,
        errors=GENERATES,
    ),
    "responses_socket": Operation(
        summary="Create responses over a WebSocket (Responses API)",
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
        summary="Get a stored response, or replay its events",
        answer=ResponseAnswer,
        events=ResponseEvent,
        errors=(400, 404, *DEFECT),
        parameters=(
            RESPONSE_ID,
            Parameter(
                "stream",
                "query",
                {"type": "string"},
                "Set to `true` to replay the events of a response created with background and "
                "stream.",
            ),
            Parameter(
                "starting_after", "query", WHOLE, "Replay only events after this sequence number."
            ),
        ),
    ),
    "delete_response": Operation(
        summary="Delete a stored response",
        answer=DeletedResponse,
        errors=(404, *DEFECT),
        parameters=(RESPONSE_ID,),
    ),
    "cancel_response": Operation(
        summary="Cancel a background response",
        answer=ResponseAnswer,
        errors=(400, 404, *DEFECT),
        parameters=(RESPONSE_ID,),
    ),
    "input_items": Operation(
        summary="List the input items of a response",
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
            Parameter("after", "query", {"type": "string"}, "Return the items after this id."),
        ),
    ),
}
