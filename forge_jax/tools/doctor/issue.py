"""One thing that is not as it should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Issue:
    """A "problem" keeps something from working that is meant to; a "note" is good to know."""

    level: Literal["problem", "note"]
    what: str
    remedy: str
