"""Finding markers in a text that comes in pieces."""

from __future__ import annotations


def find_first(text: str, markers: tuple[str, ...]) -> tuple[int, str]:
    """Where the first of the markers is in a text, and which; (-1, "") if none is."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=(-1, ""))


def begun_at_end(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end of a text may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if marker.startswith(text[-size:]):
                longest = size
                break
    return longest
