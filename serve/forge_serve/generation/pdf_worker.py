"""The process that extracts the text of one PDF, with limits on time, memory and output.

    python -m forge_serve.generation.pdf_worker PAGES TEXT_BYTES CPU_S MEMORY_BYTES

It reads the PDF from standard input and writes an `Answer` as JSON to standard output. A PDF is
untrusted, so the limits apply before the first byte is read. At the limit of CPU time, the kernel
ends the process with SIGXCPU.
"""

from __future__ import annotations

import io
import os
import resource
import sys
from collections.abc import Iterator
from typing import IO, Literal

import msgspec

Problem = Literal["encrypted", "pages", "text", "memory", "complex", "no text", "damaged"]


class Answer(msgspec.Struct):
    """The text of a PDF, or the reason why there is none."""

    text: str = ""
    problem: Problem | None = None


class _ProblemError(Exception):
    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.problem: Problem = problem


def main() -> None:
    pages, text_bytes, cpu_s, memory_bytes = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)  # it writes no files
    _limit(resource.RLIMIT_NPROC, 0)  # and starts no processes
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps printed text out of the answer
    answer = _answer(sys.stdin.buffer, pages, text_bytes)
    answers.write(msgspec.json.encode(answer))
    answers.flush()


def _limit(kind: int, most: int) -> None:
    """Lower a limit of this process. A lower one that it has inherited stays."""
    inherited = resource.getrlimit(kind)[1]
    most = most if inherited == resource.RLIM_INFINITY else min(most, inherited)
    resource.setrlimit(kind, (most, most))


def _answer(file: IO[bytes], pages: int, text_bytes: int) -> Answer:
    try:
        text = "\n\n".join(_pages(io.BytesIO(file.read()), pages, text_bytes))
    except _ProblemError as error:
        return Answer(problem=error.problem)
    except MemoryError:
        return Answer(problem="memory")
    except Exception:  # pypdf raises errors of any type for damaged files
        return Answer(problem="damaged")
    return Answer(text) if text else Answer(problem="no text")


def _pages(file: IO[bytes], pages: int, text_bytes: int) -> Iterator[str]:
    """Yield the text of each page that has some.

    Raises:
      _ProblemError: the PDF is encrypted, or exceeds a limit of this process or of pypdf.
    """
    from pypdf import PdfReader  # an extra
    from pypdf.errors import DependencyError, LimitReachedError

    try:
        reader = PdfReader(file)
        # Readers need no password if there is only an owner's.
        if reader.is_encrypted and not reader.decrypt(""):
            raise _ProblemError("encrypted")
        for i, page in enumerate(reader.pages):
            if i == pages:
                raise _ProblemError("pages")
            text = _clean(page.extract_text())
            text_bytes -= len(text.encode())
            if text_bytes < 0:
                raise _ProblemError("text")
            if text:
                yield text
    except DependencyError as error:  # AES, which needs a package in C
        raise _ProblemError("encrypted") from error
    except LimitReachedError as error:
        raise _ProblemError("complex") from error


def _clean(text: str) -> str:
    """Return the text without lone surrogates, NULs and space at its ends."""
    return text.encode("utf-8", "replace").decode().replace("\0", "").strip()


if __name__ == "__main__":
    main()
