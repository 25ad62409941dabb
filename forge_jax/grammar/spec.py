"""`GrammarSpec`: the form that an output must have, as plain text that can travel and be compared.

Making one checks its outer form only. Whether it can be compiled, the compiler says.
"""

# Arguments are checked at run time because callers may not use a type checker.
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
    """The error of a grammar that cannot be used."""
    return RequestError(f"{PARAM}: {why}", param=PARAM)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A kind of grammar and its text; made by the methods named after the kinds.

    Attributes:
      kind: what `text` is: a JSON schema, a regular expression (Rust's syntax; it must match the
        whole output), a JSON list of strings, a grammar (Lark, or GBNF, which is told from it by
        its "::="), or a structural tag as JSON.
      lenient: ignore the keywords of a JSON schema that cannot be enforced, instead of refusing
        the schema.
      whitespace: of JSON, a regular expression for what may stand between its tokens; "" for none.
        None: nothing but one space, which may stand after a comma or a colon.
      lead: what comes before it, as rules in Lark, of which one is `lead`; "" for nothing.
    """

    kind: Kind
    text: str
    lenient: bool = False
    whitespace: str | None = None
    lead: str = ""

    def behind(self, lead: str) -> GrammarSpec:
        """The same after what the rule `lead` of some rules in Lark allows."""
        return replace(self, lead=lead)

    @classmethod
    def json_object(cls, *, whitespace: str | None = None) -> GrammarSpec:
        """Any JSON object."""
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
        """JSON that a schema (draft 2020-12) accepts; properties come in the schema's order.

        Args:
          schema: the schema, or its text.
          additional_properties: False refuses, wherever the schema does not say, properties that it
            does not name.
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
        """A text that a regular expression matches as a whole."""
        return cls("regex", _text(pattern, "the regular expression"))

    @classmethod
    def choice(cls, choices: Sequence[str]) -> GrammarSpec:
        """One of some texts."""
        valid = isinstance(choices, Sequence) and not isinstance(choices, str) and choices
        if not valid or not all(isinstance(choice, str) and choice for choice in choices):
            raise refused("choice must be a list of non-empty strings")
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def grammar(cls, text: str) -> GrammarSpec:
        """A text of a context-free grammar in Lark or GBNF."""
        return cls("grammar", _text(text, "the grammar"))

    @classmethod
    def structural_tag(cls, tag: Mapping[str, Any] | str) -> GrammarSpec:
        """Free text in which each trigger begins a tag, whose content a JSON schema constrains.

        In one of two forms: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, or
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
        raise refused(f"{what} must be a non-empty text")
    return value


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in every object that does not say."""
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
