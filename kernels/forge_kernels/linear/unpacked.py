"""Packed weights as the float32 matrices that they store, for derivatives.

A bfloat16 matrix may also be given as an array of bfloat16 in the packed shape instead of its bits.
Its gradient is then an array of that shape, which an optimizer can add to it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from forge_kernels.blocks import IQ4_VALUES
from forge_kernels.linear.blocks import MIDDLE, BlockPacking
from forge_kernels.linear.packed import GROUP, Packing
from forge_kernels.linear.panels import PANEL, rows_of_panels


def unpacked(
    weight: jax.Array, scale: jax.Array | None, packing: Packing | BlockPacking
) -> jax.Array:
    """Return f32[N_out, K_in] of one matrix; the arguments are the attributes of `PackedWeight`."""
    if isinstance(packing, BlockPacking):
        columns = _of_blocks(weight, packing)
    else:
        columns = _floats(weight, scale, packing)
    rows = rows_of_panels(packing.outputs, packing.panels, packing.paired)
    place = np.zeros(packing.outputs, np.int32)
    place[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
    return columns[place, : packing.inputs]


def _floats(data: jax.Array, scale: jax.Array | None, packing: Packing) -> jax.Array:
    """Return f32[columns of all panels, K]."""
    columns = packing.panels * PANEL
    match packing.format:
        case "bf16":
            floats = data if data.dtype == jnp.bfloat16 else _bits(data, jnp.bfloat16)
            return floats.transpose(0, 2, 1, 3).reshape(columns, -1).astype(jnp.float32)
        case "int8":
            values = data.transpose(0, 2, 1, 3).reshape(columns, -1).astype(jnp.float32) - 128.0
            assert scale is not None
            return values * scale[:, None]
        case "int4":
            # [panels, groups, 4, column, 4], and 16 values later in the high bits
            parts = data.reshape(packing.panels, -1, 4, PANEL, 4)
            both = jnp.stack([parts & 15, parts >> 4], axis=2).transpose(0, 4, 1, 2, 3, 5)
            values = both.reshape(columns, -1).astype(jnp.float32) - MIDDLE
            assert scale is not None
            return values * jnp.repeat(scale.T.astype(jnp.float32), GROUP, axis=1)


def _of_blocks(weight: jax.Array, packing: BlockPacking) -> jax.Array:
    """Return f32[columns of all panels, K], from parts of blocks in the order of `pack_blocks`."""
    blocks, (panels, count, _) = packing.blocks, weight.shape
    groups = blocks.size // blocks.group
    at = 0

    def take(size: int, dtype: jnp.dtype) -> jax.Array:
        """Return the next numbers of each block and column, dtype[panels, count, size, 32]."""
        nonlocal at
        itemsize = jnp.dtype(dtype).itemsize
        data = weight[:, :, at : at + size * PANEL * itemsize]
        at += size * PANEL * itemsize
        shape = (panels, count, size, PANEL, *((itemsize,) if itemsize > 1 else ()))
        return _bits(data.reshape(shape), dtype)

    def by_group(factor: jax.Array, numbers: jax.Array | None) -> jax.Array:
        found = factor.astype(jnp.float32)
        return found if numbers is None else found * numbers.astype(jnp.float32)

    factor = take(1, jnp.float16)
    minimum_factor = take(1, jnp.float16) if blocks.minima else None
    scale = take(groups, jnp.int8) if blocks.two_levels else None
    minimum = take(groups, jnp.int8) if blocks.two_levels and blocks.minima else None
    if blocks.values == "int8":
        values = _bits(take(blocks.size // 2, jnp.int16), jnp.int8).swapaxes(3, 4)
        values = values.astype(jnp.float32)
    else:  # 8 columns in the low bits, and the next 8 in the high bits
        data, crumbs = weight[:, :, at:], None
        if blocks.values == "int6":
            chunks = data.reshape(panels, count, blocks.size // 16, 12, PANEL)
            data, crumbs = chunks[..., :8, :], chunks[..., 8:, :]
        data = data.reshape(panels, count, blocks.size // 2, 2, 8, 2)
        numbers = jnp.stack([data & 15, data >> 4], axis=4)
        if crumbs is not None:
            of_pair = jnp.stack([crumbs, crumbs >> 2], axis=4).reshape(data.shape)
            numbers |= jnp.stack([of_pair << 4, of_pair], axis=4) & 0x30
        both = numbers.transpose(0, 1, 2, 6, 3, 4, 5)
        if blocks.values == "iq4":
            values = jnp.asarray(IQ4_VALUES, jnp.float32)[both]
        else:
            values = both.astype(jnp.float32) - blocks.offset
    values = values.reshape(panels, count, blocks.size, PANEL)
    scales = by_group(factor, scale)
    floats = values * jnp.repeat(scales, blocks.size // scales.shape[2], axis=2)
    if minimum_factor is not None:
        added = by_group(minimum_factor, minimum)
        floats = floats + jnp.repeat(added, blocks.size // added.shape[2], axis=2)
    return floats.transpose(0, 3, 1, 2).reshape(panels * PANEL, -1)


def _bits(data: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return lax.bitcast_convert_type(data, dtype)
