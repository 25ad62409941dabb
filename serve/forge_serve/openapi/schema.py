"""JSON schemas of request bodies, made from the structs that decode them.

Field names and types come from the structs. Limits and rules of a single field are metadata of the
field, created by `rule` and `refused`. If fields depend on each other, the struct has a classmethod
`narrow_schema(schema, about)` that changes the schema in place.

The schemas describe values in their JSON types. `openai.validation` also accepts numbers and
booleans as strings.
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
MAX_COUNT = (
    2**31 - 1
)  # the maximum of counts that another limit, such as the context, bounds anyway

type Schema = dict[str, Any]
type ServerSchema = Callable[[About], Schema]

NOTHING: Schema = {"enum": [None, False, "", [], {}]}  # values that have no effect


@dataclass(frozen=True, kw_only=True)
class About:
    """The model and limits of this server, on which the schemas depend."""

    model: str
    max_model_len: int
    vocab_size: int
    limits: Limits
    api_keys: bool
    max_new_tokens: int = MAX_COUNT
    loras: bool = False  # True if LoRA adapters may be loaded, which are valid model names
    any_model: bool = False  # True if requests may name models that are not served

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
    """Describe a field in its schema.

    Decoding ignores the description. The handlers check the field, so that errors name it.

    Args:
      text: a condition that the schema cannot express.
      schema: the whole schema, which replaces that of the field's type.
      limits: keywords that depend on the server.
      most: the row of `Limits` for the number of items, and the word for items in the error. The
        check of limits also uses it.
      keywords: other keywords.
    """
    extra = {"schema": schema, "limits": limits, "most": most}
    return msgspec.Meta(description=text, extra_json_schema=keywords or None, extra=extra)


def refused(reason: str, *, neutral: float | None = None) -> msgspec.Meta:
    """Mark a field that is not implemented. Only values without effect are accepted.

    Args:
      reason: ends the error message, and the description in the schema.
      neutral: a number that also has no effect.
    """
    values = [*NOTHING["enum"], *([] if neutral is None else [neutral])]
    return msgspec.Meta(
        description=f"Rejected: {reason}.",
        extra_json_schema={"enum": values},
        extra={"refused": reason, "neutral": neutral},
    )


@cache
def refused_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[str, float | None]]:
    """Return the reason and the neutral number of each `refused` field, by name."""
    return {
        name: (extra["refused"], extra["neutral"])
        for name, extra in _extras(kind)
        if "refused" in extra
    }


@cache
def counted_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[str, str]]:
    """Return the row of `Limits` and the word for items of each field with limited items."""
    return {name: extra["most"] for name, extra in _extras(kind) if extra.get("most") is not None}


def _extras(kind: type[msgspec.Struct]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the metadata from `rule` and `refused`, with the field's name."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.extra is not None:
                yield name, meta.extra


def up_to(row: str) -> ServerSchema:
    """Return the range from 0 to a row of the limits."""
    return lambda about: {"minimum": 0, "maximum": getattr(about.limits, row)}


def number(allowed: Range, *, high: float | None = None) -> Schema:
    low = "exclusiveMinimum" if allowed.open_low else "minimum"
    return {low: allowed.low, "maximum": allowed.high if high is None else min(high, allowed.high)}


def ranged(parameter: str, text: str | None = None) -> msgspec.Meta:
    """Describe a field with the range of a sampling parameter."""
    return rule(text, **number(RANGES[parameter]))


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def texts(most: int, least: int = 1) -> Schema:
    return {"type": "array", "minItems": least, "maxItems": most, "items": {"type": "string"}}


def token_ids(about: About) -> Schema:
    ids = {"type": "integer", "minimum": 0, "maximum": about.vocab_size - 1}
    return {"type": "array", "minItems": 1, "items": ids}


def one_prompt(about: About) -> Schema:
    return {"anyOf": [{"type": "string"}, token_ids(about)]}


def prompts(about: About) -> Schema:
    """Return the schema of one or several prompts, as texts or token ids."""
    most, ids = about.limits.prompts, token_ids(about)
    lists = {"type": "array", "minItems": 1, "maxItems": most, "items": ids}
    return {"anyOf": [{"type": "string"}, texts(most), ids, lists]}


def tagged(kind: str, *required: str) -> Schema:
    """Return the schema of an object whose `type` is `kind`, with required string fields."""
    given = {name: {"type": "string"} for name in required}
    return {"required": ["type", *required], "properties": {"type": {"const": kind}, **given}}


TEXT_PART: Schema = {"type": "object", **tagged("text", "text")}
TEXT_PARTS: Schema = {"type": "array", "items": TEXT_PART}
TEXT_OR_PARTS: Schema = {"anyOf": [{"type": ["string", "null"]}, TEXT_PARTS]}


# ---- components --------------------------------------------------------------------------------


def components(kinds: Iterable[type], about: About) -> dict[str, Schema]:
    """Return the schemas of request bodies and of all structs in them, by name."""
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
    """Yield the structs of bodies and all structs nested in them."""
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
    """Return a field's schema with its metadata applied."""
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
    """Return the schema with `anyOf` of plain types as a list of types.

    Readers and code generators handle the list better.
    """
    options = schema.get("anyOf", [])
    if not options or any(option.keys() != {"type"} for option in options):
        return schema
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    return {"type": [option["type"] for option in options], **rest}
