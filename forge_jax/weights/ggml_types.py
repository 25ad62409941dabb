"""Which tensors of a model are in ggml blocks, and of which type.

`config.json` lists them under a key of this project's own, `gguf_types`. Of a GGUF file that key is
made from the table of tensors (`checkpoint/gguf/config.py`), and `forge-jax convert` keeps it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from forge_jax.config.hf_config import HFConfig
from forge_jax.weights.ggml import BY_NAME
from forge_kernels.blocks import Blocks

KEY = "gguf_types"  # none of Hugging Face's: the types of the tensors that are in blocks
MAX_NAMES = 100_000
TYPES = {name: kind.blocks for name, kind in BY_NAME.items() if kind.blocks is not None}


def of_all_experts(name: str) -> str:
    """The name of a tensor, of an expert's without its number: of all of a layer one is told."""
    return re.sub(r"\.experts\.\d+\.", ".experts.", name)


@dataclass(frozen=True)
class GGMLTypes:
    """The types ("Q4_K") of the tensors that are in blocks, by Hugging Face's names."""

    types: tuple[tuple[str, str], ...]

    @cached_property
    def _by_name(self) -> dict[str, str]:
        return dict(self.types)

    def blocks_of(self, tensor: str) -> Blocks | None:
        """None: it has floats."""
        found = self._by_name.get(of_all_experts(tensor))
        return None if found is None else TYPES[found]


def read_ggml_types(config: HFConfig) -> GGMLTypes | None:
    """What the key says; None without it, or where it is empty."""
    section = config.section(KEY)
    if section is None or not section.values:
        return None
    if len(section.values) > MAX_NAMES:
        raise config.error(KEY, f"an object of at most {MAX_NAMES} names")
    for name, found in section.values.items():
        if found not in TYPES:
            raise section.error(name, f"one of {', '.join(TYPES)}")
    return GGMLTypes(tuple(sorted(section.values.items())))
