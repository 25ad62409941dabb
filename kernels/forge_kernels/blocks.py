"""Values in blocks, as GGUF's types have them: 8 or 4 bits, with scales of one level or two.

A row is cut into blocks, and a block into groups. A value is `value * scale + minimum`, where the
scale of a group is its block's float16 factor, times an int8 number where there are several groups
in a block, and the minimum is made in the same way from another factor. All of that is exact in
float32 but for the last sum, which is rounded once, so whoever computes it gets the same number.

Known to who reads files and to who multiplies (`forge_kernels.linear`); numpy alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Blocks:
    """How the values of a row are kept.

    Attributes:
      values: int8; or int4: from 0 to 15 with minima, from -8 to 7 without.
      group: values that share a scale. size: of a block; the same where there is one level.
    """

    values: Literal["int8", "int4"]
    group: int
    size: int
    minima: bool = False

    def __post_init__(self) -> None:
        assert self.group % 16 == 0 and self.size % self.group == 0, self

    @property
    def two_levels(self) -> bool:
        return self.group < self.size

    def cut(self, columns: int) -> Blocks | None:
        """Blocks for a part of a row with so many columns, which may end within one of these.

        The same values then have smaller blocks and groups, whose factors are told more often.
        None: there are none, for a group would be smaller than 16.
        """
        size = math.gcd(self.size, columns)
        group = min(self.group, size // 2 if self.two_levels else size)
        return replace(self, size=size, group=group) if group and group % 16 == 0 else None

    @property
    def bytes(self) -> int:
        """Of a block of one row."""
        scales = (2 if self.minima else 1) * (2 + self.two_levels * self.size // self.group)
        return scales + self.size // (2 if self.values == "int4" else 1)


@dataclass(frozen=True, eq=False)
class BlockValues:
    """Some rows [n, K] of a matrix in B blocks and G groups."""

    values: np.ndarray  # int8[n, K]
    factor: np.ndarray  # f16[n, B]
    scale: np.ndarray | None  # int8[n, G], in two levels
    minimum_factor: np.ndarray | None  # f16[n, B], with minima
    minimum: np.ndarray | None  # int8[n, G], in two levels with minima

    def each(self, change: Callable[[np.ndarray], np.ndarray]) -> BlockValues:
        """With other arrays of all of them."""

        def maybe(array: np.ndarray | None) -> np.ndarray | None:
            return None if array is None else change(array)

        return BlockValues(
            values=change(self.values),
            factor=change(self.factor),
            scale=maybe(self.scale),
            minimum_factor=maybe(self.minimum_factor),
            minimum=maybe(self.minimum),
        )

    def columns(self, begin: int, end: int, blocks: Blocks) -> BlockValues:
        """Those of some columns, in the blocks that `Blocks.cut` gives for as many."""
        length = self.values.shape[1]

        def of(array: np.ndarray | None, size: int) -> np.ndarray | None:
            if array is None:
                return None
            fine = np.repeat(array, length // array.shape[1] // size, axis=1)
            return fine[:, begin // size : end // size]

        factor = of(self.factor, blocks.size)
        assert factor is not None
        return BlockValues(
            values=self.values[:, begin:end],
            factor=factor,
            scale=of(self.scale, blocks.group),
            minimum_factor=of(self.minimum_factor, blocks.size),
            minimum=of(self.minimum, blocks.group),
        )

    def only(self, exists: np.ndarray) -> BlockValues:
        """With zeros for rows that do not exist, bool[n]."""

        def factor(array: np.ndarray) -> np.ndarray:
            return np.where(exists[:, None], array, np.float16(0))

        minimum = None if self.minimum_factor is None else factor(self.minimum_factor)
        return replace(self, factor=factor(self.factor), minimum_factor=minimum)

    def floats(self) -> np.ndarray:
        """f32[n, K], by the definition."""
        rows, columns = self.values.shape
        scale = _float32(self.factor, self.scale)
        out = self.values.astype(np.float32).reshape(rows, scale.shape[1], -1)
        out *= scale[..., None]
        if self.minimum_factor is not None:
            out += _float32(self.minimum_factor, self.minimum)[..., None]
        return out.reshape(rows, columns)


def joined(parts: Sequence[BlockValues]) -> BlockValues:
    """One below the other."""

    def maybe(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
        there = [array for array in arrays if array is not None]
        assert len(there) in (0, len(arrays)), "blocks that are not alike"
        return np.concatenate(there) if there else None

    return BlockValues(
        values=np.concatenate([part.values for part in parts]),
        factor=np.concatenate([part.factor for part in parts]),
        scale=maybe([part.scale for part in parts]),
        minimum_factor=maybe([part.minimum_factor for part in parts]),
        minimum=maybe([part.minimum for part in parts]),
    )


def _float32(factor: np.ndarray, by_group: np.ndarray | None) -> np.ndarray:
    """f32[n, G]."""
    wide = factor.astype(np.float32)
    if by_group is None:
        return wide
    of_block = by_group.shape[1] // factor.shape[1]
    return np.repeat(wide, of_block, axis=1) * by_group.astype(np.float32)
