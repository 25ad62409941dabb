"""Module names: matching them against names and patterns of `config.json`, and their prefixes.

Patterns come from the checkpoint and are untrusted, so RE2 matches them. It takes time proportional
to pattern times name, and rejects backreferences and lookarounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import re2

MAX_PATTERN = 256  # characters
MAX_PATTERNS = 1000  # patterns in one list
PATTERN_BYTES = 2**16  # per compiled pattern; RE2's default allows 40 MiB for a few repetitions
AMBIGUOUS = ("{,", "[[", r"\Q", r"\C")  # have another meaning in RE2 than in Python


# Prefixes of the text model in multimodal checkpoints, and in checkpoints of texts: transformers 5,
# transformers 4, and both.
_TEXT_SIDE = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    *((f"model.{part}.", f"model.{part}.") for part in ("embed_tokens", "layers", "norm")),
    ("lm_head.", "lm_head."),
)


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


def text_name(tensor: str) -> str | None:
    """Return the name in a text checkpoint of a multimodal one's tensor.

    None if the tensor is not part of the text model.
    """
    for theirs, ours in _TEXT_SIDE:
        if tensor.startswith(theirs):
            return ours + tensor.removeprefix(theirs)
    return None


def multimodal_names(module: str) -> tuple[str, ...]:
    """Return the names that a text model's module may have in a multimodal checkpoint."""
    dotted = f"{module}."
    return tuple(
        (theirs + dotted.removeprefix(ours)).removesuffix(".")
        for theirs, ours in _TEXT_SIDE
        if dotted.startswith(ours)
    )
