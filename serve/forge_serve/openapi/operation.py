"""What is said of an endpoint beside its routes: an `Operation` in the OpenAPI document.

Each protocol has a table of its operations, by the names of the handlers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forge_serve.openapi.schema import Schema

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"

DEFECT = (500,)
NOT_READY = (503, *DEFECT)
READS = (400, 404, 408, 413, 415, *NOT_READY)  # a body
GENERATES = (*READS, 504)


@dataclass(frozen=True, slots=True)
class Parameter:
    """Of the path or the query; those of a path are required."""

    name: str
    place: Literal["path", "query"]
    schema: Schema | None  # None: the model's name
    description: str = ""


WHOLE: Schema = {"type": "integer", "minimum": 0, "maximum": 10**9 - 1}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What a handler does, beside its paths and methods.

    Attributes:
      request: the struct of its body; None: it reads none.
      message: the struct of a message of the WebSocket that it opens; None: it opens none.
      message_example: such a message.
      message_error: the struct that answers a message without a response.
      or_requests: the structs of other bodies that it takes.
      chosen_by: the fields that choose among these structs, the first that has one; None: any may
        be meant.
      example: such a body; a model in it stands for the one that is served.
      answer: the type of its JSON; None: it answers with `content_type`; None as well: nothing.
      late_answer: returns that type, if its import is slow.
      events: the type of an event of its stream, if it has one.
      error: the struct of its errors; None: the document's own.
      errors: the statuses of its errors, beside 401 and 403.
      also: other statuses that come with `answer`.
      parameters: of its path and query.
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
