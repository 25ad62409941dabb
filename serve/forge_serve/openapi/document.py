"""The OpenAPI 3.1 document of an application, made from its routes and their operations.

The schemas come from the structs that decode requests and encode responses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import hdrs, web

from forge_jax import __version__
from forge_serve.limits import rows
from forge_serve.openapi.operation import EVENTS, JSON, Operation, Parameter
from forge_serve.openapi.schema import REF, About, Schema, components

STATUSES = {
    400: "The request is invalid or exceeds a limit of the server.",
    401: "The API key is missing or invalid.",
    403: "The request came from a page of another site, or its Host header is not allowed.",
    404: "The model, adapter or response does not exist, or profiling is disabled.",
    408: "The request body did not arrive in time.",
    413: "The request body is too large.",
    415: "The content coding of the body is neither gzip nor deflate.",
    426: "The request must open a WebSocket.",
    500: "The model, its grammar or the server failed. See the server's log.",
    503: "The server is starting, stopping or overloaded, or its engine failed.",
    504: "The request exceeded its own time limit or the server's.",
}
HEADERS = {  # response headers by status; 0: all statuses
    0: {
        "X-Request-Id": (
            {"type": "string"},
            "The id from the request, or a new one.",
            True,
        ),
        "Server": ({"const": "forge-jax"}, "", True),
    },
    401: {"WWW-Authenticate": ({"const": "Bearer"}, "", True)},
    415: {"Accept-Encoding": ({"const": "gzip, deflate"}, "", True)},
    426: {"Upgrade": ({"const": "websocket"}, "", True)},
    503: {"Retry-After": ({"type": "string", "pattern": "^[0-9]+$"}, "Seconds to wait.", False)},
}


def make_document(
    router: web.UrlDispatcher,
    operations: Mapping[str, Operation],
    about: About,
    *,
    error: type,
    open_paths: Collection[str],
    key_header: str,
) -> dict[str, Any]:
    """Return the OpenAPI document of an application.

    Args:
      operations: the operations by handler name.
      error: the default struct of error responses.
      open_paths: paths that need no API key.
      key_header: the header that may carry the API key in place of `Authorization`.

    Raises:
      KeyError: a route's handler has no operation.
    """
    described = _Operations(operations, about, error, open_paths)
    paths: dict[str, dict[str, Any]] = {}
    for path, method, name in routes(router):
        paths.setdefault(path, {})[method.lower()] = described.operation(path, method, name)
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": key_header},
    }
    keys = about.api_keys
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
        **({"security": [{name: []} for name in schemes]} if keys else {}),
        "paths": paths,
        "components": {
            "schemas": described.components,
            **({"securitySchemes": schemes} if keys else {}),
        },
    }


_DESCRIPTION = """\
Unknown fields are ignored. Numbers and booleans may be sent as strings, and booleans as 0 and 1. \
Objects must not have duplicate keys. A field's description states conditions that its schema \
cannot express. The server rejects values that violate them."""


def routes(router: web.UrlDispatcher) -> Iterable[tuple[str, str, str]]:
    """Yield the path, the method and the handler's name of each route."""
    for route in router.routes():
        assert route.resource is not None
        yield route.resource.canonical, route.method, route.handler.__name__


def answer_schemas(types: Sequence[Any]) -> tuple[dict[Any, Schema], dict[str, Schema]]:
    """Return the schema of each response type, and the schemas of the structs in them by name."""
    found, schemas = msgspec.json.schema_components(types, ref_template=REF)
    for schema in schemas.values():
        schema.pop("title", None)
        schema["description"] = schema.get("description", "").partition("\n")[0]
        fields = schema.get("properties", {})
        defaults = [name for name, field in fields.items() if "default" in field]
        for name in defaults:
            del fields[name]["default"]
        # Encoding omits only UNSET fields, which have no default in the schema.
        schema["required"] = [*schema["required"], *defaults]
    return dict(zip(types, found, strict=True)), schemas


