"""What clients may send, as JSON schemas: the structs of `protocol`, narrowed by what is checked.

Types and names of fields come from the structs, ranges from `SamplingParams`, counts and lengths
from `Limits`, refused fields from the structs' own tables. What is written here is what checks in
code say of one value alone. What they say of several fields together is in `RULES`, in words.

The schemas give each value its plain form. That numbers and booleans may also be texts, and which
bytes are JSON at all, `validate` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from forge_jax.config import Pooling
from forge_jax.sampling_params import BIAS, RANGES, TOKEN_ID, Range
from forge_serve.anthropic import messages
from forge_serve.anthropic.messages import MessagesRequest
from forge_serve.limits import Limits
from forge_serve.openai import embeddings
from forge_serve.openai.embeddings import (
    SCORE_PAIRS,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from forge_serve.openai.loras import LoadLoraRequest
from forge_serve.openai.requests import (
    MAX_COUNT,
    MAX_TOKEN_ID,
    NEUTRAL,
    REFUSED_OF_MESSAGES,
    REQUEST_ID,
    TEMPLATE_VARIABLES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    GenerationRequest,
    Message,
    TokenizeRequest,
    ToolCall,
)
from forge_serve.openai.structured import FIELD_SCHEMAS, NOTHING
from forge_serve.openai.tools import CHOICE_SCHEMA, NAME_SCHEMA, TOOL_SCHEMA
from forge_serve.openai.validation import COUNTS
from forge_serve.responses_api import compaction as responses_compaction
from forge_serve.responses_api import items as responses_items
from forge_serve.responses_api import requests as responses_api
from forge_serve.responses_api.requests import ResponsesRequest

if TYPE_CHECKING:
    from forge_jax.engine.async_engine import AsyncEngine
    from forge_serve.config import ServerConfig

# Of /invocations: the fields that choose among its requests, first come first.
INVOKED: dict[type[GenerationRequest], frozenset[str]] = {
    ChatRequest: frozenset({"messages"}),
    CompletionRequest: frozenset({"prompt"}),
    RerankRequest: frozenset({"query"}),
    ScoreRequest: frozenset(name for pair in SCORE_PAIRS for name in pair),
    EmbeddingRequest: frozenset({"input"}),
}

REF = "#/components/schemas/{name}"

Schema = dict[str, Any]

OTHER_NAMES = dict.fromkeys(
    ("max_completion_tokens", "max_new_tokens", "max_output_tokens"), "max_tokens"
)
_MODULES = {
    kind.__module__
    for kind in (
        GenerationRequest,
        MessagesRequest,
        ResponsesRequest,
        responses_compaction.CompactRequest,
        responses_items.Item,
        PoolingRequest,
        LoadLoraRequest,
    )
}

# What a schema of single values cannot say. A body that the schema allows may be refused for these
# fields, and for no others.
RULES = {
    "allowed_token_ids": "ids that the model has logits for; something has to be left to come",
    "background": "excludes store: false; only where responses are kept",
    "bad_words": "a string may have 256 bytes, in UTF-8; something has to be left to come",
    "data_1": "one text, or as many as data_2; the texts of both are limited",
    "documents": "the texts of a request are limited",
    "input": "it has to fit the context; where the model is to answer, something has to be said; "
    "a function_call_output needs its function_call, there or in a response before it",
    "best_of": "equals n",
    "continue_final_message": "needs an assistant's message at the end, and excludes "
    "add_generation_prompt: true",
    "logprobs": "choices times tokens times alternatives are limited",
    "max_tokens": "prompt and output have to fit the context and the KV cache",
    "messages": "in the model's chat template they have to fit the context, and the template may "
    "refuse them",
    "min_tokens": "at most max_tokens",
    "n": "prompts times n are limited",
    "previous_response_id": "a response that is kept here, and has finished",
    "prompt_logprobs": "excludes stream: true",
    "prompt": "it has at least one token, and has to fit the context",
    "queries": "one text, or as many as the other field has; the texts of both are limited",
    "store": "true only where responses are kept",
    "text": "as response_format, which its format excludes",
    "text_1": "one text, or as many as text_2; the texts of both are limited",
    "stop": "a string may have 256 bytes, in UTF-8; it excludes stop_sequences",
    "logit_bias": "ids that the model has logits for",
    "stream_options": "only with stream: true",
    "tool_choice": "names one of the tools; demands none of an output in another form",
    "tools": "the model's chat template needs a place for them, and their schemas are limited in "
    "size and depth",
    "top_logprobs": "needs logprobs: true",
    "chat_template_kwargs": "limited in size; the template may refuse them",
    "response_format": "one field at most may demand a form, and it has to compile",
    **dict.fromkeys(
        FIELD_SCHEMAS.keys() - {"response_format"}, "as response_format: one of them at most"
    ),
}


@dataclass(frozen=True, kw_only=True)
class About:
    """What the schemas need to know of this very server."""

    model: str
    max_model_len: int
    vocab_size: int
    limits: Limits
    api_keys: bool
    max_new_tokens: int = MAX_COUNT  # of an output
    loras: bool = False  # whether there may be adapters: models besides, that come and go
    any_model: bool = False  # whether a request may name a model that is not served

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


def components(kinds: Iterable[type], about: About) -> dict[str, Schema]:
    """The schemas of request bodies, and of all that is in them, by name."""
    _, found = msgspec.json.schema_components(kinds, ref_template=REF)
    structs = {kind.__name__: kind for kind in _structs()}
    for name, schema in found.items():
        schema.pop("title", None)
        schema["description"] = schema.get("description", "").partition("\n")[0]
        kind = structs[name]
        for field, of in schema["properties"].items():
            of.pop("default", None)
            schema["properties"][field] = _plain(of)
        for narrow in (_generation, *_NARROWED.get(kind, ())):
            narrow(kind, schema, about)
    return found


def _structs(of: type = msgspec.Struct) -> Iterable[type[msgspec.Struct]]:
    """Every struct that a request may be made of."""
    for kind in of.__subclasses__():
        if kind.__module__ in _MODULES:
            yield kind
        yield from _structs(kind)


def _plain(schema: Schema) -> Schema:
    """`anyOf` of bare types as a list of types, which readers and generators know better."""
    options = schema.get("anyOf", [])
    if not options or any(option.keys() != {"type"} for option in options):
        return schema
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    return {"type": [option["type"] for option in options], **rest}


def number(allowed: Range, *, high: float | None = None) -> Schema:
    """The keywords of a range."""
    low = "exclusiveMinimum" if allowed.open_low else "minimum"
    return {low: allowed.low, "maximum": allowed.high if high is None else min(high, allowed.high)}


def _up_to(most: int) -> str:
    """A pattern of the whole numbers from 0 to `most`, which has several digits."""
    digits = str(most)
    found = ["0", f"[1-9][0-9]{{0,{len(digits) - 2}}}", digits]
    for i, digit in enumerate(digits):
        low = 1 if i == 0 else 0
        if int(digit) > low:
            rest = len(digits) - i - 1
            found.append(f"{digits[:i]}[{low}-{int(digit) - 1}][0-9]{{{rest}}}")
    return "|".join(found)


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _generation(kind: type, schema: Schema, about: About) -> None:  # noqa: C901
    """What all generating requests have in common."""
    if not issubclass(kind, GenerationRequest):
        return
    fields, limits = schema["properties"], about.limits
    for field, of in fields.items():
        name = OTHER_NAMES.get(field, field)
        if name in RANGES and of.get("type") in (["integer", "null"], ["number", "null"]):
            of |= number(RANGES[name])
    for name in GenerationRequest._REFUSED:
        fields[name] = {"description": "no effect"}
    for name, reason in kind._REFUSED.items():
        neutral = [*NOTHING["enum"], *([NEUTRAL[name]] if name in NEUTRAL else [])]
        fields[name] = {"enum": neutral, "description": f"refused: {reason}"}
    for name, of in FIELD_SCHEMAS.items():
        if name not in kind._REFUSED:
            fields[name] = dict(of)
    for counted, counts in COUNTS.items():
        for name, (_, row) in counts.items():
            if issubclass(kind, counted) and name not in kind._REFUSED:
                _at_most(fields[name], getattr(limits, row))
    named = {"enum": [about.model, None]}
    if about.loras or about.any_model:
        named = _nullable({"type": "string"})
    fields["model"] = named
    most = min(limits.n, limits.choices)
    fields["n"] |= {"maximum": most}
    fields["best_of"] |= {"minimum": 1, "maximum": most}
    fields["priority"] |= {"minimum": -(2**31), "maximum": 2**31 - 1}
    fields["timeout"] |= {"exclusiveMinimum": 0}
    fields["request_id"] |= {"pattern": f"^{REQUEST_ID.pattern}$"}
    fields["cache_salt"] |= {"minLength": 1, "maxLength": limits.cache_salt_chars}
    text = {"type": "string", "minLength": 1, "maxLength": limits.stop_string_bytes}
    texts = {"type": "array", "items": text, "maxItems": limits.stop_strings}
    fields["stop"] = _nullable({"anyOf": [text, texts]})
    ids = _array_of(fields["stop_token_ids"])
    ids["items"] = {"type": "integer", **number(TOKEN_ID)}
    ids = _array_of(fields["allowed_token_ids"])
    ids |= {"minItems": 1, "items": {"type": "integer", **number(TOKEN_ID)}}
    word = {"type": "string", "minLength": 1, "maxLength": limits.bad_word_bytes}
    _array_of(fields["bad_words"])["items"] = word
    cuts = not issubclass(kind, TokenizeRequest | DetokenizeRequest)
    most = about.max_model_len if cuts else MAX_COUNT
    fields["truncate_prompt_tokens"] |= {"minimum": -1, "maximum": most, "not": {"const": 0}}
    if issubclass(kind, GenerateRequest | MessagesRequest | ResponsesRequest):
        fields["prompt_logprobs"] = {"type": "null", "description": "refused: not supported here"}
    else:
        fields["prompt_logprobs"] |= number(RANGES["prompt_logprobs"], high=limits.logprobs)
    fields["logit_bias"] = _nullable(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^({_up_to(int(TOKEN_ID.high))})$"},
            "additionalProperties": {"type": "number", **number(BIAS)},
            "maxProperties": limits.logit_bias,
        }
    )
    if "logprobs" in fields and issubclass(kind, CompletionRequest):
        fields["logprobs"] |= {"maximum": limits.logprobs}
    if kind is CompletionRequest:  # elsewhere another name of it may win, or nothing is generated
        fields["max_tokens"] |= {"maximum": min(about.max_model_len, about.max_new_tokens)}
    for name, rule in RULES.items():
        if name in fields and name not in kind._REFUSED:
            said = fields[name].get("description")
            fields[name] = {**fields[name], "description": f"{said}; {rule}" if said else rule}


def _at_most(schema: Schema, most: int) -> None:
    """Limits the arrays or objects that a field may have."""
    for option in schema.get("anyOf", [schema]):
        if option.get("type") == "array":
            option["maxItems"] = most


def _array_of(schema: Schema) -> Schema:
    """The array among what a field may be."""
    return next(o for o in schema.get("anyOf", [schema]) if o.get("type") == "array")


def _ids(about: About) -> Schema:
    most = about.vocab_size - 1
    ids = {"type": "integer", "minimum": 0, "maximum": most}
    return {"type": "array", "minItems": 1, "items": ids}


def _texts(most: int) -> Schema:
    return {"type": "array", "minItems": 1, "maxItems": most, "items": {"type": "string"}}


def _prompts(about: About) -> Schema:
    """One or several, as texts or as token ids."""
    most = about.limits.prompts
    lists = {"type": "array", "minItems": 1, "maxItems": most, "items": _ids(about)}
    return {"anyOf": [{"type": "string"}, _texts(most), _ids(about), lists]}


def _completion(kind: type, schema: Schema, about: About) -> None:
    _replace(schema, "prompt", _prompts(about))


def _generate(kind: type, schema: Schema, about: About) -> None:
    _replace(schema, "prompt", {"anyOf": [{"type": "string"}, _ids(about)]})
    schema["properties"]["n"]["maximum"] = 1
    schema["properties"]["best_of"]["maximum"] = 1


def _chat(kind: type, schema: Schema, about: About) -> None:
    fields = schema["properties"]
    fields["messages"]["minItems"] = 1
    fields["top_logprobs"] |= {"minimum": 0, "maximum": about.limits.logprobs}
    fields["modalities"] = {"enum": [None, [], ["text"]]}
    fields["chat_template_kwargs"]["propertyNames"] = {"not": {"enum": sorted(TEMPLATE_VARIABLES)}}
    _array_of(fields["tools"])["items"] = TOOL_SCHEMA
    _replace(schema, "tool_choice", dict(CHOICE_SCHEMA))


def _tokenize(kind: type, schema: Schema, about: About) -> None:
    fields = schema["properties"]
    del fields["messages"]["minItems"]
    _array_of(fields["prompt"]).update(minItems=1, maxItems=about.limits.prompts)
    given, some, none = {"not": {"type": "null"}}, {"minItems": 1}, {"maxItems": 0}
    schema["oneOf"] = [
        {"required": ["prompt"], "properties": {"prompt": given, "messages": none}},
        {"required": ["messages"], "properties": {"prompt": {"type": "null"}, "messages": some}},
    ]


def _detokenize(kind: type, schema: Schema, about: About) -> None:
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}}
    lists = {"type": "array", "items": ids, "maxItems": about.limits.prompts}
    _replace(schema, "tokens", {"anyOf": [ids, lists]})


_TEXT_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_TEXT_PARTS: Schema = {"type": "array", "items": _TEXT_PART}


def _message(kind: type, schema: Schema, about: About) -> None:
    schema["properties"]["content"] = {"anyOf": [{"type": ["string", "null"]}, _TEXT_PARTS]}
    for name, reason in REFUSED_OF_MESSAGES.items():
        schema["properties"][name] = {**NOTHING, "description": f"refused: {reason}"}
    calls = _array_of(schema["properties"]["tool_calls"])
    calls["maxItems"] = about.limits.tools
    content = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
    schema["anyOf"] = [{"properties": {"role": {"const": "assistant"}}}, content]


def _tool_call(kind: type, schema: Schema, about: About) -> None:
    schema["properties"]["type"] = {"enum": ["function", None]}


def _messages(kind: type, schema: Schema, about: About) -> None:
    fields, limits = schema["properties"], about.limits
    fields["n"]["maximum"] = fields["best_of"]["maximum"] = 1
    fields["messages"] |= {"minItems": 1, "maxItems": limits.messages}
    stops = next(o for o in fields["stop"]["anyOf"][0]["anyOf"] if o["type"] == "array")
    _replace(schema, "stop_sequences", _nullable(stops))
    fields["system"] = {"anyOf": [{"type": ["string", "null"]}, _TEXT_PARTS]}
    _array_of(fields["tools"])["maxItems"] = limits.tools
    names = {"not": {"enum": sorted(TEMPLATE_VARIABLES)}}
    fields["chat_template_kwargs"]["propertyNames"] = names
    options = [*FIELD_SCHEMAS["response_format"]["anyOf"][1:], {"enum": [None, {}]}]
    fields["output_format"] = {"anyOf": options}


def _turn(kind: type, schema: Schema, about: About) -> None:
    """Which blocks a role may have; those of the others are refused."""
    nothing = {"type": "object", "additionalProperties": NOTHING}
    schema["properties"]["output_config"] = _nullable(nothing)
    schema["anyOf"] = [
        {
            "properties": {
                "role": {"const": role},
                "content": {"anyOf": [{"type": "string"}, {"items": {"anyOf": blocks}}]},
            }
        }
        for role, blocks in (
            ("user", [_block("text", "text"), _tool_result()]),
            (
                "assistant",
                [
                    _block("text", "text"),
                    _block("thinking"),
                    _block("redacted_thinking"),
                    _block("tool_use", "name"),
                ],
            ),
            ("system", [_block("text", "text")]),
        )
    ]


def _block(kind: str, *needs: str) -> Schema:
    given = {name: {"type": "string"} for name in needs}
    return {"required": ["type", *needs], "properties": {"type": {"const": kind}, **given}}


def _tool_result() -> Schema:
    block = _block("tool_result", "tool_use_id")
    block["properties"]["content"] = {"anyOf": [{"type": ["string", "null"]}, _TEXT_PARTS]}
    return block


def _tool(kind: type, schema: Schema, about: About) -> None:
    schema["properties"]["type"] = {"enum": ["custom", None]}
    schema["properties"]["name"] = NAME_SCHEMA
    callers = {"anyOf": [{"contains": {"const": "direct"}}, {"maxItems": 0}]}
    fields = schema["properties"]
    fields["allowed_callers"] = _nullable({"type": "array", "items": {"type": "string"}, **callers})


def _output_config(kind: type, schema: Schema, about: About) -> None:
    _format(kind, schema, about)
    schema["properties"]["task_budget"] = NOTHING


def _choice(kind: type, schema: Schema, about: About) -> None:
    schema["anyOf"] = [
        {"properties": {"type": {"enum": ["auto", "any", "none"]}}},
        {"required": ["name"], "properties": {"name": {"type": "string"}}},
    ]


def _responses(kind: type, schema: Schema, about: About) -> None:
    fields, limits = schema["properties"], about.limits
    fields["n"]["maximum"] = fields["best_of"]["maximum"] = 1
    something = {"not": {"enum": [None, []]}}
    schema["anyOf"] = [
        {"required": ["input"], "properties": {"input": something}},
        {
            "required": ["previous_response_id"],
            "properties": {"previous_response_id": {"type": "string"}},
        },
    ]
    fields["top_logprobs"] |= {"minimum": 0, "maximum": limits.logprobs}
    fields["max_tool_calls"] |= {"minimum": 0, "maximum": MAX_COUNT}
    names = sorted(responses_api.INCLUDABLE)
    fields["include"] = _nullable({"type": "array", "items": {"enum": names}})
    fields["truncation"] = {"enum": ["disabled", None]}
    fields["metadata"] = _nullable(
        {
            "type": "object",
            "maxProperties": responses_api.MAX_METADATA,
            "propertyNames": {"maxLength": responses_api.MAX_METADATA_KEY},
            "additionalProperties": {
                "type": "string",
                "maxLength": responses_api.MAX_METADATA_VALUE,
            },
        }
    )
    tools = _array_of(fields["tools"])
    tools |= {"maxItems": limits.tools, "items": _flat(TOOL_SCHEMA)}
    named = {"type": "array", "items": _flat(_FUNCTION_NAME)}
    allowed = {
        "type": "object",
        "required": ["type", "mode", "tools"],
        "properties": {
            "type": {"const": "allowed_tools"},
            "mode": {"enum": ["auto", "required"]},
            "tools": named,
        },
    }
    modes = CHOICE_SCHEMA["anyOf"][0]
    _replace(schema, "tool_choice", {"anyOf": [modes, _flat(_FUNCTION_NAME), allowed]})
    reserved = {"not": {"enum": sorted(TEMPLATE_VARIABLES)}}
    fields["chat_template_kwargs"]["propertyNames"] = reserved


_FUNCTION_NAME = CHOICE_SCHEMA["anyOf"][1]


def _flat(schema: Schema) -> Schema:
    """Of a function in a chat: the same with what is in `function` beside the type."""
    function = schema["properties"]["function"]
    return {
        "type": "object",
        "required": ["type", *function["required"]],
        "properties": {"type": schema["properties"]["type"], **function["properties"]},
    }


def _format(kind: type, schema: Schema, about: About) -> None:
    options = [*FIELD_SCHEMAS["response_format"]["anyOf"][1:], {"enum": [None, {}]}]
    schema["properties"]["format"] = {"anyOf": options}


def _reasoning(kind: type, schema: Schema, about: About) -> None:
    for name in ("summary", "generate_summary"):
        schema["properties"][name] = {"enum": ["auto", None]}


def _item(kind: type, schema: Schema, about: About) -> None:
    """Which fields an item of a type needs."""
    texts = responses_items.TEXTS
    roles = {"enum": list(responses_items.ROLES)}
    content = {"content": _parts(*texts, "refusal")}
    text = {"type": "string"}
    schema["anyOf"] = [
        {
            "required": ["role", "content"],
            "properties": {"type": {"enum": ["message", None]}, "role": roles, **content},
        },
        {
            "required": ["type", "call_id", "name", "arguments"],
            "properties": {
                "type": {"const": "function_call"},
                **dict.fromkeys(("call_id", "name", "arguments"), text),
            },
        },
        {
            "required": ["type", "call_id", "output"],
            "properties": {
                "type": {"const": "function_call_output"},
                "call_id": text,
                "output": _parts(*texts),
            },
        },
        {
            "required": ["type", "encrypted_content"],
            "properties": {
                "type": {"const": "compaction"},
                "encrypted_content": {
                    "type": "string",
                    "pattern": "^forge-jax-1\\.",
                    "description": "as /v1/responses/compact of this server made it",
                },
            },
        },
        {
            "required": ["type"],
            "properties": {
                "type": {"const": "reasoning"},
                "content": _nullable(_parts("reasoning_text", *texts)),
                "summary": _nullable({"type": "array", "items": _part("summary_text")}),
            },
        },
    ]


def _parts(*types: str) -> Schema:
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": _part(*types)}]}


def _part(*types: str) -> Schema:
    """A part of one of the types, with the text that it needs."""
    texts = [name for name in types if name != "refusal"]
    text, refusal = _block("", "text"), _block("refusal", "refusal")
    text["properties"]["type"] = {"enum": texts}
    return {"anyOf": [text, refusal]} if len(texts) < len(types) else text


def _pooling(kind: type, schema: Schema, about: About) -> None:
    schema["properties"]["pooling"] = {"enum": [*get_args(Pooling), None]}


def _embedding(kind: type, schema: Schema, about: About) -> None:
    _replace(schema, "input", _prompts(about))
    fields = schema["properties"]
    for name, values in embeddings.FORMS.items():
        fields[name] = {"enum": [*values, None]}


def _score(kind: type, schema: Schema, about: About) -> None:
    """Two fields, and no other than these."""
    names = {name: None for pair in SCORE_PAIRS for name in pair}
    most = about.limits.prompts - 1
    for name in names:
        _replace(schema, name, {"anyOf": [{"type": ["string", "null"]}, _texts(most)]})
    given, null = {"not": {"type": "null"}}, {"type": "null"}
    schema["oneOf"] = [
        {
            "required": list(pair),
            "properties": {name: given if name in pair else null for name in names},
        }
        for pair in SCORE_PAIRS
    ]


def _compact(kind: type, schema: Schema, about: About) -> None:
    fields = schema["properties"]
    fields["model"] = about.model_names if not about.any_model else {"type": "string"}
    schema["required"] = [*schema.get("required", ()), "model"]
    for name in ("stream", "background"):
        _replace(schema, name, {"enum": [False, None]})


def _message_of_socket(kind: type, schema: Schema, about: About) -> None:
    fields = schema["properties"]
    fields["type"] = {"const": responses_api.MESSAGE_TYPE}
    schema["required"] = [*schema.get("required", ()), "type"]
    _replace(schema, "stream", {"enum": [True, None]})
    _replace(schema, "background", {"enum": [False, None]})
    fields["stream_id"] = _nullable({"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,256}$"})


def _rerank(kind: type, schema: Schema, about: About) -> None:
    _replace(schema, "documents", _texts(about.limits.prompts - 1))
    schema["properties"]["top_n"] |= {"minimum": 0, "maximum": MAX_COUNT}


def _replace(schema: Schema, field: str, by: Schema) -> None:
    """Another schema for a field, with the description that it had."""
    said = schema["properties"][field].get("description")
    schema["properties"][field] = {**by, "description": said} if said else by


_Narrow = Callable[[type, Schema, About], None]
_NARROWED: dict[type, tuple[_Narrow, ...]] = {
    CompletionRequest: (_completion,),
    GenerateRequest: (_generate,),
    ChatRequest: (_chat,),
    TokenizeRequest: (_chat, _tokenize),
    DetokenizeRequest: (_detokenize,),
    Message: (_message,),
    ToolCall: (_tool_call,),
    MessagesRequest: (_messages,),
    messages.Turn: (_turn,),
    messages.Tool: (_tool,),
    messages.Choice: (_choice,),
    messages.OutputConfig: (_output_config,),
    ResponsesRequest: (_responses,),
    responses_compaction.CompactRequest: (_responses, _compact),
    responses_api.ResponseCreate: (_responses, _message_of_socket),
    responses_api.Format: (_format,),
    responses_api.Reasoning: (_reasoning,),
    responses_items.Item: (_item,),
    embeddings.EmbeddingRequest: (_pooling, _embedding),
    embeddings.ScoreRequest: (_pooling, _score),
    embeddings.RerankRequest: (_pooling, _rerank),
}
