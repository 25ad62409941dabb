"""The common part of all packed layouts: panels of columns."""

from __future__ import annotations

import numpy as np

PANEL = 32  # columns


def rows_of_panels(outputs: int, panels: int, paired: bool) -> np.ndarray:
    """Return i64, the matrix row of each column of all panels, or -1; the same as in `pack.h`."""
    place = np.arange(panels * PANEL)
    if not paired:
        return np.where(place < outputs, place, -1)
    half, lane = outputs // 2, place % PANEL
    row = place // PANEL * 16 + lane % 16
    return np.where(row < half, row + half * (lane // 16), -1)
