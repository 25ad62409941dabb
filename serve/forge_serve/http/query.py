"""Parameters of the query string."""

from __future__ import annotations

from aiohttp import web

from forge_jax.errors import RequestError


def whole_number(http: web.Request, name: str, default: int) -> int:
    """Return a non-negative integer parameter.

    Raises:
      RequestError: the parameter is not a non-negative integer.
    """
    text = http.query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise RequestError(f"{name} must be a whole number", param=name)
    return int(text)


def is_true(http: web.Request, name: str) -> bool:
    """Return True if a boolean parameter is set."""
    return http.query.get(name, "").lower() in ("true", "1")
