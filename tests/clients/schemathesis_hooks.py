"""Hooks for schemathesis: two checks that replace its own, and one of events.

The replaced `negative_data_rejection` and `positive_data_acceptance` check that a body is refused
if the document forbids it, and served if it allows it. Ours check the same for every body, with two
exceptions that the document states. Numbers and booleans may be written as strings, and constraints
across fields are only described in text (`EXCUSES`).
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import schemathesis
from jsonschema import Draft202012Validator

# Reasons to refuse a body that the schema allows; each is a `description` in the document.
EXCUSES = re.compile(
    "|".join(
        (
            r"best_of must equal n",
            r"exceed the limit of \d+ choices",
            r"the response could have up to \d+ values",  # logprobs
            r"min_tokens \(\d+\) is larger than",
            r"stream_options requires stream",
            r"cannot be combined",
            r"top_logprobs requires logprobs",
            r"continue_final_message requires",
            r"tool_choice must name one|tool_choice: required without tools",
            r"must have one text or as many",
            r"unknown response|stores no responses|messages must not be empty",
            r"must come from /v1/responses/compact",
            r"must match a function_call|the model wrote no summary",
            r"start (the (server|engine)|it) with --",  # features that are off
            r"leave none of the allowed tokens|leave no token|has no tokens",
            # Sizes in bytes and tokens.
            r"the context|the KV cache|tokens? of output|has \d+ bytes|a string is longer than",
            r"together they must be at most|has \d+ (texts|files); at most",
            # Contents of files.
            r"send the file in base64|a data URL must contain base64",
            r"the file is (not a|neither a) PDF",
            r"the PDF (is|has|takes|needs) ",
            r"nested deeper than",
            r"the prompt is empty|token ID .* outside the model's vocabulary",
            # Invalid grammars and schemas, and those that cannot be enforced.
            r"(text\.format|structured_outputs|guided_\w+|response_format|json_schema|regex|ebnf|grammar|tools)"
            r"[\w.\[\]]*:",
            r"chat template",
            # JSON features that the schema does not cover.
            r"occurs twice|digits|out of range|arrays and objects",
        )
    )
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|nan|[+-]?inf(inity)?", re.IGNORECASE)


def _is_number(checker: Any, value: Any) -> bool:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain or (isinstance(value, str) and _NUMBER.fullmatch(value) is not None)


def _is_whole(checker: Any, value: Any) -> bool:
    return _is_number(checker, value) and float(value).is_integer()


def _is_boolean(checker: Any, value: Any) -> bool:
    texts = ("true", "false", "0", "1")
    return value in (0, 1) or (isinstance(value, str) and value.lower() in texts)


def _is_null(checker: Any, value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() == "null")


def _as_number(check: Any) -> Any:
    def compare(validator: Any, limit: float, value: Any, schema: Any) -> Any:
        if isinstance(value, str) and _NUMBER.fullmatch(value):
            value = float(value)
        return check(validator, limit, value, schema)

    return compare


_LENIENT = jsonschema.validators.extend(
    Draft202012Validator,
    {
        name: _as_number(Draft202012Validator.VALIDATORS[name])
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    },
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"integer": _is_whole, "number": _is_number, "boolean": _is_boolean, "null": _is_null}
    ),
)


_SCHEMAS: dict[str, dict[str, Any]] = {}  # schemas of bodies, by path
_EVENTS: dict[str, dict[str, Any]] = {}  # schemas of events, by path


def _inlined(schema: Any, components: dict[str, Any]) -> Any:
    """Inline the references of a schema, so that a validator does not resolve them again."""
    if isinstance(schema, list):
        return [_inlined(item, components) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(components[schema["$ref"].rpartition("/")[2]], components)
    return {key: _inlined(value, components) for key, value in schema.items()}


@schemathesis.hook
def after_load_schema(context: Any, schema: Any) -> None:
    document = schema.raw_schema
    components = document["components"]["schemas"]
    for path, item in document["paths"].items():
        if "requestBody" in item.get("post", {}):
            body = item["post"]["requestBody"]["content"]["application/json"]["schema"]
            _SCHEMAS[path] = _inlined(body, components)
            answers = item["post"]["responses"]["200"].get("content", {})
            events = answers.get("text/event-stream", {}).get("x-event-schema")
            if events is not None:
                _EVENTS[path] = _inlined(events, components)


def _body(response: Any) -> Any:
    """Return the JSON body that was sent, or `Ellipsis`, which no schema allows."""
    sent = response.request.body or b""
    try:
        return json.loads(sent, parse_constant=lambda constant: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return ...


@schemathesis.check
def the_schema_says_what_is_served(ctx: Any, response: Any, case: Any) -> None:
    """Check that forbidden bodies are refused and allowed ones served."""
    schema = _SCHEMAS.get(case.operation.path)
    if case.method.upper() != "POST" or schema is None:
        return
    body = _body(response)
    if response.status_code == 200:
        allowed = body is not ... and (
            Draft202012Validator(schema).is_valid(body) or _LENIENT(schema).is_valid(body)
        )
        assert allowed, "the server serves what its schema forbids"
    elif response.status_code in (400, 404) and body is not ...:
        message = response.json()["error"]["message"]
        if not EXCUSES.search(message):
            allowed = Draft202012Validator(schema).is_valid(body)
            assert not allowed, f"the server refuses what its schema allows: {message}"


@schemathesis.check
def the_schema_says_what_is_streamed(ctx: Any, response: Any, case: Any) -> None:
    """Check that the data of each event matches the document."""
    schema, kind = _EVENTS.get(case.operation.path), response.headers.get("content-type", [""])
    if schema is None or response.status_code != 200 or "text/event-stream" not in kind[0]:
        return
    data = [line.removeprefix("data: ") for line in response.text.split("\n")]
    if response.stream_cut_short:
        data.pop()
    validator = Draft202012Validator(schema)
    for event in data:
        if event.startswith("{"):
            validator.validate(json.loads(event))
        else:
            assert not event or event in ("[DONE]", ": keep-alive") or event.startswith("event: ")
