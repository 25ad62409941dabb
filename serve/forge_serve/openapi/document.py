"""`/openapi.json`: what this server accepts and answers, as OpenAPI 3.1.

The paths and methods are the application's own routes. A route's handler is one line of
`OPERATIONS`, which says what the router does not know; a handler without a line, or the other way
around, is a test that fails. Bodies are `request_schemas`, answers are `answers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from aiohttp import hdrs, web

from forge_jax import __version__
from forge_serve.anthropic import requests as messages
from forge_serve.anthropic.requests import MessagesRequest
from forge_serve.http.auth import API_KEY_HEADER, OPEN_PATHS
from forge_serve.limits import rows
from forge_serve.openai.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from forge_serve.openai.invocations import INVOKED
from forge_serve.openai.loras import LoadLoraRequest, UnloadLoraRequest
from forge_serve.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from forge_serve.openapi import response_schemas as answers
from forge_serve.openapi.request_schemas import REF, About, Schema, components
from forge_serve.responses_api.compaction import CompactRequest
from forge_serve.responses_api.endpoints import DEFAULT_PAGE, MAX_PAGE
from forge_serve.responses_api.requests import ResponseCreate, ResponsesRequest
from forge_serve.telemetry.metrics import CONTENT_TYPE as METRICS_TYPE

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"

DEFECT = (500,)
NOT_READY = (503, *DEFECT)
READS = (400, 404, 408, 413, 415, *NOT_READY)  # a body
GENERATES = (*READS, 504)

STATUSES = {
    400: "The body is not what its schema says, or asks for more than the server allows.",
    401: "No API key, or an unknown one.",
    403: "A browser sent it for another site, or to a host name that is not the server's.",
    404: "The server has no such model, adapter or response, or takes no profiles.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body has a content coding other than gzip and deflate.",
    426: "The request does not open a WebSocket.",
    500: "The model or its grammar failed for this request, or a defect, which the log has.",
    503: "Starting, stopping, overloaded, or the engine failed.",
    504: "It took longer than the request, or the server, allows.",
}
HEADERS = {  # by status; 0: all
    0: {
        "X-Request-Id": ({"type": "string"}, "the request's own, or a new one", True),
        "Server": ({"const": "forge-jax"}, "", True),
    },
    401: {"WWW-Authenticate": ({"const": "Bearer"}, "", True)},
    415: {"Accept-Encoding": ({"const": "gzip, deflate"}, "", True)},
    426: {"Upgrade": ({"const": "websocket"}, "", True)},
    503: {"Retry-After": ({"type": "string", "pattern": "^[0-9]+$"}, "in seconds", False)},
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """Of the path or the query; those of a path are required."""

    name: str
    place: Literal["path", "query"]
    schema: Schema | None  # None: the model's name
    description: str = ""


MODEL_NAME = Parameter("name", "path", None)
RESPONSE_ID = Parameter("id", "path", {"type": "string", "pattern": "^resp_[0-9a-f]{48}$"})
_WHOLE: Schema = {"type": "integer", "minimum": 0, "maximum": 10**9 - 1}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What a handler does, beside its paths and methods.

    Attributes:
      request: the struct of its body; None: it reads none.
      message: the struct of a message of the WebSocket that it opens; None: it opens none.
      message_example: such a message.
      or_requests: the structs of other bodies that it takes.
      chosen_by: the fields that choose among these structs, the first that has one; None: any may
        be meant.
      example: such a body; a model in it stands for the one that is served.
      answer: the type of its JSON; None: it answers with `content_type`; None as well: nothing.
      events: the type of an event of its stream, if it has one.
      errors: the statuses of its errors, beside 401 and 403.
      also: other statuses that come with `answer`.
      parameters: of its path and query.
    """

    summary: str
    request: type | None = None
    message: type | None = None
    message_example: dict[str, Any] | None = None
    or_requests: tuple[type, ...] = ()
    chosen_by: Mapping[type, frozenset[str]] | None = None
    example: dict[str, Any] | None = None
    answer: Any = None
    events: Any = None
    content_type: str | None = JSON
    errors: tuple[int, ...] = DEFECT
    also: tuple[int, ...] = ()
    parameters: tuple[Parameter, ...] = ()


