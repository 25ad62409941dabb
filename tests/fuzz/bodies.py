"""Malicious bodies, derived from the structs of the protocol.

A case is a path and the bytes of a body. `cases` gives a fixed sequence for a seed. It shuffles
every field of every endpoint with every odd value, and bodies that are malformed as a whole. Their
texts contain `SENTINEL`, so that an answer which repeats part of a body is detected.
"""

from __future__ import annotations

import base64
import copy
import functools
import json
import random
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import FieldInfo

from forge_serve.anthropic.requests import (
    Block,
    Choice,
    ContentBlock,
    MessagesRequest,
    OutputConfig,
    Source,
    Thinking,
    Tool,
    Turn,
)
from forge_serve.openai.content import ContentPart, FileContent
from forge_serve.openai.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from forge_serve.openai.requests import (
    ActivationsRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FunctionCall,
    GenerateRequest,
    GenerationRequest,
    Message,
    SteeringRequest,
    StreamOptions,
    TokenizeRequest,
    ToolCall,
)
from forge_serve.responses_api.compaction import CompactRequest
from forge_serve.responses_api.items import Item, Part
from forge_serve.responses_api.requests import Format, Reasoning, ResponsesRequest

SENTINEL = "zq7331"
ENCODED = base64.b64encode(SENTINEL.encode()).decode()
ENDPOINTS: dict[str, type[GenerationRequest]] = {
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": MessagesRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/responses/compact": CompactRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/score": ScoreRequest,
    "/v1/score": ScoreRequest,
    "/rerank": RerankRequest,
    "/v1/rerank": RerankRequest,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/generate": GenerateRequest,
    "/v1/generate": GenerateRequest,
    "/tokenize": TokenizeRequest,
    "/v1/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/detokenize": DetokenizeRequest,
}
VALID: dict[type, dict[str, Any]] = {
    CompletionRequest: {"prompt": f"the dog {SENTINEL}"},
    GenerateRequest: {"prompt": f"the dog {SENTINEL}"},
    ChatRequest: {
        "messages": [{"role": "user", "content": f"the dog {SENTINEL}"}],
        "tools": [{"type": "function", "function": {"name": "bark"}}],
    },
    TokenizeRequest: {"prompt": f"the dog {SENTINEL}"},
    DetokenizeRequest: {"tokens": [5, 6, 7]},
    EmbeddingRequest: {"input": f"the dog {SENTINEL}"},
    ScoreRequest: {"text_1": f"the dog {SENTINEL}", "text_2": ["a", "b"]},
    RerankRequest: {"query": f"the dog {SENTINEL}", "documents": ["a", "b"]},
    MessagesRequest: {
        "messages": [{"role": "user", "content": f"the dog {SENTINEL}"}],
        "tools": [{"name": "bark"}],
    },
    ResponsesRequest: {
        "input": [{"role": "user", "content": f"the dog {SENTINEL}"}],
        "tools": [{"type": "function", "name": "bark"}],
    },
    CompactRequest: {
        "model": "m",
        "input": [{"role": "user", "content": f"the dog {SENTINEL}"}],
    },
    Item: {"role": "user", "content": f"the dog {SENTINEL}"},
    Part: {"type": "input_text", "text": f"the dog {SENTINEL}"},
    Format: {},
    Reasoning: {"effort": "low"},
    Turn: {"role": "user", "content": f"the dog {SENTINEL}"},
    Block: {"type": "text", "text": f"the dog {SENTINEL}"},
    Tool: {"name": "bark"},
    Choice: {"type": "auto"},
    Thinking: {"type": "enabled"},
    OutputConfig: {},
    FunctionCall: {"name": "bark", "arguments": f'{{"at": "{SENTINEL}"}}'},
    ToolCall: {"function": {"name": "bark"}},
    Message: {"role": "user", "content": f"the dog {SENTINEL}"},
    ContentPart: {"type": "text", "text": f"the dog {SENTINEL}"},
    FileContent: {"filename": SENTINEL, "file_data": f"data:text/plain;base64,{ENCODED}"},
    ContentBlock: {"type": "text", "text": f"the dog {SENTINEL}"},
    Source: {"type": "base64", "data": ENCODED},
    StreamOptions: {"include_usage": True},
    SteeringRequest: {"name": "calm"},
    ActivationsRequest: {"names": ["layers.0.resid"]},
}
_DOCUMENT = {"type": "document", "source": {"type": "base64", "data": ENCODED}}
_INPUT_FILE = {"type": "input_file", "file_data": ENCODED}
# Other fields of an object that has a field of a file.
OF_FILES: dict[tuple[type, str], dict[str, Any]] = {
    (ContentPart, "file"): {"type": "file"},
    **{
        (kind, name): _DOCUMENT
        for kind in (ContentBlock, Block)
        for name in ("source", "title", "context", "citations")
    },
    **{(Part, name): _INPUT_FILE for name in ("filename", "file_data", "file_id", "file_url")},
}


