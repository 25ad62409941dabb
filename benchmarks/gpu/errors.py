"""The comparison of a kernel's result with a reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def row(got: jax.Array, exact: jax.Array, tolerance: float) -> dict[str, Any]:
    """Return the largest error relative to the largest value, and if it is below the tolerance."""
    got, exact = got.astype(jnp.float32), exact.astype(jnp.float32)
    error = float(jnp.abs(got - exact).max() / jnp.abs(exact).max())
    found: dict[str, Any] = {"right": error < tolerance}
    return {**found, "error": error} if np.isfinite(error) else {**found, "failed": "not a number"}
