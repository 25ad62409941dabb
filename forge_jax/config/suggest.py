"""Suggestions for misspelled names in error messages."""

from __future__ import annotations

from collections.abc import Iterable

CUTOFF = 0.6  # lowest ratio of difflib; suggestions below it are noise
MAX_CHARS = 256  # Clients choose names. Comparing longer ones would be slow.


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to `name`, ignoring case; None if none is similar."""
    import difflib

    if len(name) > MAX_CHARS:
        return None
    by_folded = {each.casefold(): each for each in known}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=CUTOFF)
    return by_folded[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean X?"`, or `""` if no known name is similar."""
    found = nearest(name, known)
    return "" if found is None else f"; did you mean {found}?"
