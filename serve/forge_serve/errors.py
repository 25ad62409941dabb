"""The server's exceptions, and the error that a client sees for each: a status and OpenAI's body.

Only messages that forge-jax wrote for clients are sent. Any other exception is logged and answered
with a fixed text, so that no traceback, repr or path leaves the process.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec

from forge_jax.config.suggest import did_you_mean
from forge_jax.errors import (
    ContextLengthError,
    EngineError,
    ForgeError,
    GrammarError,
    GrammarLimitError,
    LostAdapterError,
    NumericalError,
    OverloadedError,
    RequestError,
    StepError,
)
from forge_jax.grammar.spec import PARAM
from forge_serve.openapi.payload import Payload

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 500
MAX_NAMES, MAX_NAME_CHARS = 5, 64  # of served models, in an error


class UnknownModelError(RequestError):
    """The request names a model that this server does not serve."""

    @classmethod
    def listing(cls, served: Sequence[str], name: str) -> UnknownModelError:
        """Return an error that lists the served models, as `/v1/models` does.

        It repeats nothing of the request.

        Args:
          served: the names that are served.
          name: the name in the request.
        """
        shown = [each[:MAX_NAME_CHARS] for each in served[:MAX_NAMES]]
        more = f" and {len(served) - MAX_NAMES} more" if len(served) > MAX_NAMES else ""
        similar = did_you_mean(name, served) if len(served) > 1 else ""
        return cls(
            f"the model is not served here: use {' or '.join(shown)}{more}, "
            f"or leave model out{similar}",
            param="model",
        )


class UnknownPathError(ForgeError):
    """No route has this path.

    Args:
      nearest: the path of the most similar route.
    """

    def __init__(self, nearest: str | None = None):
        hint = "/openapi.json lists the paths" if nearest is None else f"did you mean {nearest}?"
        super().__init__(f"there is nothing at this path: {hint}")


class UnknownAdapterError(RequestError):
    """The request names a LoRA adapter that is not loaded, or a folder that is not there."""


class UnknownResponseError(RequestError):
    """The request names a response that is not kept here, or not for this client."""


class PreviousResponseNotFoundError(UnknownResponseError):
    """The response that a message of a WebSocket continues is not here any more."""


class UnsupportedThreadError(RequestError):
    """The request is part of a message thread; clients then send the whole conversation."""


class ProfilesOffError(RequestError):
    """The server was started without a folder for profiles."""


class UnauthorizedError(ForgeError):
    """The request has no API key, or one that this server does not know."""


class HostNotAllowedError(ForgeError):
    """The request was sent to a host name that is not this server's."""


class ForeignSiteError(ForgeError):
    """A browser sent the request for a page of another site."""


class TransferCodingError(ForgeError):
    """The body has a transfer coding that this server does not take."""


class ContentCodingError(ForgeError):
    """The body has a content coding that this server does not take."""


class StreamIdError(RequestError):
    """The `stream_id` of a WebSocket's message has not the form of one."""


class UpgradeRequiredError(ForgeError):
    """The request is for a WebSocket, and does not open one."""


