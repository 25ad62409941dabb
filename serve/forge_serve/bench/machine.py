"""Description of the machine and software for reports."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

from forge_jax.tools.doctor.machine import cpu_model, instruction_sets

PACKAGES = ("forge-jax", "jax", "jaxlib", "flax", "aiohttp", "numpy")


def describe() -> dict[str, Any]:
    """Return the date, the machine and versions, without host names and paths."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "instruction_sets": instruction_sets(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }
