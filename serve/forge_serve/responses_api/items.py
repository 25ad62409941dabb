"""The items of inputs and outputs, and their conversion to chat messages.

`Item` represents all of them: input from clients, stored items of earlier responses, and the
model's output.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from forge_jax.errors import RequestError
from forge_serve.generation.files import Attachment
from forge_serve.openai.content import (
    FILE_FIELDS,
    ContentPart,
    FilePart,
    openai_file,
)
from forge_serve.openai.requests import FunctionCall, Message, Role, ToolCall
from forge_serve.openapi.schema import NOTHING, About, Schema, nullable, tagged
from forge_serve.responses_api.response_types import (
    Compaction,
    InputFile,
    InputText,
    Listed,
    ListedCallOutput,
    ListedMessage,
    ListedReasoning,
    OutputCall,
    OutputText,
    ReasoningText,
    RefusalText,
    SummaryText,
)

FILE = "input_file"
TEXTS = ("input_text", "output_text", "text")
ROLES: dict[str, Role] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
}
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "compaction": "cmp",
}
_COMPACTED = "forge-jax-1."  # the prefix of a compaction's content
_BEFORE_SUMMARY = "A summary of the conversation up to here:\n\n"


class Part(msgspec.Struct):
    """Part of an item's content, output or summary."""

    type: str
    text: str | None = None
    refusal: str | None = None
    filename: str | None = None
    file_data: str | None = None  # a data URL, or only its base64
    file_id: Any = None  # rejected in files, as is `file_url`
    file_url: Any = None

    def attachment(self, path: str) -> Attachment:
        """Return the file of an `input_file`.

        Raises:
          RequestError: a field is missing or not supported.
        """
        return openai_file(
            path, self.filename, self.file_data, file_id=self.file_id, file_url=self.file_url
        )


