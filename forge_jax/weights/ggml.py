"""The supported tensor types of GGUF: floats, and blocks of rounded values.

The block formats are those of ggml (`ggml-common.h`, `ggml-quants.c`). In all but the simplest, a
block has 256 elements in sub-blocks of 16 or 32. Each sub-block has a scale and in some types a
minimum, which are themselves rounded. The IQ4 types space their 16 values unevenly.

Blocks are unpacked to integers and their float16 factors (`forge_kernels.blocks.BlockValues`),
which matrices keep in memory, so nothing is rounded again. `Blocks` describes the bits per value.
Floats are computed from these in float32, in the order of `gguf.quants`, so the results are
bit-identical.

MXFP4 is decoded to floats, except in experts of gpt-oss (`forge_jax.checkpoint.gguf.gpt_oss`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forge_jax.weights.stored import BFLOAT16
from forge_kernels.blocks import IQ4_VALUES, Blocks, BlockValues


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A tensor type: the elements and bytes of a block.

    Attributes:
      dtype: type of the values.
      blocks: how the elements are kept in memory; None if the bytes are the values.
      unpack: converts u8[n, block_bytes] to the elements of n blocks, one per row.
      decode: the same to floats, for blocks whose elements are not kept in memory.
    """

    name: str
    block_size: int
    block_bytes: int
    dtype: np.dtype = np.dtype(np.float32)
    blocks: Blocks | None = None
    unpack: Callable[[np.ndarray], BlockValues] | None = None
    decode: Callable[[np.ndarray], np.ndarray] | None = None

    def values(self, blocks: np.ndarray) -> np.ndarray:
        """Convert u8[..., blocks per row, block_bytes] to values[..., elements per row]."""
        *outer, count, _ = blocks.shape
        shape = (*outer, count * self.block_size)
        if self.unpack is None and self.decode is None:
            return blocks.view(self.dtype).reshape(shape)
        flat = np.ascontiguousarray(blocks).reshape(-1, self.block_bytes)
        if self.decode is not None:
            return self.decode(flat).reshape(shape)
        assert self.unpack is not None
        return self.unpack(flat).floats().reshape(shape)

    def unpacked(self, blocks: np.ndarray) -> BlockValues:
        """Convert u8[n, blocks per row, block_bytes] to n rows of values, scales and minima."""
        assert self.unpack is not None, self.name
        found = self.unpack(np.ascontiguousarray(blocks).reshape(-1, self.block_bytes))
        return found.each(lambda array: array.reshape(len(blocks), -1))


