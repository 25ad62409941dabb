"""The output format of a request, in the fields of several protocols.

A request may set one of OpenAI's `response_format`, vLLM's `structured_outputs` and its older
`guided_*` fields, SGLang's `json_schema`, `regex` and `ebnf`, and llama.cpp's `grammar`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge_jax.config.suggest import did_you_mean
from forge_jax.errors import RequestError
from forge_jax.grammar import GrammarSpec
from forge_jax.grammar.spec import PARAM
from forge_serve.openapi.schema import NOTHING

_FIELDS: dict[str, Callable[[Any], GrammarSpec]] = {
    "json_schema": GrammarSpec.json_schema,
    "regex": GrammarSpec.regex,
    "ebnf": GrammarSpec.grammar,
    "grammar": GrammarSpec.grammar,
    "guided_json": GrammarSpec.json_schema,
    "guided_regex": GrammarSpec.regex,
    "guided_choice": GrammarSpec.choice,
    "guided_grammar": GrammarSpec.grammar,
}
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

# JSON schemas of these fields, for /openapi.json.
_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "array", "minItems": 1, "items": _TEXT}
_JSON_SCHEMA = {"anyOf": [{"type": "object"}, {"const": True}, _TEXT]}
_SHORT = {"required": ["schema"], "not": {"required": ["json_schema"]}}
_VALUES: dict[str, dict[str, Any]] = {
    "json": _JSON_SCHEMA,
    "regex": _TEXT,
    "choice": _TEXTS,
    "grammar": _TEXT,
    "json_object": {"const": True},
    "structural_tag": {"type": ["object", "string"]},
}
_KIND_SCHEMAS = {
    GrammarSpec.json_schema: _JSON_SCHEMA,
    GrammarSpec.regex: _TEXT,
    GrammarSpec.choice: _TEXTS,
    GrammarSpec.grammar: _TEXT,
}


def _one_of_type(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"const": kind}, **more.pop("properties", {})},
        **more,
    }


FIELD_SCHEMAS: dict[str, dict[str, Any]] = {
    "response_format": {
        "anyOf": [
            NOTHING,
            _one_of_type("text"),
            _one_of_type("json_object", properties={"schema": {"anyOf": [NOTHING, _JSON_SCHEMA]}}),
            _one_of_type(
                "json_schema",
                anyOf=[
                    {
                        "required": ["json_schema"],
                        "properties": {
                            "json_schema": {
                                "type": "object",
                                "required": ["schema"],
                                "properties": {"schema": _JSON_SCHEMA},
                            }
                        },
                    },
                    {**_SHORT, "properties": {"schema": _JSON_SCHEMA}},
                ],
            ),
            _one_of_type("structural_tag"),
        ]
    },
    "structured_outputs": {
        "anyOf": [
            NOTHING,
            {
                "type": "object",
                "properties": {
                    **{
                        kind: {"anyOf": [{"enum": [None, False]}, _VALUES[kind]]} for kind in _KINDS
                    },
                    "disable_any_whitespace": {"type": ["boolean", "null"]},
                    "whitespace_pattern": {"type": ["string", "null"]},
                    "disable_additional_properties": {"type": ["boolean", "null"]},
                },
                "oneOf": [
                    {"required": [kind], "properties": {kind: {"not": {"enum": [None, False]}}}}
                    for kind in _KINDS
                ],
            },
        ]
    },
    **{field: {"anyOf": [NOTHING, _KIND_SCHEMAS[read]]} for field, read in _FIELDS.items()},
}


# `response_format` for fields that must be objects.
FORMAT_SCHEMA = {
    "anyOf": [*FIELD_SCHEMAS["response_format"]["anyOf"][1:], {"enum": [None, {}]}],
}

_TYPES = ("text", "json_object", "json_schema", "structural_tag")  # response_format.type
# Keys of structured_outputs in addition to the kinds.
_OTHER_KEYS = frozenset(
    ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties")
)


def demand(request: object) -> tuple[str, GrammarSpec] | None:
    """Return the field that sets an output format, and the format; None if none is set.

    Args:
      request: an object with every field of `FIELD_SCHEMAS`.

    Raises:
      RequestError: two fields set a format, or one is invalid. `param` is its name.
    """
    found: list[tuple[str, GrammarSpec]] = []
    for field, read in (
        ("response_format", _response_format),
        ("structured_outputs", _structured_outputs),
        *_FIELDS.items(),
    ):
        value = getattr(request, field)
        if not asks_for_something(value):
            continue
        try:
            spec = read(value)
        except RequestError as error:
            why = str(error).removeprefix(f"{PARAM}: ")
            raise RequestError(f"{field}: {why}", param=field) from error
        if spec is not None:
            found.append((field, spec))
    if len(found) > 1:
        names = " and ".join(field for field, _ in found)
        raise RequestError(f"{names} cannot be combined: send only one", param=found[1][0])
    return found[0] if found else None


def asks_for_something(value: Any) -> bool:
    """Return True if a field has a value other than null, false or an empty one."""
    empty = isinstance(value, str | list | dict) and not value
    return value is not None and value is not False and not empty


def _response_format(value: Any) -> GrammarSpec | None:
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            schema: Any = value.get("schema")
            if not asks_for_something(schema):
                return GrammarSpec.json_object()
            return GrammarSpec.json_schema(schema)
        case "json_schema":
            inner = value.get("json_schema", value)  # the short form has `schema` at this level
            demanded = inner.get("schema") if isinstance(inner, dict) else None
            if demanded is None:
                raise RequestError("json_schema requires a schema")
            return GrammarSpec.json_schema(demanded, lenient=inner.get("strict") is False)
        case "structural_tag":
            return GrammarSpec.structural_tag(value)
    hint = did_you_mean(kind, _TYPES) if isinstance(kind, str) else ""
    raise RequestError(f"type must be text, json_object, json_schema or structural_tag{hint}")


def _structured_outputs(value: Any) -> GrammarSpec:
    if not isinstance(value, dict):
        raise RequestError("must be an object")
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        if not isinstance(value.get(name), bool | None):
            raise RequestError(f"{name} must be true or false")
    sent = {kind: value.get(kind) for kind in _KINDS}
    kinds = [kind for kind, said in sent.items() if said is not None and said is not False]
    if len(kinds) != 1:
        known = sent.keys() | _OTHER_KEYS
        hints = (did_you_mean(key, known) for key in list(value)[:8] if key not in known)
        hint = next(filter(None, hints), "")
        raise RequestError(f"must have exactly one of {', '.join(_KINDS)}{hint}")
    kind, whitespace = kinds[0], _whitespace(value)
    given: Any = sent[kind]
    match kind:
        case "json":
            return GrammarSpec.json_schema(
                given,
                whitespace=whitespace,
                additional_properties=value.get("disable_additional_properties") is not True,
            )
        case "json_object":
            if given is not True:
                raise RequestError("json_object must be true or false")
            return GrammarSpec.json_object(whitespace=whitespace)
        case "regex":
            return GrammarSpec.regex(given)
        case "choice":
            return GrammarSpec.choice(given)
        case "grammar":
            return GrammarSpec.grammar(given)
    return GrammarSpec.structural_tag(given)


def _whitespace(value: dict[str, Any]) -> str | None:
    pattern = value.get("whitespace_pattern")
    if pattern is not None and not isinstance(pattern, str):
        raise RequestError("whitespace_pattern must be a regular expression")
    return "" if value.get("disable_any_whitespace") is True else pattern or None