_USER = {"role": "user", "content": "Tell me a story."}
OPERATIONS = {
    "completions": Operation(
        summary="Continue a prompt",
        request=CompletionRequest,
        example={"prompt": "Once upon a time", "max_tokens": 8},
        answer=answers.CompletionAnswer,
        events=answers.CompletionEvent,
        errors=GENERATES,
    ),
    "chat_completions": Operation(
        summary="Continue a conversation",
        request=ChatRequest,
        example={"messages": [_USER], "max_tokens": 8},
        answer=answers.ChatAnswer,
        events=answers.ChatEvent,
        errors=GENERATES,
    ),
    "messages": Operation(
        summary="Continue a conversation, in Anthropic's protocol",
        request=MessagesRequest,
        example={"messages": [_USER], "max_tokens": 8},
        answer=answers.MessagesAnswer,
        events=answers.MessagesEvent,
        errors=GENERATES,
    ),
    "count_tokens": Operation(
        summary="Count the tokens of a prompt, in Anthropic's protocol",
        request=MessagesRequest,
        example={"messages": [_USER], "max_tokens": 8},
        answer=answers.CountAnswer,
        errors=READS,
    ),
    "responses": Operation(
        summary="Continue a conversation, in OpenAI's newer protocol",
        request=ResponsesRequest,
        example={"input": "Tell me a story.", "max_output_tokens": 8},
        answer=answers.ResponseAnswer,
        events=answers.ResponseEvent,
        errors=GENERATES,
    ),
    "responses_socket": Operation(
        summary="Continue conversations over a WebSocket, in OpenAI's newer protocol",
        content_type=None,
        message=ResponseCreate,
        message_example={
            "type": "response.create",
            "input": "Tell me a story.",
            "max_output_tokens": 8,
        },
        events=answers.ResponseEvent,
        errors=(426, *NOT_READY),
    ),
    "compact_response": Operation(
        summary="Summarize a conversation as one item",
        request=CompactRequest,
        example={"model": "", "input": "Tell me a story.", "max_output_tokens": 64},
        answer=answers.CompactedResponse,
        errors=GENERATES,
    ),
    "count_input_tokens": Operation(
        summary="Count the tokens of a response's prompt",
        request=ResponsesRequest,
        example={"input": "Tell me a story.", "max_output_tokens": 8},
        answer=answers.InputTokens,
        errors=READS,
    ),
    "response": Operation(
        summary="A response that is kept, or its events",
        answer=answers.ResponseAnswer,
        events=answers.ResponseEvent,
        errors=(400, 404, *DEFECT),
        parameters=(
            RESPONSE_ID,
            Parameter(
                "stream",
                "query",
                {"type": "string"},
                "true or 1: the events of a response made with background and stream",
            ),
            Parameter("starting_after", "query", _WHOLE, "the events after that number"),
        ),
    ),
    "delete_response": Operation(
        summary="Forget a response",
        answer=answers.DeletedResponse,
        errors=(404, *DEFECT),
        parameters=(RESPONSE_ID,),
    ),
    "cancel_response": Operation(
        summary="End a response in the background",
        answer=answers.ResponseAnswer,
        errors=(400, 404, *DEFECT),
        parameters=(RESPONSE_ID,),
    ),
    "input_items": Operation(
        summary="The items that a response was made from",
        answer=answers.InputItems,
        errors=(400, 404, *DEFECT),
        parameters=(
            RESPONSE_ID,
            Parameter("order", "query", {"enum": ["asc", "desc"], "default": "desc"}),
            Parameter(
                "limit",
                "query",
                {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE},
            ),
            Parameter("after", "query", {"type": "string"}, "the id of one of the items"),
        ),
    ),
    "embeddings": Operation(
        summary="Texts as vectors",
        request=EmbeddingRequest,
        example={"input": ["a dog", "a cat"]},
        answer=answers.EmbeddingAnswer,
        errors=GENERATES,
    ),
    "score": Operation(
        summary="How similar texts are",
        request=ScoreRequest,
        example={"text_1": "a dog", "text_2": ["a cat", "a stone"]},
        answer=answers.ScoreAnswer,
        errors=GENERATES,
    ),
    "rerank": Operation(
        summary="Documents by their similarity to a query",
        request=RerankRequest,
        example={"query": "a dog", "documents": ["a stone", "a cat"]},
        answer=answers.RerankAnswer,
        errors=GENERATES,
    ),
    "generate": Operation(
        summary="Continue one prompt",
        request=GenerateRequest,
        example={"prompt": "Once upon a time", "max_new_tokens": 8},
        answer=answers.GenerateAnswer,
        events=answers.GenerateEvent,
        errors=GENERATES,
    ),
    "tokenize": Operation(
        summary="The tokens of a text or a chat",
        request=TokenizeRequest,
        example={"prompt": "Once upon a time"},
        answer=answers.TokenizeAnswer,
        errors=READS,
    ),
    "detokenize": Operation(
        summary="The text of tokens",
        request=DetokenizeRequest,
        example={"tokens": [5, 6, 7]},
        answer=answers.DetokenizeAnswer,
        errors=READS,
    ),
    "tokenizer_info": Operation(
        summary="Special tokens and the chat template",
        answer=answers.TokenizerInfo,
        errors=(400, *NOT_READY),
    ),
    "models": Operation(summary="The models", answer=answers.Models, errors=NOT_READY),
    "model": Operation(
        summary="One model",
        answer=answers.ModelCard,
        errors=(404, *NOT_READY),
        parameters=(MODEL_NAME,),
    ),
    "load_lora_adapter": Operation(
        summary="Load a LoRA adapter, from the folder that --lora-folder names",
        request=LoadLoraRequest,
        example={"lora_name": "my-adapter", "lora_path": "my-adapter"},
        content_type=TEXT,
        errors=READS,
    ),
    "unload_lora_adapter": Operation(
        summary="Unload a LoRA adapter that no request takes",
        request=UnloadLoraRequest,
        example={"lora_name": "my-adapter"},
        content_type=TEXT,
        errors=READS,
    ),
    "version": Operation(summary="The version of forge-jax", answer=answers.Version),
    "server_info": Operation(
        summary="What the server can hold and does", answer=answers.ServerInfo, errors=NOT_READY
    ),
    "model_info": Operation(
        summary="What the model is", answer=answers.ModelInfo, errors=NOT_READY
    ),
    "loads": Operation(summary="How much there is to do", answer=answers.Loads, errors=NOT_READY),
    "invocations": Operation(
        summary="A chat, completion, embedding, ranking or score, whichever the body is",
        request=ChatRequest,
        or_requests=tuple(INVOKED)[1:],  # in the order in which they are looked for
        chosen_by=INVOKED,
        example={"messages": [_USER], "max_tokens": 8},
        answer=dict[str, Any],
        events=dict[str, Any],
        errors=GENERATES,
    ),
    "ollama_tags": Operation(
        summary="The models, in Ollama's words", answer=answers.OllamaTags, errors=NOT_READY
    ),
    "ollama_version": Operation(summary="The version of forge-jax", answer=answers.Version),
    "ping": Operation(summary="Whether requests are served", content_type=None, also=(503,)),
    "load": Operation(
        summary="How many samples run or wait", answer=answers.Load, errors=NOT_READY
    ),
    "health": Operation(summary="Whether requests are served", answer=answers.Health, also=(503,)),
    "detailed_health": Operation(
        summary="The same with the size of the queue", answer=answers.DetailedHealth, also=(503,)
    ),
    "stats": Operation(summary="The engine's counters", answer="EngineStats", errors=NOT_READY),
    "engine_state": Operation(
        summary="The sequences, the KV blocks and the last steps of the engine",
        answer=answers.EngineStateAnswer,
        errors=(400, *NOT_READY),
        parameters=(Parameter("after_step", "query", _WHOLE, "only the steps after that one"),),
    ),
    "metrics": Operation(summary="Prometheus metrics", content_type=METRICS_TYPE),
    "start_profile": Operation(
        summary="Begin a profile", answer=answers.Profile, errors=(400, 404, *NOT_READY)
    ),
    "stop_profile": Operation(
        summary="End the profile and write it",
        answer=answers.Profile,
        errors=(400, 404, *NOT_READY),
    ),
    "page": Operation(summary="The page: a chat and the live engine", content_type="text/html"),
    "page_style": Operation(summary="A style sheet of the page", content_type="text/css"),
    "page_script": Operation(summary="A script of the page", content_type="text/javascript"),
    "page_icon": Operation(summary="The page's icon", content_type="image/svg+xml"),
    "openapi": Operation(summary="This document", answer=dict[str, Any], errors=NOT_READY),
}


