"""The content of chat messages: texts, and lists of text and file parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from forge_jax.errors import RequestError
from forge_serve.generation.files import MAX_NAME_CHARS, Attachment
from forge_serve.openai.structured import asks_for_something
from forge_serve.openapi.schema import NOTHING, TEXT_PART, Schema, nullable

if TYPE_CHECKING:
    from forge_serve.openai.requests import Message

TYPES = ("text", "file")
# Other content parts of OpenAI's API. Errors quote no other type, because it is a client's text.
OTHER_PARTS = frozenset(("image_url", "input_audio", "audio_url", "video_url", "image", "refusal"))
NO_STORE = "the server stores no files; send file_data"
NO_DOWNLOADS = "the server downloads no files; send file_data"
FILE_RULE = "In base64 or as a data URL. The file must be text in UTF-8, or a PDF with text."
# The schemas of OpenAI's fields for a file.
FILE_FIELDS: Schema = {
    "file_data": {"type": "string", "description": FILE_RULE},
    "filename": nullable({"type": "string", "maxLength": MAX_NAME_CHARS}),
    "file_id": NOTHING,
}
_FILE: Schema = {"type": "object", "required": ["file_data"], "properties": FILE_FIELDS}
_FILE_PART: Schema = {
    "type": "object",
    "required": ["type", "file"],
    "properties": {"type": {"const": "file"}, "file": _FILE},
}
CONTENT: Schema = {
    "anyOf": [
        {"type": ["string", "null"]},
        {"type": "array", "items": {"anyOf": [TEXT_PART, _FILE_PART]}},
    ]
}


class FileContent(msgspec.Struct):
    """The file of a content part."""

    filename: str | None = None
    file_data: str | None = None
    file_id: Any = None  # rejected


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    file: FileContent | None = None

    def attachment(self, path: str) -> Attachment:
        """Return the file of a file part.

        Args:
          path: path of the part.

        Raises:
          RequestError: a field is missing or not supported.
        """
        if self.file is None:
            raise RequestError(f"{path}.file is required", param=f"{path}.file")
        return openai_file(
            f"{path}.file", self.file.filename, self.file.file_data, file_id=self.file.file_id
        )


class FilePart(ContentPart, kw_only=True):
    """File part that was converted from another protocol. Its file has the path of that field."""

    given: Attachment

    def attachment(self, path: str) -> Attachment:
        return self.given


def openai_file(
    path: str, name: str | None, data: str | None, *, file_id: Any = None, file_url: Any = None
) -> Attachment:
    """Return the file in OpenAI's fields.

    Args:
      path: path of the object with these fields.

    Raises:
      RequestError: a field is missing or not supported.
    """
    for field, value, reason in (
        ("file_id", file_id, NO_STORE),
        ("file_url", file_url, NO_DOWNLOADS),
    ):
        if asks_for_something(value):
            raise RequestError(f"{path}.{field}: {reason}", param=f"{path}.{field}")
    if data is None:
        raise RequestError(f"{path}.file_data is required", param=f"{path}.file_data")
    return Attachment(f"{path}.file_data", name, data)


def attachments(messages: Sequence[Message]) -> dict[tuple[int, int], Attachment]:
    """Return the files of a chat by the indices of their messages and parts.

    Raises:
      RequestError: a field of a file is missing or not supported.
    """
    return {
        (i, j): part.attachment(f"messages[{i}].content[{j}]")
        for i, message in enumerate(messages)
        if isinstance(message.content, list)
        for j, part in enumerate(message.content)
        if part.type == "file"
    }


def inline(messages: Sequence[Message], texts: Mapping[tuple[int, int], str]) -> None:
    """Replace the content of each message that has files by one text.

    Args:
      texts: the text of each of the `attachments`.

    Raises:
      RequestError: another part is incomplete or not supported.
    """
    for i in {i for i, _ in texts}:
        parts = messages[i].content
        assert isinstance(parts, list)
        check_parts(f"messages[{i}].content", parts)
        messages[i].content = _joined(parts, {j: text for (k, j), text in texts.items() if k == i})


def _joined(parts: Sequence[ContentPart], files: Mapping[int, str]) -> str:
    """Return the parts as one text, with an empty line before and after each file."""
    found = [""]
    for j, part in enumerate(parts):
        if j in files:
            found += [files[j], ""]
        else:
            found[-1] += part.text or ""
    return "\n\n".join(text for text in found if text)


def check_parts(path: str, parts: Sequence[ContentPart]) -> None:
    """Check the types of parts, and that text parts have a text.

    Raises:
      RequestError: a part is incomplete or not supported. `param` is its path.
    """
    for j, part in enumerate(parts):
        if part.type not in TYPES:
            kind = repr(part.type) if part.type in OTHER_PARTS else "this type"
            raise RequestError(
                f"{path}[{j}]: only text and file parts are supported, not {kind}: send the "
                "message without it",
                param=f"{path}[{j}]",
            )
        if part.type == "text" and part.text is None:
            raise RequestError(f"{path}[{j}].text is required", param=f"{path}[{j}].text")


def text_of(message: Mapping[str, Any]) -> str:
    """Return the whole text of a message from `template_messages`."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
