"""Checked access to the fields of `config.json`."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from forge_jax.errors import ModelError
from forge_jax.host.files import short_repr

MAX_TOKEN_LIST = 1024


class HFConfig:
    """A `config.json` whose getters raise a ModelError that names the invalid field.

    Args:
      where: the file's name in errors.
      defaults: the values of fields that the file omits.
      names: the file's names for fields (see `renamed`).
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "config.json",
        defaults: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
    ):
        self.values, self.where = {**(defaults or {}), **values}, where
        self._left_out = frozenset(defaults or ()) - frozenset(values)
        self._names = names or {}
        self._replaced: Mapping[str, Any] = {}

    def renamed(self, names: Mapping[str, str]) -> HFConfig:
        """Return a view whose getters accept the usual names of fields that have other names.

        Args:
          names: the file's name of each field, such as {"hidden_size": "n_embd"}. As with
            `attribute_map` in transformers, a field with the usual name overrides the other.
        """
        view = copy.copy(self)
        view._names = {**self._names, **names}
        return view

    def replaced(self, **values: Any) -> HFConfig:
        """Return a view whose getters return `values` instead of the file's. None: no value."""
        view = copy.copy(self)
        view._replaced = {**self._replaced, **values}
        return view

    def _own(self, name: str) -> str:
        return name if name in self.values else self._names.get(name, name)

    def value(self, name: str) -> Any:
        """Return a field unchecked; None if it is missing."""
        return self._replaced[name] if name in self._replaced else self.values.get(self._own(name))

    def error(self, name: str, want: str) -> ModelError:
        name = self._own(name)
        missing = ", the default because the field is missing" if name in self._left_out else ""
        return ModelError(
            f"{self.where}: {name} must be {want}, not {short_repr(self.values.get(name))}{missing}"
        )

    def leaves_out(self, name: str) -> bool:
        """Return True if the file omits this field and its value is a default."""
        return self._own(name) in self._left_out

    def has(self, name: str) -> bool:
        return self.value(name) is not None

    def integer(
        self, name: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1
    ) -> int:
        value = self.value(name) if self.has(name) else default
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
        """Return a finite number above `low` and at most `high`, which float32 can represent."""
        value = self.value(name) if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "a number")
        if not low < value <= high:  # also rejects NaN
            raise self.error(name, f"a finite number above {low:g}, at most {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        value = self.value(name) if self.has(name) else default
        if type(value) is not bool:
            raise self.error(name, "true or false")
        return value

    def string(self, name: str, default: str | None = None) -> str:
        value = self.value(name) if self.has(name) else default
        if type(value) is not str:
            raise self.error(name, "a string")
        return value

    def with_defaults(
        self, defaults: Mapping[str, Any], nullable: Collection[str] = ()
    ) -> HFConfig:
        """Return a copy that has `defaults` for the fields that the file omits.

        Raises:
          ModelError: a field with a default is null and not in `nullable`.
        """
        for name in defaults:
            if name in self.values and self.values[name] is None and name not in nullable:
                raise ModelError(f"{self.where}: {name} must not be null: set it, or remove it")
        return HFConfig(self.values, self.where, defaults, self._names)

    def replace(self, **values: Any) -> HFConfig:
        """Return a copy with these fields, which count as set in the file."""
        changed = copy.copy(self)
        changed.values, changed._left_out = self.values | values, self._left_out - values.keys()
        return changed

    def section(self, name: str) -> HFConfig | None:
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return HFConfig(value, f"{self.where}: {name}")

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return the field's token IDs: a single one, a list, or none.

        Ids index the model's logits, so each must be less than `vocab_size`.
        """
        value = self.value(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if len(ids) > MAX_TOKEN_LIST or any(
            type(i) is not int or not 0 <= i < vocab_size for i in ids
        ):
            raise self.error(name, f"a token ID below {vocab_size} or a list of such token IDs")
        return tuple(ids)
