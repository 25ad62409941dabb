"""The server's exceptions, and the error response for each: a status and OpenAI's error body.

Only the messages of forge-jax's own exceptions are sent. Any other exception is logged and reported
as "internal error", so that no traceback, repr or path leaves the process.
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
MAX_NAMES, MAX_NAME_CHARS = 5, 64  # served models listed in an error


class UnknownModelError(RequestError):
    """The request names a model that is not served."""

    @classmethod
    def listing(cls, served: Sequence[str], name: str) -> UnknownModelError:
        """Return an error that lists the served models, as `/v1/models` does.

        The message does not quote the request.

        Args:
          served: the names of the served models.
          name: the name in the request.
        """
        shown = [each[:MAX_NAME_CHARS] for each in served[:MAX_NAMES]]
        more = f" and {len(served) - MAX_NAMES} more" if len(served) > MAX_NAMES else ""
        similar = did_you_mean(name, served) if len(served) > 1 else ""
        return cls(
            f"this model is not served: set model to {' or '.join(shown)}{more}, "
            f"or omit it{similar}",
            param="model",
        )


class UnknownPathError(ForgeError):
    """No route has this path.

    Args:
      nearest: the path of the most similar route.
    """

    def __init__(self, nearest: str | None = None):
        hint = "see /openapi.json" if nearest is None else f"did you mean {nearest}?"
        super().__init__(f"unknown path: {hint}")


class UnknownAdapterError(RequestError):
    """The request names a LoRA adapter that is not loaded, or a folder that does not exist."""


class UnknownResponseError(RequestError):
    """The request names a response that is not stored, or belongs to another tenant."""


class PreviousResponseNotFoundError(UnknownResponseError):
    """A WebSocket message continues a response that is no longer available."""


class UnsupportedThreadError(RequestError):
    """The request uses message threads. Clients then send the whole conversation."""


class ProfilesOffError(RequestError):
    """The server was started without a folder for profiles."""


class WeightSyncOffError(RequestError):
    """The server was started without a folder for new weights."""


class UnauthorizedError(ForgeError):
    """The request has no valid API key."""


class HostNotAllowedError(ForgeError):
    """The request's Host header is not one of this server's names."""


class ForeignSiteError(ForgeError):
    """A browser sent the request from a page of another site."""


class TransferCodingError(ForgeError):
    """The body has an unsupported transfer coding."""


class ContentCodingError(ForgeError):
    """The body has an unsupported content coding."""


class StreamIdError(RequestError):
    """The `stream_id` of a WebSocket message is invalid."""


class UpgradeRequiredError(ForgeError):
    """A GET of the WebSocket's path lacks a valid opening handshake."""


class NotReadyError(ForgeError):
    """The server cannot accept requests because it is starting or stopping."""

    def __init__(self, message: str, *, retry_after_s: float = 5.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(ForgeError):
    """The request exceeded its own time limit or the server's."""


class BodyTimeoutError(ForgeError):
    """The body of the request did not arrive in time."""


class BodyTooLargeError(ForgeError):
    """The body of the request exceeds the server's limit."""

    def __init__(self) -> None:
        super().__init__("the request body is larger than this server accepts")


class AbortedError(ForgeError):
    """A trainer aborted the request, by a pause, an update or by its ID."""


class RestartedError(ForgeError):
    """An update restarted a request after a part of its output had been sent."""


class StoppingError(EngineError):
    """The engine aborted a request because the server is shutting down."""


class Error(Payload):
    message: str
    type: str
    param: Annotated[str | None, msgspec.Meta(description="The path of the invalid field.")]
    code: str | None


class ErrorAnswer(Payload):
    """Error response in OpenAI's format."""

    error: Error


class ThreadErrorDetails(Payload):
    error_code: Literal["thread_unsupported_request"]
    unsupported: list[str]


class ErrorReply(msgspec.Struct, frozen=True):
    """The error response for an exception."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    details: ThreadErrorDetails | None = None  # sent only in Anthropic's format

    @property
    def text(self) -> str:
        return self.message[:MAX_MESSAGE_CHARS]

    @property
    def name(self) -> str:
        """The error's code or type, for the log."""
        return self.code or self.type

    @property
    def retry_after(self) -> str | None:
        """The value of the Retry-After header, in whole seconds."""
        return None if self.retry_after_s is None else str(math.ceil(self.retry_after_s))

    def body(self) -> bytes:
        """Return `{"error": {...}}` as JSON."""
        return msgspec.json.encode(ErrorAnswer(self.error))

    @property
    def error(self) -> Error:
        return Error(self.text, self.type, self.param, self.code)


class _Rule(NamedTuple):
    """The error response for one class of exceptions."""

    status: int
    code: str | None
    type: str = "invalid_request_error"
    param: str | None = None  # None: the exception's param
    message: str | None = None  # None: the exception's message


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
    WeightSyncOffError: _Rule(404, "weight_sync_off"),
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
    AbortedError: _Rule(503, "request_aborted", "server_error"),
    RestartedError: _Rule(503, "request_restarted", "server_error"),
    EngineError: _Rule(503, "engine_unavailable", "server_error", message=_UNAVAILABLE),
    NotReadyError: _Rule(503, "not_ready", "server_error"),
    OverloadedError: _Rule(503, "overloaded", "server_error"),
    DeadlineError: _Rule(504, "deadline_exceeded", "timeout_error", param="timeout"),
}
_INTERNAL = ErrorReply(500, "internal error", "server_error", None, "internal_error")


def error_reply(error: BaseException) -> ErrorReply:
    """Return the reply to an exception, from the rule of its most specific class.

    An exception without a rule is logged with its traceback.
    """
    rule = next((_RULES[each] for each in type(error).__mro__ if each in _RULES), None)
    if rule is None:
        log.error("a request failed unexpectedly", exc_info=error)
        return _INTERNAL
    if rule.message is not None:
        level = logging.INFO if isinstance(error, StoppingError) else logging.ERROR
        log.log(level, "the engine rejected or lost a request: %s", error)
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
