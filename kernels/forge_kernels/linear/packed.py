"""Weights packed for the CPU kernels in panels of 32 columns, as bfloat16, int8, int4 or blocks.

An int8 matrix has one scale per column. Rows of x are quantized at run time to the nearest of 255
steps. An int4 matrix has one float16 scale per 32 values of a column. The layouts are defined in
`cpu/src/formats.h` and are the same for every instruction set.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from forge_kernels.cpu.library import library
from forge_kernels.host_arrays import empty_weight
from forge_kernels.linear.panels import PANEL, rows_of_panels
from forge_kernels.threads import for_each

Format = Literal["bf16", "int8", "int4"]
FORMATS: tuple[str, ...] = get_args(Format)
LAYOUT = "panels-of-32-v3"  # the layout's name in files; any change of its bytes needs a new name
GROUP = 32  # values per int4 scale
CHUNK_BYTES = 512 * 2**10  # rows that a thread packs at once, so that they stay in its cache


@dataclass(frozen=True)
class Packing:
    """The packing of one matrix [outputs, inputs]; if `paired`, its halves are gate and up.

    If `experts` is set, there are so many matrices, packed separately, one after the other.
    """

    format: Format
    outputs: int
    inputs: int
    paired: bool = False
    experts: int | None = None

    @property
    def panels(self) -> int:
        return -(-self.outputs // 2 // 16) if self.paired else -(-self.outputs // PANEL)

    @property
    def weight(self) -> jax.ShapeDtypeStruct:
        match self.format:
            case "bf16":
                return self._shape((self.panels, -(-self.inputs // 2), PANEL, 2), jnp.uint16)
            case "int8":
                return self._shape((self.panels, -(-self.inputs // 4), PANEL, 4), jnp.uint8)
            case "int4":
                return self._shape((self.panels, -(-self.inputs // GROUP), 8, 64), jnp.uint8)

    @property
    def scale(self) -> jax.ShapeDtypeStruct | None:
        columns = self.panels * PANEL
        match self.format:
            case "bf16":
                return None
            case "int8":
                return self._shape((columns,), jnp.float32)
            case "int4":
                return self._shape((-(-self.inputs // GROUP), columns), jnp.float16)

    def _shape(self, one: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        experts = () if self.experts is None else (self.experts,)
        return jax.ShapeDtypeStruct((*experts, *one), dtype)


class Rows(Protocol):
    """A matrix whose rows are read on demand, by several threads at the same time."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_rows(self, out: np.ndarray, first: int) -> None:
        """Copy the rows from `first` on into `out`, [rows, columns], cast to its type."""
        ...


def pack(w: np.ndarray | Rows, packing: Packing) -> tuple[np.ndarray, np.ndarray | None]:
    """Pack bf16[outputs, inputs] on the host, and return weight and scale.

    `Rows` are read in parts, so they need no memory for the whole matrix.
    """
    assert packing.experts is None
    weight, scale = empty(packing)
    _pack_all([w], packing, weight[None], None if scale is None else scale[None])
    return weight, scale


def pack_experts(
    matrices: Sequence[Rows] | np.ndarray, packing: Packing
) -> tuple[np.ndarray, np.ndarray | None]:
    """Pack the matrices of `packing.experts`, bf16[outputs, inputs] each, as `pack` does."""
    weight, scale = empty(packing)
    _pack_all(matrices, packing, weight, scale)
    return weight, scale