@dataclass(frozen=True)
class Case:
    path: str
    body: bytes


class Raw(str):
    """Text, JSON or not, that is inserted verbatim."""


class Pairs(list):
    """An object that may have duplicate keys."""


def dump(value: Any) -> str:
    match value:
        case Raw():
            return value
        case Pairs():
            return "{" + ",".join(f"{dump(k)}:{dump(v)}" for k, v in value) + "}"
        case dict():
            return dump(Pairs(value.items()))
        case list():
            return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value)


def _nested(levels: int, opening: str, closing: str, inside: str = "") -> Raw:
    return Raw(opening * levels + inside + closing * levels)


TEXT = f'"{SENTINEL}"'
# Values that are right in some field, wrong in most, or never right.
ODD = [
    *map(Raw, "null true false 0 -0 1 -1 2 3 16 20 21 32 33 64 127 128 129 1025 4097".split()),
    *map(Raw, "2147483647 2147483648 4294967296 9007199254740993 18446744073709551616".split()),
    *map(Raw, "-2147483649 -9223372036854775809 0.5 -0.5 1.0 1.5 1e0 1E+2 1e-7 1e308".split()),
    *map(Raw, "1e309 1e400 -1e400 1e-400 NaN Infinity -Infinity nan 0x10 01 +1 .5 1. 1e".split()),
    Raw("9" * 400), Raw("9" * 4301), Raw("-" + "9" * 20_000), Raw("0." + "3" * 20_000),
    *map(Raw, ('""', '" "', '"0"', '"1"', '"1.5"', '"-1"', '"true"', '"null"', '"nan"', '"inf"')),
    *map(Raw, ('"1e999"', f'"{"9" * 5000}"', TEXT, f'"é日🙂{SENTINEL}"', f'"\\u0000{SENTINEL}"')),
    *map(Raw, (f'"\\ud800{SENTINEL}"', '"\\ud83d"', '"\\udc00\\ud800"', '"\\ud83d\\ude00"')),
    *map(Raw, ('"\\u12"', '"\\x41"', '"\t"', '"\n"', f'"{SENTINEL}', f"'{SENTINEL}'", SENTINEL)),
    Raw(f'"{SENTINEL * 60}"'), Raw(f'"{SENTINEL * 2000}"'),
    *map(Raw, ("[]", "{}", "[[]]", "[{}]", "[null]", "[true]", "[0]", "[1, 2]", "[-1]", "[1.5]")),
    *map(Raw, ("[99999999]", "[18446744073709551616]", f"[{TEXT}]", f"[{TEXT}, 1]", f"[[{TEXT}]]")),
    *map(Raw, ("[[1], [2]]", "[[1], []]", '[""]', '["a", "b", "c"]', "[1, null]")),
    Raw(f"[{', '.join(['1'] * 300)}]"), Raw(f"[{', '.join([TEXT] * 40)}]"),
    Raw(f"[{', '.join(['{}'] * 200)}]"),
    *map(Raw, (f'{{"a": {TEXT}}}', '{"1": 1}', '{"1": true}', '{"-1": 1}', '{"99999999": 1}')),
    *map(Raw, ('{"1": 1e400}', '{"1": 1, "1": 2}', '{"1": 200}', f"{{{TEXT}: 1}}", '{"": 1}')),
    *map(Raw, ('{"2147483647": 1}', '{"2147483648": 1}', '{"9999999999": 1}', '{"01": 1}')),
    *map(Raw, ('{"type": "text"}', '{"type": "json_object"}', '{"type": null}', "{1: 1}", "[1,]")),
    _nested(10, "[", "]"), _nested(63, "[", "]"), _nested(70, "[", "]"),
    _nested(40, '{"a":', "}", "1"),
    _nested(5000, "[", "]"), _nested(5000, '{"a":', "}", "1"), Raw("[" * 3000), Raw("]"), Raw(""),
]  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A field at any depth."""

    path: tuple[str | int, ...]
    hint: Any
    default: Any = None  # enclosing value, if the valid body has none


def places(kind: type[msgspec.Struct], before: tuple[str | int, ...] = ()) -> Iterator[Place]:
    """Yield every field of a struct, and of the structs in its fields."""
    for field in _fields(kind):
        path = (*before, field.encode_name)
        yield Place(path, field.type)
        for inner, in_list in _structs(field.type):
            yield from places(inner, (*path, 0) if in_list else path)


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> tuple[FieldInfo, ...]:
    """Return the struct's fields. Evaluating their annotations is slow."""
    return msgspec.structs.fields(kind)


