"""The embedding lookup: rows of a table by token."""

from forge_kernels.embed.api import embed

__all__ = ["embed"]
