"""The two formats of batch files: OpenAI's, whose lines have a URL, and plain request bodies.

A format parses requests and writes response lines. A response line has the number and a digest of
its input line, so that a resumed run can skip requests that are done.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from forge_serve.batch.errors import LineError
from forge_serve.errors import ErrorReply
from forge_serve.openai.embeddings import EmbeddingRequest
from forge_serve.openai.requests import ChatRequest, CompletionRequest, GenerationRequest
from forge_serve.openai.serializers import ChatSerializer, CompletionSerializer, ResponseSerializer

MAX_ID_CHARS = 512
_ABSENT = msgspec.Raw(b"")
_NULL = b"null"

Kind = type[CompletionRequest | ChatRequest | EmbeddingRequest]
FORMS: dict[type[GenerationRequest], type[ResponseSerializer]]  # only requests that generate


class PlainChat(ChatRequest, kw_only=True):
    """Chat as a plain line."""

    id: Any = None


class PlainCompletion(CompletionRequest, kw_only=True):
    """Completion as a plain line."""

    id: Any = None


URLS: dict[str, Kind] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
}
FORMS = {
    ChatRequest: ChatSerializer,
    PlainChat: ChatSerializer,
    CompletionRequest: CompletionSerializer,
    PlainCompletion: CompletionSerializer,
}


@dataclass(frozen=True, slots=True)
class Line:
    """Line of the input. `number` starts at 1 and counts empty lines, as in editors."""

    number: int
    digest: int  # 64-bit hash of the text; 0: the line is empty
    data: bytes | None  # None: the line is longer than the limit on requests


@dataclass(frozen=True, slots=True)
class Asked:
    """Request of a line."""

    kind: Kind
    body: bytes


class _Envelope(msgspec.Struct):
    custom_id: msgspec.Raw = _ABSENT
    method: msgspec.Raw = _ABSENT
    url: msgspec.Raw = _ABSENT
    body: msgspec.Raw = _ABSENT
    id: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT


_envelopes = msgspec.json.Decoder(_Envelope)
_strings = msgspec.json.Decoder(str)
_ids = msgspec.json.Decoder(str | int)


class LineFormat:
    """Format of a batch file: parses request lines and writes response lines."""

    beginning: ClassVar[bytes]  # first bytes of each response line
    id_name: ClassVar[str]

    def id_of(self, line: Line) -> str | int | None:
        """Return the client's id of a line.

        Raises:
          LineError: the line is not valid JSON, or its id is invalid.
        """
        raise NotImplementedError

    def read(self, line: Line) -> Asked:
        """Return the request of a line.

        Raises:
          LineError: the line is not a request.
        """
        raise NotImplementedError

    def answer(self, line: Line, status: int, unique_id: str, body: bytes) -> bytes:
        """Return the response line for an HTTP response."""
        raise NotImplementedError

    def refusal(self, line: Line, error: LineError) -> bytes:
        """Return the response line for an invalid line."""
        raise NotImplementedError

    def answered(self, data: bytes) -> tuple[int, int] | None:
        """Return the number and digest of a response's input line, or None if it is no response."""
        raise NotImplementedError

    def _id_or_none(self, line: Line) -> str | int | None:
        try:
            return self.id_of(line)
        except LineError:
            return None


class OpenAIFormat(LineFormat):
    """Format of OpenAI's batch files."""

    beginning = b'{"id":"batch_req_'
    id_name = "custom_id"

    _ID = re.compile(r"batch_req_(\d{9,18})_([0-9a-f]{16})")

    def id_of(self, line: Line) -> str:
        given = bytes(_envelope(line).custom_id)
        if not given or given == _NULL:
            raise LineError("missing_required_parameter", "custom_id is required")
        try:
            custom_id = _strings.decode(given)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LineError("invalid_custom_id", "custom_id must be a string") from error
        return _checked(custom_id, self.id_name)

    def read(self, line: Line) -> Asked:
        envelope = _envelope(line)
        self.id_of(line)
        method, url = _text(envelope.method), _text(envelope.url)
        if method != "POST":
            raise LineError("invalid_method", "method must be POST")
        if url not in URLS:
            raise LineError("invalid_url", f"url must be {' or '.join(URLS)}")
        body = bytes(envelope.body)
        if not body:
            raise LineError("missing_required_parameter", "body is required")
        return Asked(URLS[url], body)

    def answer(self, line: Line, status: int, unique_id: str, body: bytes) -> bytes:
        response = {"status_code": status, "request_id": unique_id, "body": msgspec.Raw(body)}
        return self._line(line, response, None)

    def refusal(self, line: Line, error: LineError) -> bytes:
        return self._line(line, None, {"code": error.code, "message": str(error)})

    def answered(self, data: bytes) -> tuple[int, int] | None:
        try:
            found = self._ID.fullmatch(msgspec.json.decode(data, type=_OpenAIAnswer).id)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return None if found is None else (int(found[1]), int(found[2], 16))

    def _line(self, line: Line, response: Any, error: Any) -> bytes:
        answer = {
            "id": f"batch_req_{line.number:09d}_{line.digest:016x}",
            "custom_id": self._id_or_none(line),
            "response": response,
            "error": error,
        }
        return msgspec.json.encode(answer) + b"\n"


