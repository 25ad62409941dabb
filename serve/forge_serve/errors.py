"""What an exception becomes on the wire: a status and OpenAI's error body.

Only messages that forge-jax wrote for clients go out. Anything else is logged here and answered
with a fixed text, so that no traceback, repr or path leaves the process.
"""

from __future__ import annotations

import logging
import math
from typing import Annotated, Literal

import msgspec
from aiohttp import web

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


class UnknownModelError(RequestError):
    """The request names a model that this server does not serve."""


class UnknownPathError(ForgeError):
    """There is no route of this path.

    Args:
      nearest: the route that it looks most like.
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

    def response(self, body: bytes | None = None) -> web.Response:
        """The whole answer; `body`: in another form."""
        body = self.body() if body is None else body
        response = web.Response(status=self.status, body=body, content_type="application/json")
        if self.retry_after is not None:
            response.headers["Retry-After"] = self.retry_after
        if self.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if self.status == 415:
            response.headers["Accept-Encoding"] = "gzip, deflate"
        if self.status == 426:
            response.headers["Upgrade"] = "websocket"
        return response


def error_reply(error: BaseException) -> ErrorReply:  # noqa: C901, PLR0911, PLR0915
    """The reply to an exception; one that is nobody's on purpose is logged with its traceback."""
    match error:
        case UnauthorizedError():
            code = "invalid_api_key"
            return ErrorReply(401, str(error), "invalid_request_error", None, code)
        case HostNotAllowedError():
            code = "host_not_allowed"
            return ErrorReply(403, str(error), "invalid_request_error", None, code)
        case TransferCodingError():
            code = "transfer_coding_not_supported"
            return ErrorReply(400, str(error), "invalid_request_error", None, code)
        case ContentCodingError():
            code = "content_coding_not_supported"
            return ErrorReply(415, str(error), "invalid_request_error", None, code)
        case ForeignSiteError():
            code = "origin_not_allowed"
            return ErrorReply(403, str(error), "invalid_request_error", None, code)
        case UnknownModelError():
            code = "model_not_found"
            return ErrorReply(404, str(error), "invalid_request_error", error.param, code)
        case UnknownAdapterError():
            code = "adapter_not_found"
            return ErrorReply(404, str(error), "invalid_request_error", error.param, code)
        case UpgradeRequiredError():
            code = "upgrade_required"
            return ErrorReply(426, str(error), "invalid_request_error", None, code)
        case StreamIdError():
            code = "invalid_stream_id"
            return ErrorReply(400, str(error), "invalid_request_error", error.param, code)
        case PreviousResponseNotFoundError():
            code = "previous_response_not_found"
            return ErrorReply(400, str(error), "invalid_request_error", error.param, code)
        case UnknownResponseError():
            code = "response_not_found"
            return ErrorReply(404, str(error), "invalid_request_error", error.param, code)
        case ProfilesOffError():
            return ErrorReply(404, str(error), "invalid_request_error", None, "profiles_off")
        case UnsupportedThreadError():
            code = "thread_unsupported_request"
            details = ThreadErrorDetails(code, ["thread"])
            kind = "invalid_request_error"
            return ErrorReply(400, str(error), kind, error.param, code, details=details)
        case ContextLengthError():
            code = "context_length_exceeded"
            return ErrorReply(400, str(error), "invalid_request_error", error.param, code)
        case RequestError():
            return ErrorReply(400, str(error), "invalid_request_error", error.param)
        case OverloadedError():
            retry_after_s = error.retry_after_s
            return ErrorReply(503, str(error), "server_error", None, "overloaded", retry_after_s)
        case NotReadyError():
            retry_after_s = error.retry_after_s
            return ErrorReply(503, str(error), "server_error", None, "not_ready", retry_after_s)
        case DeadlineError():
            return ErrorReply(504, str(error), "timeout_error", "timeout", "deadline_exceeded")
        case BodyTimeoutError():
            return ErrorReply(408, str(error), "invalid_request_error", None, "request_timeout")
        case NumericalError():
            return ErrorReply(500, str(error), "numerical_error", None, "numerical_error")
        case GrammarLimitError():
            code = "grammar_limit_exceeded"
            return ErrorReply(400, str(error), "invalid_request_error", PARAM, code)
        case GrammarError():
            return ErrorReply(500, str(error), "server_error", None, "grammar_failed")
        case StepError():
            return ErrorReply(500, str(error), "server_error", None, "step_failed")
        case LostAdapterError():
            return ErrorReply(500, str(error), "server_error", None, "adapter_lost")
        case EngineError():
            level = logging.INFO if isinstance(error, StoppingError) else logging.ERROR
            log.log(level, "the engine refused or lost a request: %s", error)
            message = "the engine is not available: it failed or is shutting down"
            return ErrorReply(503, message, "server_error", None, "engine_unavailable")
        case web.RequestPayloadError():
            message = "the body of the request cannot be read as its headers describe it"
            return ErrorReply(400, message, "invalid_request_error")
        case web.HTTPRequestEntityTooLarge():
            message = "the body of the request is larger than this server accepts"
            return ErrorReply(413, message, "invalid_request_error", None, "request_too_large")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"this path does not take this method; it takes {allowed}"
            return ErrorReply(405, message, "invalid_request_error", None, "method_not_allowed")
        case UnknownPathError():
            return ErrorReply(404, str(error), "invalid_request_error", None, "not_found")
        case web.HTTPException():
            kind = "server_error" if error.status >= 500 else "invalid_request_error"
            return ErrorReply(error.status, error.reason, kind)
        case _:
            log.error("a request failed unexpectedly", exc_info=error)
            return ErrorReply(500, "internal error", "server_error", None, "internal_error")
