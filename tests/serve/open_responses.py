"""The requirements of Open Responses (version 2026-04-24) for a response and its events.

They are written from the specification's tables, as JSON Schemas of required fields and their
types. https://www.openresponses.org
"""

from __future__ import annotations

from typing import Any

import jsonschema

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
WHOLE: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def made_of(optional: Schema | None = None, /, **required: Schema) -> Schema:
    """Return the schema of an object with these fields, and any others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
    }


def array(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def constant(value: str) -> Schema:
    return {"const": value}


STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete"]}
LOGPROB = made_of(token=TEXT, logprob=NUMBER, bytes=array(WHOLE))
LOGPROBS = array(
    made_of(token=TEXT, logprob=NUMBER, bytes=array(WHOLE), top_logprobs=array(LOGPROB))
)
OUTPUT_TEXT = made_of(
    type=constant("output_text"), text=TEXT, annotations=array({}), logprobs=LOGPROBS
)
REASONING_TEXT = made_of(type=constant("reasoning_text"), text=TEXT)
PART: Schema = {"anyOf": [OUTPUT_TEXT, REASONING_TEXT]}
ITEM: Schema = {
    "anyOf": [
        made_of(
            type=constant("message"),
            id=TEXT,
            status=STATUS,
            role={"enum": ["user", "assistant", "system", "developer"]},
            content=array(OUTPUT_TEXT),
        ),
        made_of(
            {"content": array(REASONING_TEXT), "encrypted_content": TEXT},
            type=constant("reasoning"),
            id=TEXT,
            summary=array({}),
        ),
        made_of(
            type=constant("function_call"),
            id=TEXT,
            call_id=TEXT,
            name=TEXT,
            arguments=TEXT,
            status=STATUS,
        ),
    ]
}
TOOL = made_of(
    type=constant("function"),
    name=TEXT,
    description=nullable(TEXT),
    parameters=nullable({"type": "object"}),
    strict=nullable(BOOLEAN),
)
ERROR = made_of(code=TEXT, message=TEXT)
USAGE = made_of(
    input_tokens=WHOLE,
    output_tokens=WHOLE,
    total_tokens=WHOLE,
    input_tokens_details=made_of(cached_tokens=WHOLE),
    output_tokens_details=made_of(reasoning_tokens=WHOLE),
)
RESPONSE = made_of(
    id=TEXT,
    object=constant("response"),
    created_at=WHOLE,
    completed_at=nullable(WHOLE),
    status=TEXT,
    incomplete_details=nullable(made_of(reason=TEXT)),
    model=TEXT,
    previous_response_id=nullable(TEXT),
    instructions=nullable(TEXT),
    output=array(ITEM),
    error=nullable(ERROR),
    tools=array(TOOL),
    tool_choice={
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            made_of({"name": TEXT}, type=constant("function")),
            made_of(type=constant("allowed_tools"), tools=array({}), mode=TEXT),
        ]
    },
    truncation={"enum": ["auto", "disabled"]},
    parallel_tool_calls=BOOLEAN,
    text=made_of(format={"type": "object"}),
    top_p=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    top_logprobs=WHOLE,
    temperature=NUMBER,
    reasoning=nullable(made_of(effort=nullable(TEXT), summary=nullable(TEXT))),
    usage=nullable(USAGE),
    max_output_tokens=nullable(WHOLE),
    max_tool_calls=nullable(WHOLE),
    store=BOOLEAN,
    background=BOOLEAN,
    service_tier=TEXT,
    metadata={},
    safety_identifier=nullable(TEXT),
    prompt_cache_key=nullable(TEXT),
)
ERROR_PAYLOAD = made_of(type=TEXT, code=nullable(TEXT), message=TEXT, param=nullable(TEXT))

_OF_ITEM = {"item_id": TEXT, "output_index": WHOLE}
_OF_PART = {**_OF_ITEM, "content_index": WHOLE}
EVENTS: dict[str, Schema] = {
    name: made_of(type=constant(name), sequence_number=WHOLE, **fields)
    for name, fields in {
        **{
            f"response.{state}": {"response": RESPONSE}
            for state in ("created", "queued", "in_progress", "completed", "incomplete", "failed")
        },
        "response.output_item.added": {"output_index": WHOLE, "item": nullable(ITEM)},
        "response.output_item.done": {"output_index": WHOLE, "item": nullable(ITEM)},
        "response.content_part.added": {**_OF_PART, "part": PART},
        "response.content_part.done": {**_OF_PART, "part": PART},
        "response.output_text.delta": {**_OF_PART, "delta": TEXT, "logprobs": LOGPROBS},
        "response.output_text.done": {**_OF_PART, "text": TEXT, "logprobs": LOGPROBS},
        "response.function_call_arguments.delta": {**_OF_ITEM, "delta": TEXT},
        "response.function_call_arguments.done": {**_OF_ITEM, "arguments": TEXT},
        "error": {"error": ERROR_PAYLOAD},
    }.items()
}
# Open Responses names these `response.reasoning.*`, unlike OpenAI's API and its clients.
OPENAI_ONLY = frozenset(("response.reasoning_text.delta", "response.reasoning_text.done"))


# The answer to a WebSocket message without a response.
SOCKET_ERROR = made_of(
    type=constant("error"),
    status=WHOLE,
    error=made_of({"type": TEXT, "param": nullable(TEXT)}, code=TEXT, message=TEXT),
)

_SOCKET_ERROR = jsonschema.Draft202012Validator(SOCKET_ERROR)
_RESPONSE = jsonschema.Draft202012Validator(RESPONSE)
_EVENTS = {name: jsonschema.Draft202012Validator(schema) for name, schema in EVENTS.items()}


def check_response(response: Any) -> None:
    """Raise `jsonschema.ValidationError` unless the specification allows the response."""
    _RESPONSE.validate(response)


def check_event(event: Any) -> None:
    """Check an event of a stream; raise KeyError if the specification does not have it."""
    if event["type"] not in OPENAI_ONLY:
        _EVENTS[event["type"]].validate(event)


def check_socket_event(event: Any) -> None:
    """Check an event that comes over a WebSocket."""
    if event["type"] == "error":
        _SOCKET_ERROR.validate(event)
    else:
        check_event(event)
