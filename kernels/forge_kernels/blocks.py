"""Values in blocks, as in GGUF's types: 8, 6 or 4 bits, with scales of one level or two.

A row consists of blocks, and a block of groups. A value is `value * scale + minimum`. The scale of
a group is its block's float16 factor, times an int8 number if a block has several groups. The
minimum is made in the same way from another factor. Everything is exact in float32 except for the
final sum, which is rounded once, so all implementations get the same number.

Used both for reading files and for multiplying (`forge_kernels.linear`); depends on numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

BITS = {"int8": 8, "int6": 6, "int4": 4, "iq4": 4}
# The values of GGUF's IQ4 types (`kvalues_iq4nl`).
IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


@dataclass(frozen=True)
class Blocks:
    """The way the values of a row are stored.

    Attributes:
      values: the type. With minima, int4 is from 0 to 15 and int6 from 0 to 63. Without, they are
        from -8 to 7 and from -32 to 31. iq4 has `IQ4_VALUES` in groups of 32, without minima. XLA
        and GPUs keep int6 and iq4 in 8 bits.
      group: the number of values that share a scale.
      size: the number of values in a block; equal to `group` if there is one level.
      minima: True if groups have minima.
    """

    values: Literal["int8", "int6", "int4", "iq4"]
    group: int
    size: int
    minima: bool = False

    def __post_init__(self) -> None:
        assert self.group % 16 == 0 and self.size % self.group == 0, self
        assert self.values != "iq4" or (self.group == 32 and not self.minima), self

    @property
    def two_levels(self) -> bool:
        return self.group < self.size

    def cut(self, columns: int) -> Blocks | None:
        """Return blocks for part of a row with so many columns, which may split a block.

        Blocks and groups may become smaller, with the same values and repeated factors. None if a
        group would have fewer than 16 values.
        """
        size = math.gcd(self.size, columns)
        group = min(self.group, size // 2 if self.two_levels else size)
        if not group or group % 16:
            return None
        kept = self.in_bytes if self.values == "iq4" and group < self.group else self
        return replace(kept, size=size, group=group)

    @property
    def bytes(self) -> int:
        """The bytes of a block of one row."""
        scales = (2 if self.minima else 1) * (2 + self.two_levels * self.size // self.group)
        return scales + self.size * BITS[self.values] // 8

    @property
    def offset(self) -> int:
        """The number added to int6 and int4 values, so that stored ones are not negative."""
        signed = self.minima or self.values in ("int8", "iq4")
        return 0 if signed else 1 << (BITS[self.values] - 1)

    @property
    def in_bytes(self) -> Blocks:
        """The same with int6 and iq4 values in 8 bits, as XLA and GPUs keep them."""
        return replace(self, values="int8") if self.values in ("int6", "iq4") else self


@dataclass(frozen=True, eq=False)
class BlockValues:
    """Some rows [n, K] of a matrix in B blocks and G groups."""

    values: np.ndarray  # int8[n, K]
    factor: np.ndarray  # f16[n, B]
    scale: np.ndarray | None  # int8[n, G], if two levels
    minimum_factor: np.ndarray | None  # f16[n, B], if minima
    minimum: np.ndarray | None  # int8[n, G], if two levels and minima

    def each(self, change: Callable[[np.ndarray], np.ndarray]) -> BlockValues:
        """Return the values with `change` applied to all arrays."""

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
        """Return the values of some columns, in the blocks that `Blocks.cut` returned for them."""
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
        """Return the values with zeros for rows whose `exists`, bool[n], is false."""

        def factor(array: np.ndarray) -> np.ndarray:
            return np.where(exists[:, None], array, np.float16(0))

        minimum = None if self.minimum_factor is None else factor(self.minimum_factor)
        return replace(self, factor=factor(self.factor), minimum_factor=minimum)

    def with_one_level(self) -> BlockValues:
        """Return the values with a float16 factor per group (see `one_level`)."""
        minimum = self.minimum_factor
        return BlockValues(
            values=self.values,
            factor=one_level(self.factor, self.scale),
            scale=None,
            minimum_factor=None if minimum is None else one_level(minimum, self.minimum),
            minimum=None,
        )

    def floats(self) -> np.ndarray:
        """Return the values as f32[n, K]."""
        rows, columns = self.values.shape
        scale = _float32(self.factor, self.scale)
        out = self.values.astype(np.float32).reshape(rows, scale.shape[1], -1)
        out *= scale[..., None]
        if self.minimum_factor is not None:
            out += _float32(self.minimum_factor, self.minimum)[..., None]
        return out.reshape(rows, columns)


def joined(parts: Sequence[BlockValues], axis: int = 0) -> BlockValues:
    """Concatenate the rows of several parts, or their columns (`axis` 1)."""
    if len(parts) == 1:
        return parts[0]

    def maybe(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
        there = [array for array in arrays if array is not None]
        assert len(there) in (0, len(arrays)), "blocks of different kinds"
        return np.concatenate(there, axis) if there else None

    return BlockValues(
        values=np.concatenate([part.values for part in parts], axis),
        factor=np.concatenate([part.factor for part in parts], axis),
        scale=maybe([part.scale for part in parts]),
        minimum_factor=maybe([part.minimum_factor for part in parts]),
        minimum=maybe([part.minimum for part in parts]),
    )


def one_level(factor: np.ndarray, by_group: np.ndarray | None) -> np.ndarray:
    """Return the product of two levels, factor f16[..., B] and int8[..., G], as f16[..., G].

    Raises:
      ValueError: a product exceeds float16.
    """
    with np.errstate(over="ignore"):
        product = _float32(factor, by_group).astype(np.float16)
    if np.isinf(product).any() and not np.isinf(factor).any():
        raise ValueError(
            "a scale of a group exceeds float16, in which GPUs keep it: use a file with types of "
            "one level, such as Q4_0 or Q8_0"
        )
    return product


def _float32(factor: np.ndarray, by_group: np.ndarray | None) -> np.ndarray:
    """Return factor * by_group as f32[..., G]."""
    wide = factor.astype(np.float32)
    if by_group is None:
        return wide
    of_block = by_group.shape[-1] // factor.shape[-1]
    return np.repeat(wide, of_block, axis=-1) * by_group.astype(np.float32)
