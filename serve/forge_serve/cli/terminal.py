"""Text of others on a terminal: nothing in it may drive the terminal."""

from __future__ import annotations

import sys
from typing import TextIO

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
MAX_LINE_CHARS = 1000  # of an error

# Control characters are shown as pictures of themselves (U+2400 and on), those without one as
# U+FFFD; so are those that turn the direction of the text around them, which could hide what it
# says. Line feeds and tabs are harmless; a carriage return is left out, for CR LF ends lines, too.
_HARMLESS: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x0D: "",
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
    **dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd"),
}


def harmless(text: str) -> str:
    """The text without anything that a terminal obeys.

    It looks at single characters, so the pieces of a stream may be given one by one.
    """
    return text if text.isalnum() else text.translate(_HARMLESS)


def one_line(text: str) -> str:
    """The same in one line, cut if it is very long."""
    line = harmless(" ".join(text.split()))
    return line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + "…"


class Answer:
    """Where an answer is written, piece by piece: to a terminal harmless, elsewhere as it is."""

    def __init__(self, file: TextIO | None = None):
        self._file = sys.stdout if file is None else file
        self.on_terminal = self._file.isatty()
        if hasattr(self._file, "reconfigure"):  # what the encoding lacks is no reason to end
            self._file.reconfigure(errors="replace")  # type: ignore[attr-defined]

    def write(self, text: str, *, dim: bool = False) -> None:
        """Writes a piece at once; `dim` shows on terminals alone."""
        if not text:
            return
        if self.on_terminal:
            text = harmless(text)
            if dim:
                text = f"{DIM}{text}{PLAIN}"
        self._file.write(text)
        self._file.flush()