class NotReadyError(ForgeError):
    """The server takes no requests at the moment: it is starting or stopping."""

    def __init__(self, message: str, *, retry_after_s: float = 5.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(ForgeError):
    """The request took longer than it, or the server, allows."""


class BodyTimeoutError(ForgeError):
    """The body of the request did not arrive in time."""


class BodyTooLargeError(ForgeError):
    """The body of the request exceeds the server's limit."""

    def __init__(self) -> None:
        super().__init__("the body of the request is larger than this server accepts")


class StoppingError(EngineError):
    """The engine gave a request up because the server is shutting down."""


class Error(Payload):
    message: str
    type: str
    param: Annotated[str | None, msgspec.Meta(description="the path of the field to change")]
    code: str | None


class ErrorAnswer(Payload):
    """An error in OpenAI's form."""

    error: Error


class ThreadErrorDetails(Payload):
    error_code: Literal["thread_unsupported_request"]
    unsupported: list[str]


class ErrorReply(msgspec.Struct, frozen=True):
    """An error as the client will see it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    details: ThreadErrorDetails | None = None  # only in Anthropic's form

    @property
    def text(self) -> str:
        return self.message[:MAX_MESSAGE_CHARS]

    @property
    def name(self) -> str:
        """The error in one word, for the log."""
        return self.code or self.type

    @property
    def retry_after(self) -> str | None:
        """The value of the header, in whole seconds."""
        return None if self.retry_after_s is None else str(math.ceil(self.retry_after_s))

    def body(self) -> bytes:
        """`{"error": {...}}`, as JSON."""
        return msgspec.json.encode(ErrorAnswer(self.error))

    @property
    def error(self) -> Error:
        return Error(self.text, self.type, self.param, self.code)


class _Rule(NamedTuple):
    """How one class of exceptions is answered."""

    status: int
    code: str | None
    type: str = "invalid_request_error"
    param: str | None = None  # default: the exception's own
    message: str | None = None  # default: the exception's own


_UNAVAILABLE = "the engine is not available: it failed or is shutting down"
_RULES: Mapping[type[BaseException], _Rule] = {
    RequestError: _Rule(400, None),
    ContextLengthError: _Rule(400, "context_length_exceeded"),
    GrammarLimitError: _Rule(400, "grammar_limit_exceeded", param=PARAM),
    PreviousResponseNotFoundError: _Rule(400, "previous_response_not_found"),
    StreamIdError: _Rule(400, "invalid_stream_id"),
    TransferCodingError: _Rule(400, "transfer_coding_not_supported"),
    UnsupportedThreadError: _Rule(400, "thread_unsupported_request"),
    UnauthorizedError: _Rule(401, "invalid_api_key"),
    ForeignSiteError: _Rule(403, "origin_not_allowed"),
    HostNotAllowedError: _Rule(403, "host_not_allowed"),
    ProfilesOffError: _Rule(404, "profiles_off"),
    UnknownAdapterError: _Rule(404, "adapter_not_found"),
    UnknownModelError: _Rule(404, "model_not_found"),
    UnknownPathError: _Rule(404, "not_found"),
    UnknownResponseError: _Rule(404, "response_not_found"),
    BodyTimeoutError: _Rule(408, "request_timeout"),
    BodyTooLargeError: _Rule(413, "request_too_large"),
    ContentCodingError: _Rule(415, "content_coding_not_supported"),
    UpgradeRequiredError: _Rule(426, "upgrade_required"),
    GrammarError: _Rule(500, "grammar_failed", "server_error"),
    LostAdapterError: _Rule(500, "adapter_lost", "server_error"),
    NumericalError: _Rule(500, "numerical_error", "numerical_error"),
    StepError: _Rule(500, "step_failed", "server_error"),
    EngineError: _Rule(503, "engine_unavailable", "server_error", message=_UNAVAILABLE),
    NotReadyError: _Rule(503, "not_ready", "server_error"),
    OverloadedError: _Rule(503, "overloaded", "server_error"),
    DeadlineError: _Rule(504, "deadline_exceeded", "timeout_error", param="timeout"),
}
_INTERNAL = ErrorReply(500, "internal error", "server_error", None, "internal_error")


def error_reply(error: BaseException) -> ErrorReply:
    """Return the reply to an exception, by the nearest of its classes that has a rule.

    The log gets the traceback of an exception without a rule.
    """
    rule = next((_RULES[each] for each in type(error).__mro__ if each in _RULES), None)
    if rule is None:
        log.error("a request failed unexpectedly", exc_info=error)
        return _INTERNAL
    if rule.message is not None:
        level = logging.INFO if isinstance(error, StoppingError) else logging.ERROR
        log.log(level, "the engine refused or lost a request: %s", error)
    retries = isinstance(error, OverloadedError | NotReadyError)
    details = None
    if isinstance(error, UnsupportedThreadError):
        details = ThreadErrorDetails("thread_unsupported_request", ["thread"])
    return ErrorReply(
        rule.status,
        rule.message or str(error),
        rule.type,
        rule.param or (error.param if isinstance(error, RequestError) else None),
        rule.code,
        error.retry_after_s if retries else None,
        details,
    )