def document(router: web.UrlDispatcher, about: About) -> dict[str, Any]:
    """The document of an application with these routes.

    Raises:
      KeyError: a route's handler has no line in `OPERATIONS`.
    """
    answer_schemas, schemas = _schemas(about)
    paths: dict[str, dict[str, Any]] = {}
    for path, method, name in routes(router):
        operation = OPERATIONS[name]
        described = _described(path, method, operation, answer_schemas, about)
        paths.setdefault(path, {})[method.lower()] = described
    security = {"security": [{"bearer": []}, {"key": []}]} if about.api_keys else {}
    schemes = _SCHEMES if about.api_keys else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "forge-jax",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": _DESCRIPTION,
            "x-model": {"id": about.model, "max_model_len": about.max_model_len},
            "x-limits": {
                row.name: {"at_most": getattr(about.limits, row.name), "of": row.doc}
                for row in rows()
            },
        },
        **security,
        "paths": paths,
        "components": {"schemas": schemas, **({"securitySchemes": schemes} if schemes else {})},
    }


_DESCRIPTION = """\
Fields that a schema does not name are ignored. Numbers and booleans may also be written as texts, \
and booleans as 0 and 1. No key may stand twice in an object. A field whose schema has a \
description may also be refused for what that says."""
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": API_KEY_HEADER},
}


