"""The form of the output that a request demands, in the words of several protocols.

OpenAI's `response_format`, vLLM's `structured_outputs` and the fields it had before, SGLang's
`json_schema`, `regex` and `ebnf`, llama.cpp's `grammar`: one of them, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from forge_jax.errors import RequestError
from forge_jax.grammar import GrammarSpec
from forge_jax.grammar.spec import PARAM

if TYPE_CHECKING:
    from forge_serve.protocol import GenerationRequest

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


def demand(request: GenerationRequest) -> tuple[str, GrammarSpec] | None:
    """The field that demands a form, and the form; None if any text will do.

    Raises:
      RequestError: two fields do, or one is not of its own form; `param` names it.
    """
    found: list[tuple[str, GrammarSpec]] = []
    for field, read in (
        ("response_format", _response_format),
        ("structured_outputs", _structured_outputs),
        *_FIELDS.items(),
    ):
        value = getattr(request, field)
        if value is None or value is False or value in ("", {}, []):
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
        raise RequestError(f"{names} exclude each other: send one", param=found[1][0])
    return found[0] if found else None


def _response_format(value: Any) -> GrammarSpec | None:
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            schema = value.get("schema")
            return GrammarSpec.json_schema(schema) if schema else GrammarSpec.json_object()
        case "json_schema":
            inner = value.get("json_schema", value)  # the short form has the schema right here
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if schema is None:
                raise RequestError("json_schema needs its schema")
            return GrammarSpec.json_schema(schema, lenient=inner.get("strict") is False)
        case "structural_tag":
            return GrammarSpec.structural_tag(value)
    raise RequestError("the type must be text, json_object, json_schema or structural_tag")


def _structured_outputs(value: Any) -> GrammarSpec:
    if not isinstance(value, dict):
        raise RequestError("it must be an object")
    kinds = [kind for kind in _KINDS if value.get(kind) not in (None, False)]
    if len(kinds) != 1:
        raise RequestError(f"it needs one of {', '.join(_KINDS)}, and no two of them")
    given, whitespace = value[kinds[0]], _whitespace(value)
    match kinds[0]:
        case "json":
            return GrammarSpec.json_schema(
                given,
                whitespace=whitespace,
                additional_properties=value.get("disable_additional_properties") is not True,
            )
        case "json_object":
            return GrammarSpec.json_object(whitespace=whitespace)
        case "regex":
            return GrammarSpec.regex(given)
        case "choice":
            return GrammarSpec.choice(given)
        case "grammar":
            return GrammarSpec.grammar(given)
    return GrammarSpec.structural_tag(given)


def _whitespace(value: dict[str, Any]) -> str | None:
    if value.get("disable_any_whitespace") is True:
        return ""
    pattern = value.get("whitespace_pattern")
    if pattern is not None and not isinstance(pattern, str):
        raise RequestError("whitespace_pattern must be a regular expression")
    return pattern or None
