"""QuantSpec: how a checkpoint's matrices are quantized, and helpers to read it from `config.json`.

The methods are in `methods/`, one file each. Unknown fields and values are rejected by name,
because misread weights produce fluent nonsense.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from forge_jax.errors import UnsupportedModelError
from forge_jax.host.files import short_repr
from forge_jax.weights.names import MAX_PATTERNS, compile_pattern, multimodal_names, within
from forge_jax.weights.tensors import Scheme

if TYPE_CHECKING:
    from forge_jax.config.hf_config import HFConfig

log = logging.getLogger(__name__)

NameRule = Literal["patterns", "parts"]  # compressed-tensors' patterns, or parts of a path
MAX_NAMES = 100_000  # names in a list of modules
MAX_GROUP_SIZE = 2**20
_LAYERS = "model"  # part of the names of all modules of the layers


@dataclass(frozen=True)
class ModuleNames:
    """Modules, selected by names and patterns of the file."""

    names: tuple[str, ...]
    rule: NameRule

    @property
    def means_all(self) -> bool:
        return self.rule == "parts" and _LAYERS in self.names

    def has(self, module: str) -> bool:
        return self.rank(module) is not None

    def rank(self, module: str, *, in_layer: bool = False) -> int | None:
        """Return how specific the match is: 0 the name, 1 a pattern, 2 the class, None no match.

        `in_layer` is True for modules of the layers, whatever their names.
        """
        if self.rule == "parts":
            found = in_layer and self.means_all
            return 0 if found or any(within(name, module) for name in self.names) else None
        if module in self.names:
            return 0
        patterns = (name[3:] for name in self.names if name.startswith("re:"))
        if any(compile_pattern(pattern)(module) for pattern in patterns):
            return 1
        return 2 if "Linear" in self.names else None


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """The matrices of a checkpoint that are quantized, and their schemes.

    Attributes:
      method: the name in `config.json`.
      schemes: the modules of each scheme.
      ignored: the modules that are not quantized.
      where: the file and the section, for messages.
      is_text_side: True if the model is the text model of a multimodal checkpoint. Names and
        patterns then refer to the multimodal checkpoint's modules.
    """

    method: str
    schemes: tuple[tuple[ModuleNames, Scheme], ...]
    ignored: ModuleNames
    where: str
    is_text_side: bool = False

    def scheme_of(
        self, module: str, *, is_router: bool = False, in_layer: bool = False
    ) -> Scheme | None:
        """Return the scheme of a linear layer by its checkpoint name; None if not quantized.

        Methods that select all modules of the layers do not select routers. AutoGPTQ and others
        leave routers unquantized, and their files do not list them.

        Raises:
          UnsupportedModelError: several groups match equally well.
        """
        spellings = multimodal_names(module) if self.is_text_side else (module,)
        if any(self.ignored.has(each) for each in spellings):
            return None
        ranks = [
            (names.rank(each, in_layer=in_layer), scheme)
            for names, scheme in self.schemes
            if not (is_router and names.means_all)
            for each in spellings
        ]
        ranked = [(rank, scheme) for rank, scheme in ranks if rank is not None]
        closest = min((rank for rank, _ in ranked), default=None)
        schemes = {scheme for rank, scheme in ranked if rank == closest}
        if len(schemes) > 1:
            raise UnsupportedModelError(
                f"{self.where}: the targets of several config_groups match {module}, which is not "
                "supported if their schemes differ"
            )
        return schemes.pop() if schemes else None


# ---- reading a section -------------------------------------------------------------------------


def refuse(section: HFConfig, name: str, known: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{section.where}: {name} {short_repr(section.values.get(name))} is not supported; "
        f"supported: {known}"
    )


def choose(section: HFConfig, name: str, known: tuple[Any, ...], default: Any = None) -> Any:
    """Return a field that has one of a few values; without a default, it is required."""
    if default is None and not section.has(name):
        raise section.error(name, f"one of {', '.join(map(str, known))}")
    value = section.values.get(name) if section.has(name) else default
    if not any(type(value) is type(each) and value == each for each in known):
        raise refuse(section, name, ", ".join(map(str, known)))
    return value


def refuse_unknown(section: HFConfig, known: str, harmless: str = "") -> None:
    """Reject unknown fields, except those without a value (null, false, empty).

    `known` fields are read. `harmless` fields do not change the meaning of the tensors.
    """
    names = {*known.split(), *harmless.split()}
    for name, value in section.values.items():
        if name not in names and value not in (None, False, "", [], {}):
            raise UnsupportedModelError(
                f"{section.where}: {short_repr(name)} is not a known field (its value is "
                f"{short_repr(value)})"
            )


def read_names(section: HFConfig, name: str, rule: NameRule) -> ModuleNames:
    value = section.values.get(name)
    value = [] if value is None else value
    if (
        not isinstance(value, list)
        or len(value) > MAX_NAMES
        or any(not isinstance(each, str) or not each for each in value)
    ):
        raise section.error(name, "a list of module names")
    if rule == "patterns":
        if sum(each.startswith("re:") for each in value) > MAX_PATTERNS:
            raise section.error(name, f"a list with at most {MAX_PATTERNS} patterns")
        for each in value:
            if each.startswith("re:"):
                try:
                    compile_pattern(each[3:])
                except ValueError as error:
                    raise UnsupportedModelError(
                        f"{section.where}: {name}: pattern {short_repr(each)}: {error}"
                    ) from None
    return ModuleNames(tuple(value), rule)


def read_group_size(section: HFConfig, name: str) -> int | None:
    """Return how many values of a row share a scale; None (-1 in files) for all."""
    if section.values.get(name) == -1:
        return None
    size = section.integer(name, high=MAX_GROUP_SIZE)
    if size % 2:
        raise section.error(name, "even, or -1")
    return size


def note_kv_cache(section: HFConfig) -> None:
    if section.has("kv_cache_scheme"):
        log.warning(
            "%s: kv_cache_scheme is ignored: the KV cache has its own type and scales (--kv-dtype)",
            section.where,
        )


EVERY_LAYER = ModuleNames((_LAYERS,), "parts")  # excludes the head, which is lm_head