def routes(router: web.UrlDispatcher) -> Iterable[tuple[str, str, str]]:
    """The path, the method and the handler's name of each route."""
    for route in router.routes():
        assert route.resource is not None
        yield route.resource.canonical, route.method, route.handler.__name__


def _schemas(about: About) -> tuple[dict[str, Schema], dict[str, Schema]]:
    """The schema of each operation's answers and events, by name, and all that they refer to."""
    types: dict[str, Any] = {
        "error": answers.ErrorAnswer,
        "m-error": answers.MessagesErrorAnswer,
        "socket error": answers.SocketError,
    }
    for name, operation in OPERATIONS.items():
        if operation.answer is not None:
            types[name] = _stats_answer() if operation.answer == "EngineStats" else operation.answer
        if operation.events is not None:
            types[f"{name} events"] = operation.events
    found, schemas = msgspec.json.schema_components(list(types.values()), ref_template=REF)
    for schema in schemas.values():
        schema.pop("title", None)
        for of in schema.get("properties", {}).values():
            of.pop("default", None)
        schema["description"] = schema.get("description", "").partition("\n")[0]
    kinds = {kind for o in OPERATIONS.values() for kind in (o.request, o.message) if kind}
    bodies = components(sorted(kinds, key=lambda kind: kind.__name__), about)
    twice = schemas.keys() & bodies.keys()
    assert not twice, f"schemas of bodies and answers have the same name: {twice}"
    return dict(zip(types, found, strict=True)), {**bodies, **schemas}


def _stats_answer() -> type:
    """The engine's counters, with what `/stats` adds."""
    from forge_jax.engine.async_engine import EngineStats  # which imports more than a --help needs

    @dataclass(frozen=True, kw_only=True)
    class StatsAnswer(EngineStats):
        """The engine's counters; some of them also under the names of other servers."""

        model: str
        running: int
        page_size: int
        average_batch_size: float  # sequences in a step
        max_batch_size: int

    return StatsAnswer