class PlainFormat(LineFormat):
    """Format whose lines are request bodies with `prompt` or `messages`, and optionally an `id`."""

    beginning = b'{"line":'
    id_name = "id"

    def id_of(self, line: Line) -> str | int | None:
        given = bytes(_envelope(line).id)
        if not given or given == _NULL:
            return None
        try:
            return _checked(_ids.decode(given), self.id_name)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LineError("invalid_id", "id must be a string or a whole number") from error

    def read(self, line: Line) -> Asked:
        envelope = _envelope(line)
        self.id_of(line)
        prompt, messages = bytes(envelope.prompt), bytes(envelope.messages)
        if bool(prompt) == bool(messages):
            raise LineError(
                "missing_required_parameter", "a line must have either prompt or messages"
            )
        assert line.data is not None
        return Asked(PlainChat if messages else PlainCompletion, line.data)

    def answer(self, line: Line, status: int, unique_id: str, body: bytes) -> bytes:
        answer = msgspec.json.decode(body)
        if "error" in answer:
            return self._line(line, {"error": answer["error"]})
        choices: Sequence[dict[str, Any]] = answer["choices"]
        first = choices[0]
        text = first["message"]["content"] if "message" in first else first["text"]
        shown: dict[str, Any] = {"text": text, "finish_reason": first["finish_reason"]}
        if len(choices) > 1 or _says_more(first):
            shown["choices"] = choices
        return self._line(line, {**shown, "usage": answer["usage"]})

    def refusal(self, line: Line, error: LineError) -> bytes:
        reply = ErrorReply(400, str(error), "invalid_request_error", None, error.code)
        return self._line(line, msgspec.json.decode(reply.body()))

    def answered(self, data: bytes) -> tuple[int, int] | None:
        try:
            answer = msgspec.json.decode(data, type=_PlainAnswer)
            return answer.line, int(answer.digest, 16)
        except ValueError:
            return None

    def _line(self, line: Line, answer: dict[str, Any]) -> bytes:
        key = {"line": line.number, "digest": f"{line.digest:016x}", "id": self._id_or_none(line)}
        return msgspec.json.encode(key | answer) + b"\n"


class _OpenAIAnswer(msgspec.Struct):
    id: str


class _PlainAnswer(msgspec.Struct):
    line: int
    digest: str


def format_of(line: Line) -> LineFormat | None:
    """Return the format of a line, or None if the line is not a JSON object."""
    try:
        envelope = _envelope(line)
    except LineError:
        return None
    of_openai = (envelope.custom_id, envelope.method, envelope.url, envelope.body)
    return OpenAIFormat() if any(bytes(value) for value in of_openai) else PlainFormat()


def _says_more(choice: dict[str, Any]) -> bool:
    """Return True if a choice has more fields than its text and finish reason."""
    message = choice.get("message", {})
    shown = {"index", "text", "message", "finish_reason", "role", "content", "refusal"}
    return any(value is not None for name, value in (choice | message).items() if name not in shown)


def _envelope(line: Line) -> _Envelope:
    if line.data is None:
        raise LineError("line_too_long", "the line exceeds the maximum size of a request")
    try:
        return _envelopes.decode(line.data)
    except msgspec.ValidationError as error:
        raise LineError("invalid_json_line", "the line is not a JSON object") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise LineError("invalid_json_line", "the line is not valid JSON") from error


def _text(raw: msgspec.Raw) -> str | None:
    try:
        return _strings.decode(bytes(raw))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _checked[Id: str | int](given: Id, name: str) -> Id:
    if len(str(given)) > MAX_ID_CHARS:
        raise LineError(f"invalid_{name}", f"{name} must have at most {MAX_ID_CHARS} characters")
    return given
