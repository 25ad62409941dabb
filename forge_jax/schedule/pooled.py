"""Vectors out of what `Delta.pooled` holds."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np


def stacked(pooled: Seq[bytes]) -> np.ndarray:
    """The vectors of P requests as f32[P, d]."""
    return np.stack([np.frombuffer(vector, "<f4") for vector in pooled])


def normalized(vectors: np.ndarray) -> np.ndarray:
    """f32[P, d] of the same directions, with a length of one (L2)."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
