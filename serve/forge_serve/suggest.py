"""The known name that a mistyped one looks most like, for messages and the log."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_CHARS = 64  # of a name: a longer one is compared with nothing, which bounds the work
_CUTOFF = 0.7  # of difflib's ratio


def nearest(given: str, known: Iterable[str]) -> str | None:
    """The most similar known name; None if none is similar."""
    if len(given) > MAX_CHARS:
        return None
    found = difflib.get_close_matches(given, list(known), n=1, cutoff=_CUTOFF)
    return found[0] if found else None


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """`"; did you mean NAME?"`, or nothing."""
    found = nearest(given, known)
    return "" if found is None else f"; did you mean {found}?"
