"""Which modules a name or pattern of `config.json` means.

Patterns are regular expressions of strangers, and not given to an engine that backtracks: those
that are used are characters, `.`, classes, `*`, `+`, `?` and groups of alternative words, and are
matched in time proportional to pattern times name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

MAX_PATTERN = 256

_TOKEN = re.compile(
    r"(?P<end>\$$)"
    r"|\((?:\?:)?(?P<words>[\w.\-]{1,64}(?:\|[\w.\-]{1,64}){0,31})\)(?P<maybe>\??)"
    r"|(?P<atom>\[\^?[\w\-.]{1,64}\]|\\[.dw\-_]|[\w.\-])(?P<times>[*+?]?)"
)


@dataclass(frozen=True)
class _Token:
    fits: Callable[[str], bool] | None  # one character; None: words
    words: tuple[str, ...]
    least: int  # 0 or 1
    many: bool


@cache
def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Whether a name matches from its start, as `re.match` says.

    Raises:
      ValueError: a pattern that is too long, or has another construct.
    """
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"it is longer than {MAX_PATTERN} characters")
    tokens: list[_Token] = []
    at, to_end = int(pattern.startswith("^")), False
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None:
            raise ValueError(f"what stands from character {at} on is not supported")
        at = token.end()
        if token["end"]:
            to_end = True
        elif token["words"]:
            words = tuple(token["words"].split("|"))
            if any("." in word for word in words):
                raise ValueError("a dot within a group is not supported")
            tokens.append(_Token(None, words, 0 if token["maybe"] else 1, many=False))
        else:
            times = token["times"]
            fits = _fits(token["atom"])
            tokens.append(_Token(fits, (), 0 if times in ("*", "?") else 1, times in ("*", "+")))
    # `+` is one and then any number.
    flat: list[_Token] = []
    for token in tokens:
        if token.many and token.least:
            flat.append(_Token(token.fits, (), 1, many=False))
        flat.append(_Token(token.fits, token.words, 0, many=True) if token.many else token)
    return lambda name: _matches(flat, name, to_end)


def _matches(tokens: list[_Token], name: str, to_end: bool) -> bool:
    places = {0}  # where in the name the tokens so far may end
    for token in tokens:
        after = set() if token.least else set(places)
        if token.fits is None:
            after |= {p + len(w) for p in places for w in token.words if name.startswith(w, p)}
        elif token.many:
            for place in places:
                while place < len(name) and place + 1 not in after and token.fits(name[place]):
                    place += 1
                    after.add(place)
        else:
            after |= {p + 1 for p in places if p < len(name) and token.fits(name[p])}
        places = after
    return len(name) in places if to_end else bool(places)


@cache
def _fits(atom: str) -> Callable[[str], bool]:
    if len(atom) == 1 and atom != ".":
        return atom.__eq__
    try:
        one = re.compile(atom)
    except re.error as error:  # a class such as [z-a]
        raise ValueError(str(error)) from None
    return lambda char: one.fullmatch(char) is not None


def within(part: str, module: str) -> bool:
    """Whether `part` is the module, or some of its path: "mlp.gate" of "layers.0.mlp.gate"."""
    return f".{part}." in f".{module}."
