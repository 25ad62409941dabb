"""The text of PDF files, which processes with limits extract.

A PDF is untrusted input for a large parser. Each PDF is therefore read in a separate short-lived
process (`pdf_worker`). Texts are cached, because clients send a chat's files again with every turn.
"""

from __future__ import annotations

import hashlib
import importlib.util
import signal
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from forge_jax.errors import OverloadedError
from forge_serve.generation.pdf_worker import Answer, Problem
from forge_serve.limits import MIB

if TYPE_CHECKING:
    from forge_serve.generation.workers import Lane

MAX_PROCESSES = 2
CACHED_BYTES = 16 * MIB  # size limit of all cached texts, in UTF-8
_START = b"%PDF-"
_START_BYTES = 1024  # PDF readers search for the start in this part of a file


@dataclass(frozen=True, kw_only=True)
class PdfLimits:
    """Limits of one PDF, in addition to the limits of its request."""

    pages: int = 500
    cpu_s: int = 10
    memory_bytes: int = 512 * MIB
    wait_s: float = 60.0  # longest wait for a process that gets no CPU time


class PdfError(Exception):
    """A PDF has no usable text. The message gives the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Pdf:
    data: bytes
    digest: bytes

    @classmethod
    def of(cls, data: bytes) -> Pdf | None:
        """Return the file as a PDF, or None if it is another kind of file."""
        if _START not in data[:_START_BYTES]:
            return None
        return cls(data, hashlib.sha256(data).digest())


class PdfReader:
    """Extracts the text of PDFs. Owned by one event loop.

    Args:
      lane: the threads that wait for the processes.
    """

    def __init__(self, lane: Lane, limits: PdfLimits | None = None):
        self._lane = lane
        self._limits = limits or PdfLimits()
        self._texts: OrderedDict[tuple[str, bytes], str] = (
            OrderedDict()
        )  # least recently used first
        self._cached_bytes = 0

    async def text(self, tenant: str, pdf: Pdf, max_bytes: int) -> str:
        """Return the text of a PDF.

        Args:
          tenant: the owner of the PDF. Tenants share no cached texts.
          max_bytes: maximum size of the text in UTF-8.

        Raises:
          PdfError: the PDF has no usable text, or pypdf is not installed.
          OverloadedError: too many PDFs are waiting, or the process gets no CPU time.
        """
        key = (tenant, pdf.digest)
        text = self._texts.get(key)
        if text is None:
            extract = partial(extract_text, pdf.data, self._limits, max_bytes)
            with self._lane.admit(tenant, len(pdf.data)):
                text = await self._lane.run(tenant, extract)
        self._keep(key, text)
        return text

    def _keep(self, key: tuple[str, bytes], text: str) -> None:
        if key not in self._texts:
            self._cached_bytes += len(text.encode())
        self._texts[key] = text
        self._texts.move_to_end(key)
        while self._cached_bytes > CACHED_BYTES:
            _, dropped = self._texts.popitem(last=False)
            self._cached_bytes -= len(dropped.encode())


def extract_text(data: bytes, limits: PdfLimits, max_bytes: int) -> str:
    """Return the text of a PDF, extracted in another process.

    Raises:
      PdfError: the PDF has no usable text, or pypdf is not installed.
      OverloadedError: the process cannot be started, or gets no CPU time.
    """
    if importlib.util.find_spec("pypdf") is None:
        raise PdfError("this server cannot read PDF files: install its extra pdf, or send the text")
    numbers = (limits.pages, max_bytes, limits.cpu_s, limits.memory_bytes)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "forge_serve.generation.pdf_worker", *map(str, numbers)],
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limits.wait_s,
            start_new_session=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OverloadedError("PDF files cannot be read now: try again later") from error
    if ended.returncode == -signal.SIGXCPU:
        raise PdfError(
            f"the PDF takes more than {limits.cpu_s} s of CPU time to read: send fewer pages, or "
            "the text"
        )
    try:
        answer = msgspec.json.decode(ended.stdout, type=Answer)
    except msgspec.DecodeError:  # the process ran out of memory, or crashed, before it answered
        answer = Answer(problem="memory" if ended.returncode >= 0 else "damaged")
    if answer.problem is not None:
        raise PdfError(_reason(answer.problem, limits, max_bytes))
    return answer.text


def _reason(problem: Problem, limits: PdfLimits, max_bytes: int) -> str:
    match problem:
        case "encrypted":
            return "the PDF is encrypted: remove its password"
        case "pages":
            return f"the PDF has more than {limits.pages} pages: send fewer pages"
        case "text":
            return (
                f"the PDF has more than {max_bytes} bytes of text (--max-text-bytes): send fewer "
                "pages"
            )
        case "memory":
            return (
                f"the PDF needs more than {limits.memory_bytes // MIB} MiB of memory to read: send "
                "fewer pages, or the text"
            )
        case "complex":
            return "the PDF is too complex to read: send fewer pages, or the text"
        case "no text":
            return (
                "the PDF has no text; its pages may be images: run optical character recognition "
                "(OCR) on it, or send the text"
            )
        case "damaged":
            return "the PDF is damaged or incomplete: save it again, or send the text"