def _structs(hint: Any, in_list: bool = False) -> Iterator[tuple[type[msgspec.Struct], bool]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint, in_list
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        yield from _structs(typing.get_args(hint)[0], in_list)
    if origin in (types.UnionType, typing.Union, list):
        for argument in typing.get_args(hint):
            yield from _structs(argument, origin is list)


def put(kind: type[msgspec.Struct], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """Return a valid body with one value replaced."""
    body = json.loads(json.dumps(VALID[kind]))
    here, inside = body, kind
    for i, step in enumerate(path[:-1]):
        if isinstance(step, int):
            here = here[0]
            continue
        here.update(copy.deepcopy(OF_FILES.get((inside, step), {})))
        hints = {field.encode_name: field.type for field in _fields(inside)}
        [(inside, in_list)] = _structs(hints[step])
        if not isinstance(here.get(step), list if in_list else dict):
            fresh = json.loads(json.dumps(VALID[inside]))
            here[step] = [fresh] if in_list else fresh
            if step == "stream_options":
                body["stream"] = True
        here = here[step]
        assert i < len(path)
    here.update(copy.deepcopy(OF_FILES.get((inside, path[-1]), {})))
    here[path[-1]] = value
    return body


def ordinary(hint: Any, rng: random.Random) -> Any:
    """Return a value of the field's type, which need not make sense."""
    options = (
        typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else ()
    )
    if options:
        return ordinary(rng.choice(options), rng)
    if typing.get_origin(hint) is typing.Annotated:
        return ordinary(typing.get_args(hint)[0], rng)
    if typing.get_origin(hint) is typing.Literal:
        return rng.choice(typing.get_args(hint))
    if typing.get_origin(hint) is list:
        [item] = typing.get_args(hint)
        return [ordinary(item, rng) for _ in range(rng.choice((0, 1, 1, 2, 3, 17)))]
    if typing.get_origin(hint) is dict:
        key, item = typing.get_args(hint)
        return {str(ordinary(key, rng)): ordinary(item, rng) for _ in range(rng.choice((0, 1, 3)))}
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return {
            field.encode_name: ordinary(field.type, rng)
            for field in _fields(hint)
            if rng.random() < 0.3 or field.encode_name in VALID[hint]
        }
    simple: dict[Any, Callable[[], Any]] = {
        type(None): lambda: None,
        bool: lambda: rng.random() < 0.5,
        int: lambda: rng.choice((0, 1, 1, 1, 2, 3, 5, 16, rng.randrange(300))),
        float: lambda: rng.choice((0, 1, 0.5, 1, 1.5, round(rng.uniform(-2, 2), 3))),
        str: lambda: rng.choice((SENTINEL, f"the {SENTINEL} ran", "a", "", "</s>", "é🙂" * 9)),
        Any: lambda: rng.choice(
            (None, [], {}, SENTINEL, 1, False, [{"type": SENTINEL}], {"a": [1]})
        ),
    }
    return simple[hint]()


def _several(kind: type[GenerationRequest], rng: random.Random) -> dict[str, Any]:
    """Return a valid body with several more fields, most of them with values of their type.

    Fields that are always refused are rare, so that many such bodies are served.
    """
    body = json.loads(json.dumps(VALID[kind]))
    fields = [
        field for field in _fields(kind) if field.name not in kind.refusals() or rng.random() < 0.05
    ]
    for field in rng.sample(fields, rng.choice((1, 2, 3, 5, 8))):
        odd = rng.random() < 0.05
        body[field.encode_name] = rng.choice(ODD) if odd else ordinary(field.type, rng)
    return body


def _mangled(body: bytes, rng: random.Random) -> bytes:
    """Return the body with its bytes modified."""
    at, to = sorted(rng.randrange(len(body) + 1) for _ in range(2))
    junk = rng.choice(
        (b"\x00", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\", b'"', b"{", b"}", b"[", b",",
         b":", b"\xc3", b"\\u", b"//", b"/**/", b"\x1f", b"1", b"-", b"e9", SENTINEL.encode())
    )  # fmt: skip
    return rng.choice(
        (
            lambda: body[:at],
            lambda: body[at:],
            lambda: body[:at] + junk + body[at:],
            lambda: body[:at] + junk + body[at + 1 :],
            lambda: body[:at] + body[to:],
            lambda: body[:to] + body[at:],
            lambda: junk + body,
            lambda: body + junk,
            lambda: body + body,
            lambda: bytes(b ^ (1 << rng.randrange(8)) if rng.random() < 0.01 else b for b in body),
            lambda: bytes(rng.randrange(256) for _ in range(rng.randrange(60))),
            lambda: body.decode(errors="replace").encode("utf-16"),
        )
    )()


def _doubled(body: dict[str, Any], rng: random.Random) -> Pairs:
    pairs = list(body.items())
    key, _ = rng.choice(pairs)
    return Pairs([*pairs, (key, rng.choice((*ODD, body[key])))])


def _odd_whole(path: str, rng: random.Random) -> Case:
    kind = ENDPOINTS[path]
    body: Any = _several(kind, rng)
    what = rng.random()
    if what < 0.1:
        body = _doubled(body, rng)
    elif what < 0.2:
        body[rng.choice((SENTINEL, "", "a" * 300, "__class__", "model_config"))] = rng.choice(ODD)
    elif what < 0.25:
        body = rng.choice(ODD)
    data = dump(body).encode("utf-8", "surrogatepass")
    return Case(path, _mangled(data, rng) if rng.random() < 0.3 else data)


def matrix() -> list[Case]:
    return [
        Case(path, dump(put(kind, place.path, odd)).encode("utf-8", "surrogatepass"))
        for path, kind in ENDPOINTS.items()
        for place in places(kind)
        for odd in ODD
    ]


def cases(seed: int, number: int) -> Iterator[Case]:
    """Yield this many cases; up to half of them are from the matrix."""
    rng = random.Random(seed)
    fixed = matrix()
    rng.shuffle(fixed)
    for i in range(number):
        if i % 2 and i // 2 < len(fixed):
            yield fixed[i // 2]
        else:
            yield _odd_whole(rng.choice(tuple(ENDPOINTS)), rng)
