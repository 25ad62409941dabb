"""The common parts of all packed layouts: panels of columns in memory that XLA:CPU can adopt."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

PANEL = 32  # columns
ALIGNMENT = 64  # bytes; XLA:CPU adopts a host buffer with this alignment instead of copying it


def rows_of_panels(outputs: int, panels: int, paired: bool) -> np.ndarray:
    """Return i64, the matrix row of each column of all panels, or -1; the same as in `pack.h`."""
    place = np.arange(panels * PANEL)
    if not paired:
        return np.where(place < outputs, place, -1)
    half, lane = outputs // 2, place % PANEL
    row = place // PANEL * 16 + lane % 16
    return np.where(row < half, row + half * (lane // 16), -1)


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an uninitialized array that XLA:CPU can adopt without a copy."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
