"""The tensors of a model that are in GGML blocks, and their types.

`config.json` lists them under this project's own key, `gguf_types`. For a GGUF file, the key is
made from the table of tensors (`checkpoint/gguf/config.py`), and `forge-jax convert` keeps it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from forge_jax.config.hf_config import HFConfig
from forge_jax.weights.ggml import BY_NAME
from forge_kernels.blocks import Blocks

KEY = "gguf_types"  # not a key of Hugging Face's
MAX_NAMES = 100_000
TYPES = {name: kind.blocks for name, kind in BY_NAME.items() if kind.blocks is not None}


def of_all_experts(name: str) -> str:
    """Return a tensor's name without an expert's number, because a layer's experts share a type."""
    return re.sub(r"\.experts\.\d+\.", ".experts.", name)


@dataclass(frozen=True)
class GGMLTypes:
    """The types (such as "Q4_K") of the tensors that are in blocks, by Hugging Face's names."""

    types: tuple[tuple[str, str], ...]

    @cached_property
    def _by_name(self) -> dict[str, str]:
        return dict(self.types)

    def blocks_of(self, tensor: str) -> Blocks | None:
        """Return the blocks of a tensor, or None if it holds floats."""
        found = self._by_name.get(of_all_experts(tensor))
        return None if found is None else TYPES[found]


def read_ggml_types(config: HFConfig) -> GGMLTypes | None:
    """Return the types in `config.json`; None if the key is missing or empty."""
    section = config.section(KEY)
    if section is None or not section.values:
        return None
    if len(section.values) > MAX_NAMES:
        raise config.error(KEY, f"an object of at most {MAX_NAMES} names")
    for name, found in section.values.items():
        if found not in TYPES:
            raise section.error(name, f"one of {', '.join(TYPES)}")
    return GGMLTypes(tuple(sorted(section.values.items())))
