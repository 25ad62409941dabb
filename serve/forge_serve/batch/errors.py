"""What can be wrong with a file, and what with one of its lines."""

from __future__ import annotations

from forge_jax.errors import ForgeError


class BatchFileError(ForgeError):
    """A file cannot be read or written, or is not what it would have to be: nothing can go on."""


class LineError(ForgeError):
    """A line is no request. It has this answer, and the others have theirs.

    `code` is one of OpenAI's words for what is wrong with a batch's line, or like them.
    """

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code
