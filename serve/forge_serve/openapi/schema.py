"""JSON schemas of request bodies, from the structs that decode them.

Types and names of fields come from the structs. The limits of one field, and the rules that it is
checked for, are at the field: `rule` and `refused` make its metadata. A struct whose fields
depend on each other has a classmethod `narrow_schema(schema, about)`, which changes the schema in
place.

The schemas give each value its plain form. `openai.validation` also accepts numbers and booleans as
strings, and decides which bytes are JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec
import msgspec.inspect

from forge_jax.sampling_params import RANGES, Range
from forge_serve.limits import Limits

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_serve.config import ServerConfig

REF = "#/components/schemas/{name}"
MAX_COUNT = 2**31 - 1  # of anything that the context or another limit bounds anyway

type Schema = dict[str, Any]
type ServerSchema = Callable[[About], Schema]

NOTHING: Schema = {"enum": [None, False, "", [], {}]}  # values that request nothing


@dataclass(frozen=True, kw_only=True)
class About:
    """What the schemas depend on: the model and the limits of this server."""

    model: str
    max_model_len: int
    vocab_size: int
    limits: Limits
    api_keys: bool
    max_new_tokens: int = MAX_COUNT  # of an output
    loras: bool = False  # True if adapters, which are models too, may be loaded and unloaded
    any_model: bool = False  # True if a request may name a model that is not served

    @property
    def model_names(self) -> Schema:
        return {"type": "string"} if self.loras else {"enum": [self.model]}

    @classmethod
    def of(cls, config: ServerConfig, engine: AsyncEngine, model: str) -> About:
        return cls(
            model=model,
            max_model_len=engine.max_model_len,
            vocab_size=engine.limits.vocab_size,
            limits=config.limits,
            api_keys=bool(config.api_key or config.api_key_file),
            max_new_tokens=config.max_new_tokens or MAX_COUNT,
            loras=engine.adapters.places > 0,
            any_model=config.accept_any_model,
        )


# ---- metadata of fields -------------------------------------------------------------------------


def rule(
    text: str | None = None,
    *,
    schema: Schema | ServerSchema | None = None,
    limits: ServerSchema | None = None,
    most: tuple[str, str] | None = None,
    **keywords: Any,
) -> msgspec.Meta:
    """Describe a field in its schema. Decoding does not check it: the handlers do, and their errors
    name the field.

    Args:
      text: a reason to refuse a value that the schema allows.
      schema: the whole schema, in place of that of the field's type.
      limits: keywords that depend on the server.
      most: the row of `Limits` for the number of items, and the word for them in the error. The
        check of limits reads it too.
      keywords: other keywords.
    """
    extra = {"schema": schema, "limits": limits, "most": most}
    return msgspec.Meta(description=text, extra_json_schema=keywords or None, extra=extra)


def refused(reason: str, *, neutral: float | None = None) -> msgspec.Meta:
    """Mark a field that is not implemented: only values that request nothing are accepted.

    Args:
      neutral: a number that requests nothing either.
    """
    values = [*NOTHING["enum"], *([] if neutral is None else [neutral])]
    return msgspec.Meta(
        description=f"refused: {reason}",
        extra_json_schema={"enum": values},
        extra={"refused": reason, "neutral": neutral},
    )


@cache
def refused_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[str, float | None]]:
    """The fields that are `refused`: why, and the neutral number."""
    return {
        name: (extra["refused"], extra["neutral"])
        for name, extra in _extras(kind)
        if "refused" in extra
    }


@cache
def counted_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[str, str]]:
    """The fields with a limited number of items: the row of `Limits`, and the word for items."""
    return {name: extra["most"] for name, extra in _extras(kind) if extra.get("most") is not None}


def _extras(kind: type[msgspec.Struct]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The metadata that `rule` and `refused` have left at each field."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.extra is not None:
                yield name, meta.extra


def up_to(row: str) -> ServerSchema:
    """Numbers from 0 to a row of the limits."""
    return lambda about: {"minimum": 0, "maximum": getattr(about.limits, row)}


def number(allowed: Range, *, high: float | None = None) -> Schema:
    """The keywords of a range."""
    low = "exclusiveMinimum" if allowed.open_low else "minimum"
    return {low: allowed.low, "maximum": allowed.high if high is None else min(high, allowed.high)}


def ranged(parameter: str, text: str | None = None) -> msgspec.Meta:
    """Describe a field with the range of a sampling parameter."""
    return rule(text, **number(RANGES[parameter]))


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def texts(most: int, least: int = 1) -> Schema:
    """A list of strings."""
    return {"type": "array", "minItems": least, "maxItems": most, "items": {"type": "string"}}


def token_ids(about: About) -> Schema:
    """A prompt as token ids."""
    ids = {"type": "integer", "minimum": 0, "maximum": about.vocab_size - 1}
    return {"type": "array", "minItems": 1, "items": ids}


def one_prompt(about: About) -> Schema:
    return {"anyOf": [{"type": "string"}, token_ids(about)]}


def prompts(about: About) -> Schema:
    """One or several prompts, as texts or as token ids."""
    most, ids = about.limits.prompts, token_ids(about)
    lists = {"type": "array", "minItems": 1, "maxItems": most, "items": ids}
    return {"anyOf": [{"type": "string"}, texts(most), ids, lists]}


def tagged(kind: str, *required: str) -> Schema:
    """An object whose `type` is `kind`, with strings in the required fields."""
    given = {name: {"type": "string"} for name in required}
    return {"required": ["type", *required], "properties": {"type": {"const": kind}, **given}}


TEXT_PARTS: Schema = {"type": "array", "items": {"type": "object", **tagged("text", "text")}}
TEXT_OR_PARTS: Schema = {"anyOf": [{"type": ["string", "null"]}, TEXT_PARTS]}


# ---- components --------------------------------------------------------------------------------


def components(kinds: Iterable[type], about: About) -> dict[str, Schema]:
    """The schemas of request bodies, and of all structs in them, by name."""
    kinds = list(kinds)
    _, found = msgspec.json.schema_components(kinds, ref_template=REF)
    for struct in _structs(kinds):
        schema = found[struct.cls.__name__]
        schema.pop("title", None)
        schema["description"] = schema.get("description", "").partition("\n")[0]
        fields = schema["properties"]
        for field in struct.fields:
            name = field.encode_name
            fields[name].pop("default", None)
            fields[name] = _described(_plain(fields[name]), field.type, about)
        narrow = getattr(struct.cls, "narrow_schema", None)
        if narrow is not None:
            narrow(schema, about)
    return found


def _structs(kinds: Iterable[type]) -> Iterator[msgspec.inspect.StructType]:
    """The structs of bodies, and of all that is in them."""
    seen: set[type] = set()
    left = list(msgspec.inspect.multi_type_info(kinds))
    while left:
        match left.pop():
            case msgspec.inspect.Metadata(type=inner):
                left.append(inner)
            case msgspec.inspect.UnionType(types=types):
                left += types
            case msgspec.inspect.CollectionType(item_type=item):
                left.append(item)
            case msgspec.inspect.StructType(cls=cls) as struct if cls not in seen:
                seen.add(cls)
                left += (field.type for field in struct.fields)
                yield struct
            case _:
                pass


def _described(schema: Schema, of: msgspec.inspect.Type, about: About) -> Schema:
    """The schema of a field with the metadata of the field."""
    extra: dict[str, Any] = (of.extra or {}) if isinstance(of, msgspec.inspect.Metadata) else {}
    whole, limits, most = extra.get("schema"), extra.get("limits"), extra.get("most")
    if whole is not None:
        said = {key: schema[key] for key in ("description",) if key in schema}
        found: Schema = whole if isinstance(whole, dict) else whole(about)
        schema = {**found, **said}
    elif most is not None and "refused" not in extra:
        schema = {**schema, "maxItems": getattr(about.limits, most[0])}
    if limits is not None:
        schema = {**schema, **limits(about)}
    for option in schema.get("anyOf", ()):
        if option.get("type") == "array":
            option |= {key: schema.pop(key) for key in ("minItems", "maxItems") if key in schema}
    return schema


def _plain(schema: Schema) -> Schema:
    """`anyOf` of bare types as a list of types, which readers and generators know better."""
    options = schema.get("anyOf", [])
    if not options or any(option.keys() != {"type"} for option in options):
        return schema
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    return {"type": [option["type"] for option in options], **rest}
