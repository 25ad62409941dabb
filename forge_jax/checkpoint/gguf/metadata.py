"""The metadata of a GGUF file with checked getters, whose errors name the key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forge_jax.errors import CheckpointError, ModelError, UnsupportedModelError
from forge_jax.host.files import short_repr


class Metadata:
    """Values by key; getters raise a ModelError that names the file and the key."""

    def __init__(self, values: Mapping[str, Any], file: Path):
        self.values, self.file = values, file

    def error(self, key: str, want: str) -> ModelError:
        if key not in self.values:
            return CheckpointError(f"{self.file}: {key} is missing: it must be {want}")
        return CheckpointError(
            f"{self.file}: {key} must be {want}, got {short_repr(self.values[key])}"
        )

    def unsupported(self, what: str) -> ModelError:
        return UnsupportedModelError(f"{self.file}: {what}")

    def has(self, key: str) -> bool:
        return key in self.values

    def integer(
        self, key: str, default: int | None = None, *, low: int = 0, high: int = 2**31 - 1
    ) -> int:
        """Return an integer; also if the file has the same one for every layer."""
        value = self.values.get(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value):
            if (value != value[0]).any():
                raise self.unsupported(f"{key} differs from layer to layer, which is not supported")
            value = int(value[0])
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def integers(self, key: str, count: int) -> list[int]:
        """Return `count` integers from 1 on: an array, or the same integer for all."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray):
            return [self.integer(key, low=1)] * count
        if value.dtype.kind not in "iu" or len(value) != count or (value < 1).any():
            raise self.error(key, f"an array of {count} integers from 1 on")
        return [int(each) for each in value]

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number, as the shortest decimal that gives the same float32."""
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not abs(value) < 1e30:
            raise self.error(key, "a finite number")
        return float(str(np.float32(value)))

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if type(value) is not str:
            raise self.error(key, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.error(key, "an array of strings")
        return value

    def numbers(self, key: str, count: int) -> np.ndarray:
        """Return an array of `count` finite numbers."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self.error(key, f"an array of {count} numbers")
        if not np.isfinite(value).all():
            raise CheckpointError(f"{self.file}: {key} must be finite")
        return value

    def token_id(self, key: str, count: int) -> int | None:
        """Return a token ID below `count`; None if the key is missing or is 2^32 - 1 (none)."""
        if self.values.get(key) in (None, 2**32 - 1):
            return None
        value = self.integer(key)
        if value >= count:
            raise self.error(key, f"a token ID below {count}")
        return value