def _split(blocks: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """Return the fields of each block, given their bytes; the last field is the rest."""
    return np.split(blocks, np.cumsum(sizes), axis=1)


def _half(field: np.ndarray) -> np.ndarray:
    """Return the field as f16[n, 1]."""
    return np.ascontiguousarray(field).view(np.float16)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Convert u8[n, m] to u8[n, 2m]: all low nibbles, then all high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _bits(field: np.ndarray) -> np.ndarray:
    """Convert u8[n, 4] to u8[n, 32], the lowest bit first."""
    return np.unpackbits(field, axis=1, bitorder="little")


def _of_32(q: np.ndarray, d: np.ndarray, m: np.ndarray | None = None) -> BlockValues:
    """Return int8 or uint8[n, 32] with one scale, and optionally a minimum."""
    return BlockValues(q.view(np.int8), _half(d), None, None if m is None else _half(m), None)


def _q4_0(blocks: np.ndarray) -> BlockValues:
    d, q = _split(blocks, 2)
    return _of_32(_nibbles(q).view(np.int8) - np.int8(8), d)


def _q4_1(blocks: np.ndarray) -> BlockValues:
    d, m, q = _split(blocks, 2, 2)
    return _of_32(_nibbles(q), d, m)


def _q5_0(blocks: np.ndarray) -> BlockValues:
    d, high, q = _split(blocks, 2, 4)
    return _of_32((_nibbles(q) | (_bits(high) << 4)).view(np.int8) - np.int8(16), d)


def _q5_1(blocks: np.ndarray) -> BlockValues:
    d, m, high, q = _split(blocks, 2, 2, 4)
    return _of_32(_nibbles(q) | (_bits(high) << 4), d, m)


def _q8_0(blocks: np.ndarray) -> BlockValues:
    d, q = _split(blocks, 2)
    return _of_32(np.ascontiguousarray(q), d)


def _crumbs(packed: np.ndarray) -> np.ndarray:
    """Convert u8[n, 64] to u8[n, 256] of 2 bits: per 32 bytes, the lowest bits first."""
    n = len(packed)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return ((packed.reshape(n, -1, 1, 32) >> shifts) & 3).reshape(n, -1)


def _q2_k(blocks: np.ndarray) -> BlockValues:
    scales, q, d, dmin = _split(blocks, 16, 64, 2)
    return _with_minima(_crumbs(q), d, scales & 0x0F, dmin, scales >> 4)


def _q3_k(blocks: np.ndarray) -> BlockValues:
    high, q, scales, d = _split(blocks, 32, 64, 12)
    n = len(blocks)
    # 16 scales of 6 bits: the low 4 bits in 8 bytes, the high 2 in the next 4 bytes.
    low = _nibbles(scales[:, :8])
    upper = (
        scales[:, 8:].reshape(n, 1, 4) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    ) & 3
    scale = (low | (upper.reshape(n, 16) << 4)).view(np.int8) - np.int8(32)
    # The third bit; if it is not set, the value is 4 less.
    bits = (high.reshape(n, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1
    q = _crumbs(q).view(np.int8) - ((bits ^ 1).reshape(n, -1) << 2).view(np.int8)
    return BlockValues(q, _half(d), scale, None, None)


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Convert u8[n, 12] to eight scales and eight minima of 6 bits, u8[n, 8] each."""
    first, second, third = _split(packed, 4, 4)
    scale = np.concatenate([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    least = np.concatenate([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], axis=1)
    return scale, least


def _with_minima(
    q: np.ndarray, d: np.ndarray, scale: np.ndarray, dmin: np.ndarray, least: np.ndarray
) -> BlockValues:
    """Return u8[n, 256] with scales and minima, u8[n, G]; ggml subtracts the minima."""
    return BlockValues(
        q.view(np.int8), _half(d), scale.view(np.int8), -_half(dmin), least.view(np.int8)
    )


def _nibbles_by_32(packed: np.ndarray) -> np.ndarray:
    """Convert u8[n, 128] to u8[n, 256]: per 32 bytes, the low nibbles, then the high ones."""
    n = len(packed)
    shifts = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return ((packed.reshape(n, -1, 1, 32) >> shifts) & 0x0F).reshape(n, -1)


def _q4_k(blocks: np.ndarray) -> BlockValues:
    d, dmin, scales, q = _split(blocks, 2, 2, 12)
    scale, least = _six_bits(scales)
    return _with_minima(_nibbles_by_32(q), d, scale, dmin, least)


def _q5_k(blocks: np.ndarray) -> BlockValues:
    d, dmin, scales, high, q = _split(blocks, 2, 2, 12, 32)
    n = len(blocks)
    bits = (high.reshape(n, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1
    scale, least = _six_bits(scales)
    return _with_minima(_nibbles_by_32(q) | (bits.reshape(n, -1) << 4), d, scale, dmin, least)


def _q6_k(blocks: np.ndarray) -> BlockValues:
    low, high, scales, d = _split(blocks, 128, 64, 16)
    n = len(blocks)
    shifts = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    q = ((low.reshape(n, -1, 1, 64) >> shifts) & 0x0F).reshape(n, -1) | (_crumbs(high) << 4)
    scale = np.ascontiguousarray(scales).view(np.int8)
    return BlockValues(q.view(np.int8) - np.int8(32), _half(d), scale, None, None)


def _iq4_nl(blocks: np.ndarray) -> BlockValues:
    d, q = _split(blocks, 2)
    return _of_32(IQ4_VALUES[_nibbles(q)], d)


def _iq4_xs(blocks: np.ndarray) -> BlockValues:
    d, high, low, q = _split(blocks, 2, 2, 4)
    n = len(blocks)
    # Eight scales of 6 bits: the low 4 bits in 4 bytes, the high 2 in the 2 bytes before them.
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    upper = ((np.ascontiguousarray(high).view("<u2") >> shifts) & 3).astype(np.uint8)
    lower = np.stack([low & 0x0F, low >> 4], axis=2).reshape(n, 8)
    scale = (lower | (upper << 4)).view(np.int8) - np.int8(32)
    values = IQ4_VALUES[_nibbles(q.reshape(-1, 16))].reshape(n, 256)
    return BlockValues(values, _half(d), scale, None, None)


# The values of E2M1 by their 4 bits.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    scale, q = _split(blocks, 1)
    return np.ldexp(_E2M1[_nibbles(q)], scale.astype(np.int32) - 127)


# By ggml's type number.
FORMATS = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2, np.dtype(np.float16)),
    30: BlockFormat("BF16", 1, 2, BFLOAT16),
    2: BlockFormat("Q4_0", 32, 18, blocks=Blocks("int4", 32, 32), unpack=_q4_0),
    3: BlockFormat("Q4_1", 32, 20, blocks=Blocks("int4", 32, 32, minima=True), unpack=_q4_1),
    6: BlockFormat("Q5_0", 32, 22, blocks=Blocks("int6", 32, 32), unpack=_q5_0),
    7: BlockFormat("Q5_1", 32, 24, blocks=Blocks("int6", 32, 32, minima=True), unpack=_q5_1),
    8: BlockFormat("Q8_0", 32, 34, blocks=Blocks("int8", 32, 32), unpack=_q8_0),
    10: BlockFormat("Q2_K", 256, 84, blocks=Blocks("int4", 16, 256, minima=True), unpack=_q2_k),
    11: BlockFormat("Q3_K", 256, 110, blocks=Blocks("int4", 16, 256), unpack=_q3_k),
    12: BlockFormat("Q4_K", 256, 144, blocks=Blocks("int4", 32, 256, minima=True), unpack=_q4_k),
    13: BlockFormat("Q5_K", 256, 176, blocks=Blocks("int6", 32, 256, minima=True), unpack=_q5_k),
    14: BlockFormat("Q6_K", 256, 210, blocks=Blocks("int6", 16, 256), unpack=_q6_k),
    20: BlockFormat("IQ4_NL", 32, 18, blocks=Blocks("iq4", 32, 32), unpack=_iq4_nl),
    23: BlockFormat("IQ4_XS", 256, 136, blocks=Blocks("iq4", 32, 256), unpack=_iq4_xs),
    39: BlockFormat("MXFP4", 32, 17, decode=_mxfp4),
}
BY_NAME = {kind.name: kind for kind in FORMATS.values()}

# Other types, for error messages.
UNSUPPORTED = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}
