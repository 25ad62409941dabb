"""A finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Issue:
    """A finding: a "problem" prevents something from working, and a "note" is information."""

    level: Literal["problem", "note"]
    what: str
    remedy: str
