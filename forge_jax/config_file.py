"""The fields of `config.json`, each read with a check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_jax.errors import ModelError
from forge_jax.files import shown

MAX_TOKEN_LIST = 1024


class Config:
    """`config.json` with checks: each getter names the field that is wrong."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json"):
        self.values, self.where = values, where

    def error(self, name: str, want: str) -> ModelError:
        return ModelError(
            f"{self.where}: {name} must be {want}, not {shown(self.values.get(name))}"
        )

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(
        self, name: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1
    ) -> int:
        value = self.values.get(name) if self.has(name) else default
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, f"an integer from {low} to {high}")
        return value

    def number(
        self,
        name: str,
        default: float | None = None,
        *,
        low: float = 0.0,
        high: float = 1e30,
    ) -> float:
        """A finite number above `low`; float32 holds all up to `high`."""
        value = self.values.get(name) if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "a number")
        if not low < value <= high:  # NaN is neither
            raise self.error(name, f"a finite number above {low:g}, at most {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name) if self.has(name) else default
        if type(value) is not bool:
            raise self.error(name, "true or false")
        return value

    def string(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name) if self.has(name) else default
        if type(value) is not str:
            raise self.error(name, "a string")
        return value

    def with_defaults(self, **values: Any) -> Config:
        """The same, with `values` for fields that the file does not have."""
        own = {name: value for name, value in self.values.items() if value is not None}
        return Config({**self.values, **values, **own}, self.where)

    def section(self, name: str) -> Config | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Config(value, f"{self.where}: {name}")

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A token id, a list of them, or none: they index the model's logits."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if len(ids) > MAX_TOKEN_LIST or any(
            type(i) is not int or not 0 <= i < vocab_size for i in ids
        ):
            raise self.error(name, f"a token id below {vocab_size} or a list of such token ids")
        return tuple(ids)
