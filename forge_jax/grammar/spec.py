"""`GrammarSpec`: the form that an output must have, as text that is hashable and serializable.

The constructors check only the outer form. The compiler decides if a grammar can be compiled.
"""

# Arguments are checked at run time, because callers may not use a type checker.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from forge_jax.errors import RequestError

Kind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]
PARAM = "structured_outputs"


def refused(why: str) -> RequestError:
    """Return the error for a grammar that cannot be used."""
    return RequestError(f"{PARAM}: {why}", param=PARAM)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A kind of grammar and its text, made by the class methods named after the kinds.

    Attributes:
      kind: the kind of `text`. A regular expression has Rust's syntax and must match the whole
        output. A choice is a JSON list of strings. A grammar is in Lark or GBNF, which is
        recognized by its "::=".
      text: the grammar.
      lenient: True to ignore unsupported keywords of a JSON schema instead of rejecting it.
      whitespace: a regular expression for whitespace between the tokens of JSON; "" for none. None
        allows only one space after a comma or a colon.
      lead: Lark rules for text before the output, including a rule named `lead`. "" if there is
        no such text.
    """

    kind: Kind
    text: str
    lenient: bool = False
    whitespace: str | None = None
    lead: str = ""

    def behind(self, lead: str) -> GrammarSpec:
        """Return a grammar for text that matches the Lark rules `lead`, then this grammar."""
        return replace(self, lead=lead)

    @classmethod
    def json_object(cls, *, whitespace: str | None = None) -> GrammarSpec:
        return cls("json_schema", '{"type":"object"}', whitespace=whitespace)

    @classmethod
    def json_schema(
        cls,
        schema: Mapping[str, Any] | bool | str,
        *,
        lenient: bool = False,
        whitespace: str | None = None,
        additional_properties: bool = True,
    ) -> GrammarSpec:
        """Return a grammar for JSON that a schema (draft 2020-12) accepts.

        Properties must come in the schema's order.

        Args:
          schema: the schema, or its text.
          lenient: ignores unsupported keywords, instead of rejecting the schema.
          additional_properties: the default for objects that do not set `additionalProperties`.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                raise refused("the schema is not valid JSON") from None
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise refused("the schema must be an object")
        if not additional_properties:
            schema = _closed(schema)
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        return cls("json_schema", text, lenient, whitespace)

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """Return a grammar for texts that match a regular expression as a whole."""
        return cls("regex", _text(pattern, "the regular expression"))

    @classmethod
    def choice(cls, choices: Sequence[str]) -> GrammarSpec:
        """Return a grammar for one of several texts."""
        valid = isinstance(choices, Sequence) and not isinstance(choices, str) and choices
        if not valid or not all(isinstance(choice, str) and choice for choice in choices):
            raise refused("choice must be a list of non-empty strings")
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def grammar(cls, text: str) -> GrammarSpec:
        """Return a grammar from its text in Lark or GBNF."""
        return cls("grammar", _text(text, "the grammar"))

    @classmethod
    def structural_tag(cls, tag: Mapping[str, Any] | str) -> GrammarSpec:
        """Return a grammar for free text in which trigger strings start constrained tags.

        A JSON schema constrains the content of each tag. `tag` has one of two forms:
        `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}` or
        `{"format": {"type": "triggered_tags", "tags": [...], "triggers": [...]}}`.
        """
        if isinstance(tag, str):
            try:
                tag = json.loads(tag)
            except (ValueError, RecursionError):
                raise refused("the structural tag is not valid JSON") from None
        if not isinstance(tag, Mapping):
            raise refused("the structural tag must be an object")
        text = json.dumps(tag, ensure_ascii=False, separators=(",", ":"))
        return cls("structural_tag", text)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise refused(f"{what} must be a non-empty string")
    return value


def _closed(schema: Any) -> Any:
    """Return the schema with `additionalProperties: false` in every object that leaves it open."""
    if isinstance(schema, Mapping):
        given = cast(Mapping[str, Any], schema)
        closed = {
            key: value if key in ("const", "enum", "default", "examples") else _closed(value)
            for key, value in given.items()
        }
        names_some = isinstance(given.get("properties"), Mapping)
        if given.get("type") == "object" or (names_some and "type" not in given):
            closed.setdefault("additionalProperties", False)
        return closed
    if isinstance(schema, list):
        return [_closed(item) for item in cast(list[Any], schema)]
    return schema
