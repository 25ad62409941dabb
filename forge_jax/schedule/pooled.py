"""Conversion of `Delta.pooled` to vectors."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np


def stacked(pooled: Seq[bytes]) -> np.ndarray:
    """Return the vectors of P requests as f32[P, d]."""
    return np.stack([np.frombuffer(vector, "<f4") for vector in pooled])


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Scale f32[P, d] vectors to an L2 norm of 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
