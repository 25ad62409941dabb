"""Search for markers in a text that arrives in pieces."""

from __future__ import annotations


def find_first(text: str, markers: tuple[str, ...]) -> tuple[int, str]:
    """Return the position of the first marker in a text, and the marker; (-1, "") if none."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=(-1, ""))


def begun_at_end(text: str, markers: tuple[str, ...]) -> int:
    """Return the length of the longest end of a text that begins a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if marker.startswith(text[-size:]):
                longest = size
                break
    return longest
