"""Files in requests: their text, and its form in a prompt."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from forge_jax.errors import RequestError
from forge_serve.generation.pdf import Pdf, PdfError
from forge_serve.limits import KIB

if TYPE_CHECKING:
    from forge_serve.generation.workers import TextWork

THREAD_FROM_CHARS = 64 * KIB  # larger files are decoded in a thread
MAX_NAME_CHARS = 255
NAME = "attachment"  # for files without a name
PDF_TYPE = "application/pdf"
_SCHEME, _BASE64 = "data:", ";base64"


@dataclass(frozen=True, slots=True, eq=False)
class Attachment:
    """A file in a request.

    Attributes:
      path: path of the field with the data, for errors.
      name: the file's name; None: unknown.
      data: the file in base64, as such or in a data URL; or its text, if it is `plain`.
      media_type: the type that the client gives; "": unknown. A data URL may have its own.
    """

    path: str
    name: str | None
    data: str
    media_type: str = ""
    plain: bool = False

    def __post_init__(self) -> None:
        if len(self.name or "") > MAX_NAME_CHARS:
            raise self.error(f"the file's name is longer than {MAX_NAME_CHARS} characters")

    def error(self, reason: str) -> RequestError:
        return RequestError(f"{self.path}: {reason}", param=self.path)

    def in_prompt(self, text: str) -> str:
        """Return the form that the file has in a prompt. The web page uses the same one."""
        name = " ".join((self.name or "").split()) or NAME
        return f"File {name}:\n\n{text}"


async def read_files[K](files: Mapping[K, Attachment], work: TextWork) -> dict[K, str]:
    """Return the form of each file in a prompt.

    Raises:
      RequestError: a file has no usable text. `param` is its path.
      OverloadedError: too many files are waiting.
    """
    return {key: file.in_prompt(await _text(file, work)) for key, file in files.items()}


async def _text(file: Attachment, work: TextWork) -> str:
    if file.plain:
        return file.data
    num_chars, decode = len(file.data), partial(_decoded, file)
    if num_chars < THREAD_FROM_CHARS:
        found = decode()
    else:
        [found] = await work.run(num_chars, [decode])
    if isinstance(found, str):
        return found
    try:
        return await work.workers.pdfs.text(work.tenant, found, work.max_bytes)
    except PdfError as error:
        raise file.error(str(error)) from error


def _decoded(file: Attachment) -> str | Pdf:
    """Return the text of a text file, or the PDF.

    Raises:
      RequestError: the file is not in base64, or neither a PDF nor text.
    """
    media_type, data = file.media_type, file.data
    if data[: len(_SCHEME)].lower() == _SCHEME:
        head, _, data = data.partition(",")
        media_type = head[len(_SCHEME) :].lower()
        if not media_type.endswith(_BASE64):
            raise file.error("a data URL must contain base64: start it with data:TYPE;base64,")
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError as error:
        raise file.error(
            "send the file in base64 or as a data URL; the server downloads no files"
        ) from error
    pdf = Pdf.of(content)
    if pdf is not None:
        return pdf
    if media_type.startswith(PDF_TYPE) or (file.name or "").lower().endswith(".pdf"):
        raise file.error("the file is not a PDF: save it again, or send the text")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise file.error("the file is neither a PDF nor text in UTF-8: send the text")
    return text