class Item(msgspec.Struct):
    """Item of any type. The type of a message is optional."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    encrypted_content: str | None = None  # only used in compactions
    summary: list[Part] | None = None

    @classmethod
    def narrow_schema(cls, schema: Schema, about: About) -> None:
        message = {"type": {"enum": ["message", None]}, "role": {"enum": list(ROLES)}}
        compacted = {"type": "string", "pattern": "^forge-jax-1\\."}
        compacted["description"] = "Must come from /v1/responses/compact of this server."
        call = tagged("function_call", "call_id", "name", "arguments")
        result = tagged("function_call_output", "call_id", "output")
        result["properties"]["output"] = _parts_schema(*TEXTS, FILE)
        summarized = tagged("compaction", "encrypted_content")
        summarized["properties"]["encrypted_content"] = compacted
        thought = tagged("reasoning")
        thought["properties"] |= {
            "content": nullable(_parts_schema("reasoning_text", *TEXTS)),
            "summary": nullable({"type": "array", "items": _part_schema("summary_text")}),
        }
        schema["anyOf"] = [
            {
                "required": ["role", "content"],
                "properties": {**message, "content": _parts_schema(*TEXTS, "refusal")},
            },
            {
                "required": ["role", "content"],
                "properties": {
                    **message,
                    "role": {"const": "user"},
                    "content": _parts_schema(*TEXTS, "refusal", FILE),
                },
            },
            call,
            result,
            summarized,
            thought,
        ]

    @property
    def kind(self) -> str | None:
        return "message" if self.type is None and self.role is not None else self.type


def _parts_schema(*types: str) -> Schema:
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": _part_schema(*types)}]}


def _part_schema(*types: str) -> Schema:
    """Return the schema of a part with one of the types, and the text that it requires."""
    others = {"refusal": tagged("refusal", "refusal"), FILE: _file_schema()}
    text = tagged("", "text")
    text["properties"]["type"] = {"enum": [name for name in types if name not in others]}
    return {"anyOf": [text, *(others[name] for name in types if name in others)]}


def _file_schema() -> Schema:
    part = tagged(FILE, "file_data")
    part["properties"] |= {**FILE_FIELDS, "file_url": NOTHING}
    return part


def check_item(path: str, item: Item) -> None:
    """Check that an item is complete and supported.

    Raises:
      RequestError: it is not. `param` is the path of the item or its invalid field.
    """
    match item.kind:
        case "message":
            if item.role not in ROLES:
                raise RequestError(
                    f"{path}.role must be one of {', '.join(ROLES)}", param=f"{path}.role"
                )
            _required(path, "content", item.content)
            files = (FILE,) if item.role == "user" else ()
            _check_parts(f"{path}.content", item.content, (*TEXTS, "refusal", *files))
        case "function_call":
            _required(path, "call_id", item.call_id)
            _required(path, "name", item.name)
            _required(path, "arguments", item.arguments)
        case "function_call_output":
            _required(path, "call_id", item.call_id)
            _required(path, "output", item.output)
            _check_parts(f"{path}.output", item.output, (*TEXTS, FILE))
        case "compaction":
            _required(path, "encrypted_content", item.encrypted_content)
            if _summary(item) is None:
                raise RequestError(
                    f"{path}.encrypted_content must come from /v1/responses/compact of this "
                    "server: send the messages instead",
                    param=f"{path}.encrypted_content",
                )
        case "reasoning":
            _check_parts(f"{path}.content", item.content, ("reasoning_text", *TEXTS))
            _check_parts(f"{path}.summary", item.summary, ("summary_text",))
        case _:
            known = ", ".join(_ID_PREFIXES)
            raise RequestError(
                f"{path}.type must be one of {known}",
                param=f"{path}.type",
            )


def check_outputs(before: Iterable[Item], given: Iterable[Item]) -> None:
    """Reject outputs without a matching call, because templates would misplace them.

    Raises:
      RequestError: an output has no call. `param` is the path of its `call_id`.
    """
    given = list(given)
    calls = {item.call_id for item in (*before, *given) if item.kind == "function_call"}
    for i, item in enumerate(given):
        if item.kind == "function_call_output" and item.call_id not in calls:
            raise RequestError(
                f"input[{i}].call_id must match a function_call in the input or in the previous "
                "responses: send the call as well",
                param=f"input[{i}].call_id",
            )


def _required(path: str, name: str, value: Any) -> None:
    if value is None:
        raise RequestError(f"{path}.{name} is required", param=f"{path}.{name}")


def _check_parts(path: str, parts: str | Sequence[Part] | None, types: tuple[str, ...]) -> None:
    if parts is None or isinstance(parts, str):
        return
    for j, part in enumerate(parts):
        if part.type not in types:
            raise RequestError(
                f"{path}[{j}]: unsupported type; the supported types are {', '.join(types)}",
                param=f"{path}[{j}]",
            )
        if part.type == FILE:
            part.attachment(f"{path}[{j}]")
            continue
        name = "refusal" if part.type == "refusal" else "text"
        if getattr(part, name) is None:
            raise RequestError(f"{path}[{j}].{name} is required", param=f"{path}[{j}].{name}")


def messages(before: Sequence[Item], given: Sequence[Item]) -> list[Message]:
    """Return checked items as chat messages.

    Args:
      before: the items of the previous responses.
      given: the input of the request.

    Consecutive reasoning, text and calls of the model form one assistant message. A second text or
    reasoning begins a new message, unless calls precede it whose outputs have not followed yet.
    Templates require those outputs directly after the message with the calls.
    """
    found: list[Message] = []
    own: Message | None = None  # the assistant message that may get further items
    paths = ["previous_response_id"] * len(before) + [f"input[{i}]" for i in range(len(given))]
    for path, item in zip(paths, [*before, *given], strict=True):
        if item.kind == "function_call_output":
            content = _content(f"{path}.output", item.output)
            found.append(Message("tool", content, name=item.name, tool_call_id=item.call_id))
            own = None
            continue
        if item.kind == "compaction":
            found.append(Message("system", f"{_BEFORE_SUMMARY}{_summary(item)}"))
            own = None
            continue
        if item.kind == "message" and item.role != "assistant":
            assert item.role is not None
            found.append(Message(ROLES[item.role], _content(f"{path}.content", item.content)))
            own = None
            continue
        if own is None or not _takes(own, item):
            own = Message("assistant")
            found.append(own)
        _add(own, item)
    return [message for message in found if message != Message("assistant")]


def _takes(own: Message, item: Item) -> bool:
    """Return True if the item belongs to this assistant message."""
    if own.tool_calls or item.kind == "function_call":
        return True
    return own.content is None and (item.kind == "message" or own.reasoning_content is None)


def _add(own: Message, item: Item) -> None:
    match item.kind:
        case "reasoning":
            thought = _text(item.content) or _text(item.summary)
            own.reasoning_content = (own.reasoning_content or "") + thought or None
        case "message":
            assert own.content is None or isinstance(own.content, str)
            own.content = (own.content or "") + _text(item.content)
        case "function_call":
            assert item.name is not None
            function = FunctionCall(item.name, item.arguments)
            call = ToolCall(id=item.call_id, type="function", function=function)
            own.tool_calls = [*(own.tool_calls or ()), call]


def _content(path: str, parts: str | Sequence[Part] | None) -> str | list[ContentPart]:
    """Return the parts as one text, unless a file is among them."""
    if parts is None or isinstance(parts, str) or all(part.type != FILE for part in parts):
        return _text(parts)
    return [
        FilePart("file", given=part.attachment(f"{path}[{j}]"))
        if part.type == FILE
        else ContentPart("text", _text([part]))
        for j, part in enumerate(parts)
    ]


def _text(parts: str | Sequence[Part] | None) -> str:
    if parts is None or isinstance(parts, str):
        return parts or ""
    return "".join(part.text or part.refusal or "" for part in parts)


def input_items(asked: str | Sequence[Item], unique_id: str) -> Iterator[Listed]:
    """Yield a request's checked input for storage and listing. Every item has a type and an id.

    Args:
      unique_id: part of the ids that the client has not set.
    """
    items = [Item(role="user", content=asked)] if isinstance(asked, str) else asked
    for i, item in enumerate(items):
        kind = item.kind
        assert kind is not None
        item_id = item.id or f"{_ID_PREFIXES[kind]}_{unique_id}i{i}"
        yield _listed(item, item_id)


def _listed(item: Item, item_id: str) -> Listed:
    match item.kind:
        case "message":
            role: Any = item.role
            content = [_message_part(item, part) for part in _parts(item.content)]
            return ListedMessage(id=item_id, role=role, content=content)
        case "function_call":
            call = (item.call_id or "", item.name or "", item.arguments or "")
            return OutputCall(item_id, *call, status="completed")
        case "function_call_output":
            output = item.output or ""
            if not isinstance(output, str) and any(part.type == FILE for part in output):
                output = [_input_part(part) for part in output]
            else:
                output = _text(output)
            return ListedCallOutput(item_id, item.call_id or "", output)
        case "compaction":
            return Compaction(item_id, item.encrypted_content or "")
        case _:
            thought = [ReasoningText(part.text or "") for part in _parts(item.content)]
            summary = [SummaryText(part.text or "") for part in item.summary or ()]
            return ListedReasoning(item_id, summary, thought)


def compaction(summary: str, unique_id: str) -> Compaction:
    """Return the item that replaces a conversation."""
    content = _COMPACTED + base64.urlsafe_b64encode(summary.encode()).decode()
    return Compaction(f"{_ID_PREFIXES['compaction']}_{unique_id}", content)


def _summary(item: Item) -> str | None:
    """Return the summary in a compaction; None if this server did not create it."""
    content = item.encrypted_content or ""
    if not content.startswith(_COMPACTED):
        return None
    try:
        data = base64.b64decode(content.removeprefix(_COMPACTED), b"-_", validate=True)
        return data.decode() or None
    except ValueError:  # not base64, or not UTF-8
        return None


def _parts(content: str | list[Part] | None) -> list[Part]:
    return [Part("text", content)] if isinstance(content, str) else content or []


def _input_part(part: Part) -> InputText | InputFile:
    if part.type == FILE:
        return InputFile(filename=part.filename, file_data=part.file_data or "")
    return InputText(part.text or "")


def _message_part(item: Item, part: Part) -> InputText | InputFile | OutputText | RefusalText:
    if part.type == "refusal":
        return RefusalText(part.refusal or "")
    if item.role == "assistant":
        return OutputText(part.text or "")
    return _input_part(part)
