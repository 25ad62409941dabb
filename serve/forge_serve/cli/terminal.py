"""Untrusted text on a terminal. Control characters are replaced so that they have no effect."""

from __future__ import annotations

import sys
from typing import TextIO

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
MAX_LINE_CHARS = 1000  # limit of an error line

# Control characters are replaced by their control pictures (U+2400 and up), or by U+FFFD if they
# have none. Bidirectional controls also become U+FFFD, because they can reorder and so hide text.
# Line feeds and tabs are kept. Carriage returns are removed, because CR LF also ends lines.
_HARMLESS: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x0D: "",
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
    **dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd"),
}


def harmless(text: str) -> str:
    """Return the text with control characters replaced.

    Each character is replaced on its own, so a stream may be passed piece by piece.
    """
    return text if text.isalnum() else text.translate(_HARMLESS)


def one_line(text: str) -> str:
    """Return the harmless text in one line of at most `MAX_LINE_CHARS` characters."""
    line = harmless(" ".join(text.split()))
    return line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + "…"


def replace_unencodable(file: TextIO) -> None:
    """Let the file replace characters that its encoding lacks."""
    if hasattr(file, "reconfigure"):
        file.reconfigure(errors="replace")  # type: ignore[attr-defined]


class Answer:
    """Output of an answer, piece by piece. Text is made harmless for terminals only."""

    def __init__(self, file: TextIO | None = None):
        self._file = sys.stdout if file is None else file
        self.on_terminal = self._file.isatty()
        replace_unencodable(self._file)

    def write(self, text: str, *, dim: bool = False) -> None:
        """Write a piece and flush. `dim` applies to terminals only."""
        if not text:
            return
        if self.on_terminal:
            text = harmless(text)
            if dim:
                text = f"{DIM}{text}{PLAIN}"
        self._file.write(text)
        self._file.flush()
