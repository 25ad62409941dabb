"""A parser of the series and labels that a PromQL query reads.

It supports only the constructs of our dashboards and alerts, and rejects all others.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_MATCHER = re.compile(r"\s*([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)\s*\"\"\s*,?")
_GROUPING = re.compile(
    r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([\w\s,]*)\)", re.ASCII
)
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(\{[^}]*\}|\(|)")
_RANGE = re.compile(r"\[[^\]]*\]")
_NUMBER = re.compile(r"(?<![\w:])\d[\w.]*")  # and durations
_KEYWORDS = frozenset(
    "and or unless by without on ignoring group_left group_right offset bool inf nan".split()
)


class Read(NamedTuple):
    """One series that a query reads, and its required labels."""

    series: str
    labels: frozenset[str]


def reads(query: str) -> set[Read]:
    """Return the series of a query, with the labels of their matchers and of the grouping.

    Raises:
      ValueError: Braces contain something other than matchers, or there is no series.
    """
    text = _NUMBER.sub("0", _RANGE.sub("", _STRING.sub('""', query)))
    grouped = {
        label.strip()
        for word, labels in _GROUPING.findall(text)
        if word not in ("without", "ignoring")
        for label in labels.split(",")
        if label.strip()
    }
    text = _GROUPING.sub(" ", text)
    if text.count("{") != text.count("}"):
        raise ValueError(f"a brace is open: {query}")
    found = set()
    for name, rest in _SELECTOR.findall(text):
        if rest == "(" or name.lower() in _KEYWORDS or name.startswith("__"):
            continue
        labels = set()
        inside = rest[1:-1]
        while inside.strip():
            matcher = _MATCHER.match(inside)
            if matcher is None:
                raise ValueError(f"no matcher: {inside!r} in {query}")
            labels.add(matcher.group(1))
            inside = inside[matcher.end() :]
        found.add(Read(name, frozenset(labels | grouped)))
    if not found:
        raise ValueError(f"no series: {query}")
    return found


def label_values(definition: str) -> set[Read]:
    """Return the same for Grafana's `label_values(series, label)` and `label_values(label)`."""
    match = re.fullmatch(r"label_values\(\s*(?:(.*\S)\s*,)?\s*(\w+)\s*\)", definition.strip())
    if match is None:
        raise ValueError(f"no label_values: {definition}")
    selector, label = match.groups()
    if selector is None:
        return {Read("", frozenset({label}))}
    return {Read(series, labels | {label}) for series, labels in reads(selector)}
