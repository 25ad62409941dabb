"""Engines in this process: which switches this version has."""

from __future__ import annotations

from typing import Any

from forge_jax.config import EngineConfig
from forge_jax.errors import ConfigError


def why_not(**options: Any) -> str | None:
    """Why this engine does not take the options; None if it does."""
    try:
        EngineConfig.from_options(**options)
    except ConfigError as error:
        return str(error)
    return None
