"""Match module names against the names and patterns of `config.json`.

Patterns come from the checkpoint and are untrusted, so RE2 matches them. It takes time proportional
to pattern times name, and rejects backreferences and lookarounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import re2

MAX_PATTERN = 256  # characters
MAX_PATTERNS = 1000  # in one list
PATTERN_BYTES = 2**16  # per compiled pattern; RE2's default allows 40 MiB for a few repetitions
AMBIGUOUS = ("{,", "[[", r"\Q", r"\C")  # have another meaning in RE2 than in Python


@lru_cache(maxsize=MAX_PATTERNS)
def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Return a function that is true if a name matches from its start, as with `re.match`.

    Raises:
      ValueError: the pattern is too long or costly, or has another meaning in RE2 than in Python.
    """
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"it is longer than {MAX_PATTERN} characters")
    if any(each in pattern for each in AMBIGUOUS):
        raise ValueError("it is not supported: it has different meanings in RE2 and Python")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = PATTERN_BYTES
    try:
        compiled = re2.compile(pattern, options=options)
    except re2.error as error:
        (reason,) = error.args
        raise ValueError(f"it is not supported by RE2: {reason.decode()}") from None
    return lambda name: compiled.match(name) is not None


def within(part: str, module: str) -> bool:
    """Return True if `part` is the module or a part of its path ("mlp.gate" of "0.mlp.gate")."""
    return f".{part}." in f".{module}."
