"""Errors of batch files and of their lines."""

from __future__ import annotations

from forge_jax.errors import ForgeError


class BatchFileError(ForgeError):
    """A file cannot be read or written, or has invalid contents. The run ends."""


class LineError(ForgeError):
    """A line is not a valid request. The error is its response; other lines are not affected.

    `code` is one of OpenAI's error codes for batch lines, or follows their style.
    """

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code
