"""Matrices in blocks, packed for the CPU kernels: a block of 32 rows is one piece of memory.

The layout is defined in `cpu/src/formats.h`. For plain XLA, values, factors, scales and minima are
separate arrays (`quantized.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from forge_kernels.blocks import IQ4_VALUES, Blocks, BlockValues
from forge_kernels.host_arrays import empty_weight
from forge_kernels.linear.panels import PANEL, rows_of_panels
from forge_kernels.threads import for_each

CHUNK = 2**20  # values per thread and call
MIDDLE = 8  # the offset of stored 4-bit values without minima
_IQ4_NUMBERS = np.zeros(256, np.int8)  # by a value's bits
_IQ4_NUMBERS[IQ4_VALUES.view(np.uint8)] = np.arange(16)


@dataclass(frozen=True)
class BlockPacking:
    """The layout of a matrix [outputs, inputs] in blocks for the CPU kernels.

    `paired` and `experts` are as in `Packing`.

    Attributes:
      activations: if "int8", rows of x are rounded to int8 with a scale per 32 values, and
        multiplied as integers. If None, values become bfloat16, and the result has the bits of a
        bfloat16 matrix. The bytes of the weight are the same.
    """

    blocks: Blocks
    outputs: int
    inputs: int
    paired: bool = False
    experts: int | None = None
    activations: Literal["int8"] | None = None

    def __post_init__(self) -> None:
        if self.activations is None:
            return
        if self.experts is not None:
            raise ValueError("activations of experts in blocks cannot be rounded")
        if self.blocks.group not in (16, 32):
            raise ValueError(
                f"groups must have 16 or 32 values for rounded activations, got {self.blocks.group}"
            )

    @property
    def format(self) -> str:
        rows = "" if self.activations is None else f", {self.activations} rows"
        return f"{self.blocks.values} blocks{rows}"

    @property
    def panels(self) -> int:
        return -(-self.outputs // 2 // 16) if self.paired else -(-self.outputs // PANEL)

    @property
    def weight(self) -> jax.ShapeDtypeStruct:
        blocks = self.inputs // self.blocks.size
        shape = (self.panels, blocks, PANEL * self.blocks.bytes)
        experts = () if self.experts is None else (self.experts,)
        return jax.ShapeDtypeStruct((*experts, *shape), jnp.uint8)

    @property
    def scale(self) -> None:
        return None


Read = Callable[[np.ndarray], BlockValues]  # returns rows by their numbers; thread-safe


def pack_blocks(read: Read, packing: BlockPacking) -> np.ndarray:
    """Pack a matrix on the host, some rows at a time, to u8 of `packing.weight`."""
    weight = empty_weight(packing.weight.shape, packing.weight.dtype)
    rows = rows_of_panels(packing.outputs, packing.panels, packing.paired)
    step = max(1, CHUNK // (PANEL * packing.inputs))

    def work(panel: int) -> None:
        some = rows[panel * PANEL : (panel + step) * PANEL]
        _pack_panels(read(np.maximum(some, 0)), some >= 0, packing, weight[panel : panel + step])

    for_each(work, range(0, packing.panels, step))
    return weight


def _pack_panels(
    rows: BlockValues, exists: np.ndarray, packing: BlockPacking, out: np.ndarray
) -> None:
    """Pack some panels; rows whose `exists`, bool[rows], is false become zeros."""
    blocks, (panels, count, _) = packing.blocks, out.shape
    at = 0

    def put(array: np.ndarray) -> None:  # [panels, count, bytes]
        nonlocal at
        out[:, :, at : at + array.shape[2]] = array
        at += array.shape[2]

    def by_column(array: np.ndarray) -> np.ndarray:
        """Transpose [rows, count * n] to [panels, count, n * 32]."""
        split = array.reshape(panels, PANEL, count, -1).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(split).reshape(panels, count, -1).view(np.uint8)

    for factor in (rows.factor, rows.minimum_factor):
        if factor is not None:
            put(by_column(np.where(exists[:, None], factor, np.float16(0))))
    for scale in (rows.scale, rows.minimum):
        if scale is not None:
            put(by_column(scale))
    values = rows.values
    if blocks.values == "int8":
        put(by_column(values.view(np.int16)))  # keeps two consecutive values together
        return
    if blocks.values == "iq4":
        values = _IQ4_NUMBERS[values.view(np.uint8)]
    numbers = (values + np.int8(blocks.offset)).view(np.uint8)
    eights = numbers.reshape(panels * 2, 2, 8, -1)  # 8 columns, and the next 8

    def by_word(words: np.ndarray) -> np.ndarray:
        """Transpose u16[2 panels, 8, n] to u8[panels, count, words, 32]."""
        rows = words.reshape(panels, 16, count, -1).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(rows).view(np.uint8)

    if blocks.values in ("int4", "iq4"):
        both = (eights[:, 0] | eights[:, 1] << 4).view(np.uint16)
        put(by_word(both).reshape(panels, count, -1))
        return
    nibbles = by_word((eights[:, 0] & 15 | eights[:, 1] << 4).view(np.uint16))
    high = (eights[:, 0] >> 4 | eights[:, 1] & 0x30).view(np.uint16)
    crumbs = by_word(high[..., ::2] | high[..., 1::2] << 2)
    chunks = (panels, count, blocks.size // 16, -1)
    both = np.concatenate([nibbles.reshape(chunks), crumbs.reshape(chunks)], axis=3)
    put(both.reshape(panels, count, -1))