def _described(
    path: str, method: str, operation: Operation, schemas: Mapping[str, Schema], about: About
) -> dict[str, Any]:
    name = next(name for name, known in OPERATIONS.items() if known is operation)
    content = {}
    if operation.answer is not None:
        content[JSON] = {"schema": schemas[name]}
    elif operation.content_type is not None:
        content[operation.content_type.partition(";")[0]] = {"schema": {"type": "string"}}
    error = schemas["m-error" if path.startswith(messages.PATH) else "error"]
    both, said = dict(content), "What was asked for."
    if operation.message is None and operation.events is not None:
        both[EVENTS] = {"x-event-schema": {"anyOf": [schemas[f"{name} events"], error]}}
        said += " The data of each event of a stream is of x-event-schema, but for a last [DONE]."
    if operation.message is None:
        answered = {200: _response(200, said, both, method)}
    else:
        answered = {101: _response(101, "The WebSocket is open.", {}, method)}
    for status in operation.also:
        answered[status] = _response(status, STATUSES[status], content, method)
    closed = about.api_keys and path not in OPEN_PATHS
    refusals = (401,) if closed else () if about.api_keys else (403,)
    for status in sorted({*operation.errors, *refusals}):
        content = {JSON: {"schema": error}}
        answered[status] = _response(status, STATUSES[status], content, method)
    described: dict[str, Any] = {
        "operationId": f"{method.lower()}{path.replace('/', '_').replace('.', '_')}".replace(
            "{", ""
        ).replace("}", ""),
        "summary": operation.summary,
        "responses": {str(status): response for status, response in answered.items()},
    }
    if operation.request is not None:
        kinds = (operation.request, *operation.or_requests)
        refs: list[Schema] = [{"$ref": REF.format(name=kind.__name__)} for kind in kinds]
        if operation.chosen_by is not None:
            refs = _apart(refs, [operation.chosen_by[kind] for kind in kinds])
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        body = {"schema": schema, "examples": _examples(operation, about)}
        described["requestBody"] = {"required": True, "content": {JSON: body}}
    if operation.message is not None:
        described["x-websocket"] = {
            "messages": {"$ref": REF.format(name=operation.message.__name__)},
            "example": operation.message_example,
            "events": {"anyOf": [schemas[f"{name} events"], schemas["socket error"]]},
        }
    if operation.parameters:
        described["parameters"] = [
            _parameter(parameter, about) for parameter in operation.parameters
        ]
    if about.api_keys and path in OPEN_PATHS:
        described["security"] = []
    return described


def _apart(refs: Sequence[Schema], fields: Sequence[Iterable[str]]) -> list[Schema]:
    """Each schema for bodies without the fields of those before it."""
    apart, before = [], []
    for ref, names in zip(refs, fields, strict=True):
        unless = [{"required": [name]} for name in before]
        apart.append({"allOf": [ref, {"not": {"anyOf": unless}}]} if unless else ref)
        before += sorted(names)
    return apart


def _examples(operation: Operation, about: About) -> dict[str, Any]:
    assert operation.example is not None
    example = dict(operation.example)
    if "model" in example:
        example["model"] = about.model
    examples = {"whole": {"value": example}}
    if operation.events is not None:
        examples["streamed"] = {"value": {**example, "stream": True}}
    return examples


def _parameter(parameter: Parameter, about: About) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.place == "path",
        "schema": parameter.schema or about.model_names,
    }
    if parameter.description:
        described["description"] = parameter.description
    return described


def _response(
    status: int, description: str, content: dict[str, Any], method: str
) -> dict[str, Any]:
    headers = {
        name: {"schema": schema, "required": required, **({"description": said} if said else {})}
        for name, (schema, said, required) in {**HEADERS[0], **HEADERS.get(status, {})}.items()
    }
    response: dict[str, Any] = {"description": description, "headers": headers}
    if content and method != hdrs.METH_HEAD:
        response["content"] = content
    return response