class _Operations:
    """Descriptions of operations.

    Attributes:
      components: the schemas of all their structs, by name.
    """

    def __init__(
        self,
        operations: Mapping[str, Operation],
        about: About,
        error: type,
        open_paths: Collection[str],
    ):
        self._operations, self._about = operations, about
        self._error, self._open_paths = error, open_paths
        answers = {error: None}  # a dict, because it keeps its order
        bodies: set[type] = set()
        for each in operations.values():
            sent = (_answer(each), each.events, each.error, each.message_error)
            answers |= dict.fromkeys(kind for kind in sent if kind is not None)
            bodies |= {kind for kind in (each.request, each.message) if kind is not None}
        self._schemas, schemas = answer_schemas(list(answers))
        body_schemas = components(sorted(bodies, key=lambda kind: kind.__name__), about)
        twice = schemas.keys() & body_schemas.keys()
        assert not twice, f"request and response schemas share names: {twice}"
        self.components = {**body_schemas, **schemas}

    def operation(self, path: str, method: str, name: str) -> dict[str, Any]:
        operation, about = self._operations[name], self._about
        path_name = path.replace("/", "_").replace(".", "_").replace("{", "").replace("}", "")
        described: dict[str, Any] = {
            "operationId": f"{method.lower()}{path_name}",
            "summary": operation.summary,
            "responses": self._responses(path, method, operation),
        }
        if operation.request is not None:
            body = {"schema": _body(operation), "examples": _examples(operation, about)}
            described["requestBody"] = {"required": True, "content": {JSON: body}}
        if operation.message is not None:
            refused = self._schemas[operation.message_error]
            described["x-websocket"] = {
                "messages": _ref(operation.message),
                "example": operation.message_example,
                "events": {"anyOf": [self._schemas[operation.events], refused]},
            }
        if operation.parameters:
            described["parameters"] = [_parameter(each, about) for each in operation.parameters]
        if about.api_keys and path in self._open_paths:
            described["security"] = []
        return described

    def _responses(self, path: str, method: str, operation: Operation) -> dict[str, Any]:
        content: dict[str, Any] = {}
        answer = _answer(operation)
        if answer is not None:
            content[JSON] = {"schema": self._schemas[answer]}
        elif operation.content_type is not None:
            content[operation.content_type.partition(";")[0]] = {"schema": {"type": "string"}}
        error = self._schemas[operation.error or self._error]
        if operation.message is not None:
            responses = {101: _response(101, "The WebSocket is open.", {}, method)}
        elif operation.events is None:
            responses = {200: _response(200, "Success.", content, method)}
        else:
            data = {"anyOf": [self._schemas[operation.events], error]}
            said = (
                "Success. In a stream, the data of each event follows x-event-schema, except for "
                "a final [DONE]."
            )
            both = {**content, EVENTS: {"x-event-schema": data}}
            responses = {200: _response(200, said, both, method)}
        for status in operation.also:
            responses[status] = _response(status, STATUSES[status], content, method)
        keys = self._about.api_keys
        refusals = (401,) if keys and path not in self._open_paths else () if keys else (403,)
        for status in sorted({*operation.errors, *refusals}):
            responses[status] = _response(
                status, STATUSES[status], {JSON: {"schema": error}}, method
            )
        return {str(status): response for status, response in responses.items()}


def _answer(operation: Operation) -> Any:
    late = operation.late_answer
    return operation.answer if late is None else late()


def _ref(kind: type) -> Schema:
    return {"$ref": REF.format(name=kind.__name__)}


def _body(operation: Operation) -> Schema:
    assert operation.request is not None
    kinds = (operation.request, *operation.or_requests)
    refs = [_ref(kind) for kind in kinds]
    if operation.chosen_by is not None:
        refs = _apart(refs, [operation.chosen_by[kind] for kind in kinds])
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _apart(refs: Sequence[Schema], fields: Sequence[Iterable[str]]) -> list[Schema]:
    """Return the schemas, each restricted to bodies without the fields of its predecessors."""
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