def pack_values(
    values: np.ndarray, scale: np.ndarray, packing: Packing
) -> tuple[np.ndarray, np.ndarray]:
    """Pack values that are already quantized, without rounding, and return weight and scale.

    Args:
      values: int8[outputs, inputs]; from -8 to 7 for int4.
      scale: f32[outputs]; for int4, f32[outputs, groups of 32].
      packing: int8 or int4.

    Raises:
      ValueError: float16 cannot represent an int4 scale.
    """
    assert packing.format != "bf16" and packing.experts is None
    rows = rows_of_panels(packing.outputs, packing.panels, packing.paired)
    panels, exists = packing.panels, (rows >= 0)[:, None]
    weight, scale_out = empty(packing)
    assert scale_out is not None
    step = 4 if packing.format == "int8" else GROUP
    padding = ((0, 0), (0, -packing.inputs % step))
    columns = np.where(exists, np.pad(values, padding)[rows], 0)
    if packing.format == "int8":
        words = (columns.astype(np.int16) + 128).astype(np.uint8).reshape(panels, PANEL, -1, 4)
        weight[...] = words.transpose(0, 2, 1, 3)
        scale_out[...] = np.where(rows >= 0, scale[rows], 0)
        return weight, scale_out
    narrow = scale.astype(np.float16)
    if not np.array_equal(narrow.astype(np.float32), scale):
        raise ValueError("a scale cannot be represented in float16")
    words = (columns + 8).astype(np.uint8).reshape(panels, PANEL, -1, 2, 4, 4)
    words = (words[:, :, :, 0] | words[:, :, :, 1] << 4).transpose(0, 2, 3, 1, 4)
    weight[...] = words.reshape(weight.shape)
    scale_out[...] = np.where(exists, narrow[rows], 0).T
    return weight, scale_out


def empty(packing: Packing) -> tuple[np.ndarray, np.ndarray | None]:
    """Return memory for (weight, scale) that XLA:CPU can adopt."""
    weight, scale = packing.weight, packing.scale
    memory = empty_weight(weight.shape, weight.dtype)
    return memory, None if scale is None else empty_weight(scale.shape, scale.dtype)


def _pack_all(
    matrices: Sequence[np.ndarray | Rows] | np.ndarray,
    packing: Packing,
    weight: np.ndarray,
    scale: np.ndarray | None,
) -> None:
    """Pack several matrices; `weight` and `scale` have a leading axis of matrices."""
    assert len(matrices) == len(weight), (len(matrices), packing)
    step = max(1, CHUNK_BYTES // (PANEL * packing.inputs * 2))
    own = threading.local()  # allocated once per thread; new memory costs more than packing

    def work(place: tuple[int, int]) -> None:
        number, panel = place
        end = min(panel + step, packing.panels)
        if not hasattr(own, "room"):
            own.room = np.empty((step * PANEL, packing.inputs), ml_dtypes.bfloat16)
        rows = _rows_of(matrices[number], packing, panel, end, own.room)
        columns = slice(panel * PANEL, end * PANEL)
        _pack_panels(
            rows,
            packing,
            weight[number, panel:end],
            None if scale is None else scale[number, ..., columns],
        )

    starts = range(0, packing.panels, step)
    for_each(work, [(number, panel) for number in range(len(weight)) for panel in starts])


def _rows_of(
    w: np.ndarray | Rows, packing: Packing, panel: int, end: int, room: np.ndarray
) -> np.ndarray:
    """Return rows of some panels as bf16[rows, inputs] in `room`; if paired, gates above ups."""
    assert w.shape == (packing.outputs, packing.inputs), (w.shape, packing)
    width, half = (PANEL // 2, packing.outputs // 2) if packing.paired else (PANEL, packing.outputs)
    first, last = panel * width, min(end * width, half)
    starts = (first, half + first) if packing.paired else (first,)
    rows = room[: len(starts) * (last - first)]
    for part, start in zip(np.split(rows, len(starts)), starts, strict=True):
        if isinstance(w, np.ndarray):
            assert w.dtype == rows.dtype, (w.dtype, packing)
            part[...] = w[start : start + len(part)]
        else:
            w.read_rows(part, start)
    return rows


def _pack_panels(
    rows: np.ndarray, packing: Packing, weight: np.ndarray, scale: np.ndarray | None
) -> None:
    """Pack all rows of some panels; the rows of an int4 `scale` may be strided."""
    assert rows.flags.c_contiguous and weight.flags.c_contiguous
    apart = 0 if scale is None else scale.strides[0] // scale.itemsize
    library().forge_pack(
        _pointer(rows),
        ctypes.c_int64(rows.shape[0]),
        ctypes.c_int64(packing.inputs),
        ctypes.c_int64(packing.paired),
        ctypes.c_int64(FORMATS.index(packing.format)),
        _pointer(weight),
        _pointer(scale),
        ctypes.c_int64(apart),
    )


def _pointer(array: np.ndarray | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)
