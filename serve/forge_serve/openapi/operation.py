"""`Operation`, the description of an endpoint in the OpenAPI document.

Each protocol has a table of operations, keyed by the handlers' names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forge_serve.openapi.schema import Schema

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"

DEFECT = (500,)
NOT_READY = (503, *DEFECT)
READS = (400, 404, 408, 413, 415, *NOT_READY)  # endpoints that read a body
GENERATES = (*READS, 504)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A path or query parameter. Path parameters are required."""

    name: str
    place: Literal["path", "query"]
    schema: Schema | None  # None: the schema of model names
    description: str = ""


WHOLE: Schema = {"type": "integer", "minimum": 0, "maximum": 10**9 - 1}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """The description of a handler, apart from its paths and methods.

    Attributes:
      request: the struct of the request body; None: there is no body.
      message: the struct of the WebSocket's messages; None: the handler opens no WebSocket.
      message_example: an example message.
      message_error: the struct of an error event that replaces a response to a message.
      or_requests: structs of alternative request bodies.
      chosen_by: for each body struct, the fields that select it, first match first; None: any
        struct may match.
      example: an example body. A model in it is replaced by the served model's name.
      answer: the type of the JSON response; None: the response has `content_type`, or no body if
        that is None too.
      late_answer: returns the type, for types whose import is slow.
      events: the type of the stream's events; None: the endpoint does not stream.
      error: the struct of error responses; None: the document's default.
      errors: the error statuses other than 401 and 403.
      also: additional statuses with `answer` as their body.
      parameters: path and query parameters.
    """

    summary: str
    request: type | None = None
    message: type | None = None
    message_example: dict[str, Any] | None = None
    message_error: type | None = None
    or_requests: tuple[type, ...] = ()
    chosen_by: Mapping[type, frozenset[str]] | None = None
    example: dict[str, Any] | None = None
    answer: Any = None
    late_answer: Callable[[], type] | None = None
    events: Any = None
    content_type: str | None = JSON
    error: type | None = None
    errors: tuple[int, ...] = DEFECT
    also: tuple[int, ...] = ()
    parameters: tuple[Parameter, ...] = ()
