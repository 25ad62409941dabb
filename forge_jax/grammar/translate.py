"""Translation of a `GrammarSpec` to llguidance's grammar, and of its errors to ours."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from forge_jax.errors import RequestError
from forge_jax.grammar.spec import GrammarSpec, refused

# These are the spaces of common JSON. More would let a weak model generate only whitespace.
_ONE_SPACE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_NO_SPACE = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}

_KEYWORDS = frozenset(
    "$anchor $dynamicAnchor $dynamicRef $id $recursiveRef additionalItems contains "
    "contentEncoding contentMediaType contentSchema dependencies dependentRequired "
    "dependentSchemas else if then maxContains minContains maxProperties minProperties not "
    "prefixItems propertyNames unevaluatedItems unevaluatedProperties uniqueItems "
    "patternProperties oneOf anyOf allOf multipleOf format pattern".split()
)

MAX_STEP_FUEL = 500_000  # the lexer's fuel for a mask or a token, about 30 ms

# llguidance's messages quote the client's text. These do not, because they may be logged.
_REASONS: tuple[tuple[str, str], ...] = (
    (
        r"^circular references with sibling keys",
        "not supported: other keywords next to a $ref that refers to itself",
    ),
    (
        r"^Resource '.*' is not present in a registry",
        "a $ref (or $schema) refers to another document, which is not fetched: put its target "
        "into $defs",
    ),
    (r"^Pointer '.*' does not exist", "the target of a $ref does not exist in the schema"),
    (r"^(minProperties|required) > maxProperties", "no text satisfies it"),
    (r"Unknown format", "a format is unknown"),
    (r"Invalid type", "a type is not a JSON type"),
    (r"oneOf constraints", "the schemas of a oneOf do not exclude each other"),
    (r"[Uu]nsatisfiable|NoExtensionBias", "no text satisfies it"),
    (r"patternPropert", "its patternProperties overlap"),
    (r"invalid regex|regex parse error", "a regular expression is invalid or not supported"),
    (r"nested|recursion limit", "it is nested too deeply"),
    (
        r"too large|too many|too complex|too big|max is|fuel|limit|level exceeded|Unable to determ",
        "it is too complex",
    ),
)
_ITEMS = re.compile(r"Current row has (\d+) items; max is (\d+)")
_EXPRESSIONS = re.compile(r"too many expressions constructed")
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")  # special characters of regular expressions
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\):")


def to_llguidance(spec: GrammarSpec) -> str:
    """Return the grammar in llguidance's format.

    Raises:
      RequestError: the text is not valid for its kind.
    """
    grammar = _of_kind(spec)
    if not spec.lead:
        return grammar
    first, *others = json.loads(grammar)["grammars"]
    lead = {"lark_grammar": f"{spec.lead}\nstart: lead @answer"}
    return json.dumps({"grammars": [lead, {**first, "name": "answer"}, *others]})


def _of_kind(spec: GrammarSpec) -> str:
    match spec.kind:
        case "json_schema":
            return _json_schema(spec)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(spec.text)
        case "choice":
            # One regular expression is one lexeme. In a rule of literals, each choice would be an
            # item of the parser's row, whose size is limited.
            choices = (_META.sub(r"\\\g<0>", choice) for choice in json.loads(spec.text))
            return llguidance.LLMatcher.grammar_from_regex("|".join(choices))
        case "grammar":
            try:
                lark = any_to_lark(spec.text)
            except Exception:
                raise refused("the GBNF grammar is invalid") from None
            return llguidance.LLMatcher.grammar_from_lark(lark)
        case "structural_tag":
            return _structural_tag(json.loads(spec.text))


def reason(message: str) -> str:
    """Return why llguidance rejects a grammar, without quoting the client's text."""
    items = _ITEMS.search(message)
    if items is not None:
        return (
            f"it is too complex: {items[1]} alternatives are open at once, at most {items[2]} are "
            "allowed: use fewer optional properties or alternatives"
        )
    if _EXPRESSIONS.search(message):
        return (
            f"it is too complex: a token takes more than {MAX_STEP_FUEL} steps of the lexer: "
            "use smaller repetitions"
        )
    if message.startswith("Unimplemented keys"):
        known = sorted(_KEYWORDS.intersection(re.findall(r'"([^"]+)"', message)))
        return f"not supported: {', '.join(known)}" if known else "a keyword is not supported"
    for pattern, words in _REASONS:
        if re.search(pattern, message):
            return words
    place = _PLACE.match(message)
    if place is not None:
        return f"it has a syntax error at line {place[1]}, column {place[2]}"
    return "it is invalid"


def _json_schema(spec: GrammarSpec) -> str:
    schema = json.loads(spec.text)
    schema.pop("x-guidance", None)  # options of llguidance, which clients must not set
    spaces: dict[str, Any]
    if spec.whitespace is None:
        spaces = _ONE_SPACE
    elif not spec.whitespace:
        spaces = _NO_SPACE
    else:
        spaces = {"whitespace_flexible": True, "whitespace_pattern": spec.whitespace}
    lenient = {"lenient": spec.lenient, "coerce_one_of": spec.lenient}
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(schema, ensure_ascii=False),
            overrides={**spaces, **lenient},  # type: ignore[arg-type]
        )
    except ValueError as error:
        raise refused(f"the schema: {reason(str(error))}") from None


def _structural_tag(tag: Mapping[str, Any]) -> str:
    form = tag.get("format")
    if isinstance(form, Mapping) and form.get("type") == "triggered_tags":
        given, triggers = form.get("tags"), form.get("triggers")
    elif form is None:
        given, triggers = tag.get("structures"), tag.get("triggers")
    else:
        raise _wrong_tag("only the format triggered_tags is supported")
    if not isinstance(given, list) or not given or not isinstance(triggers, list):
        raise _wrong_tag("it needs a list of tags and a list of triggers")
    tags = []
    for each in given:
        begin, end, schema = _tag_parts(each)
        starts = (t for t in triggers if isinstance(t, str) and t and begin.startswith(t))
        trigger = next(starts, None)
        if trigger is None:
            raise _wrong_tag("each begin must start with one of the triggers")
        tags.append(
            llguidance.StructTag(trigger=trigger, begin=begin, grammar=json.dumps(schema), end=end)
        )
    grammar = llguidance.StructTag.to_grammar(tags, assume_special=False)
    return llguidance.LLMatcher.grammar_from_lark(grammar)


def _tag_parts(tag: Any) -> tuple[str, str, Mapping[str, Any]]:
    """Return the begin, the end and the schema of a tag."""
    if not isinstance(tag, Mapping):
        raise _wrong_tag("a tag must be an object")
    schema: Any = tag.get("schema")
    content = tag.get("content")
    if isinstance(content, Mapping) and content.get("type") == "json_schema":
        schema = content.get("json_schema")
    begin, end = tag.get("begin"), tag.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, Mapping):
        raise _wrong_tag("a tag needs begin, end and a schema")
    return begin, end, {k: v for k, v in schema.items() if k != "x-guidance"}


def _wrong_tag(why: str) -> RequestError:
    return refused(f"structural_tag: {why}")
