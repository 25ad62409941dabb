"""Activations on the host: arrays by name, with a row for each of consecutive token positions."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a request's pattern matches, as `fnmatch` matches them.

    `fnmatch` itself keeps up to 32,768 compiled patterns, so requests could fill the memory.
    """
    matches = re.compile(fnmatch.translate(pattern)).match
    return [name for name in names if name == pattern or matches(name)]


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """Activations of consecutive token positions of one sequence.

    The activations at a position are those that the model computes from the token there. Position 0
    is the first token of the prompt.

    Attributes:
      start: the position of the first row.
      arrays: dtype[rows, ...] by name, in the model's dtype. bfloat16 arrays have the dtype of the
        package `ml_dtypes`.
    """

    start: int
    arrays: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return next((len(array) for array in self.arrays.values()), 0)

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + len(self)

    def part(self, start: int, end: int) -> Activations | None:
        """Return the rows at the positions from `start` up to `end`; None if there are none."""
        start, end = max(start, self.start), min(end, self.end)
        if start >= end:
            return None
        if (start, end) == (self.start, self.end):
            return self
        rows = slice(start - self.start, end - self.start)
        return Activations(start, {name: array[rows] for name, array in self.arrays.items()})


def joined(parts: Seq[Activations]) -> Activations:
    """Return all rows of parts that follow each other.

    Args:
      parts: at least one, in the order of their positions, with the same names.
    """
    if len(parts) == 1:
        return parts[0]
    for before, after in itertools.pairwise(parts):
        assert before.end == after.start, "rows are missing"
    first = parts[0]
    return Activations(
        first.start,
        {name: np.concatenate([each.arrays[name] for each in parts]) for name in first.arrays},
    )
