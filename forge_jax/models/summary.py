"""A model in a few lines of text: its sizes, and its leaves, with equal layers together."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
from jax.dtypes import itemsize_bits

if TYPE_CHECKING:
    from forge_jax.models.spec import ModelSpec

MAX_LINES = 40
_LAYER = re.compile(r"layers\.(\d+)(\..+)")

Named = tuple[str, jax.ShapeDtypeStruct]


def summarize(
    title: str, spec: ModelSpec, names: Sequence[str], leaves: Sequence[jax.ShapeDtypeStruct]
) -> str:
    """Return at most `MAX_LINES` lines: the title, the sizes and the leaves."""
    lines = [f"{title}(", f"  {_sizes(spec)}", f"  {_total(leaves)}"]
    tree = _tree(tuple(zip(names, leaves, strict=True)))
    room = MAX_LINES - len(lines) - 1
    if len(tree) > room:
        tree = [*tree[: room - 1], f"... {len(tree) - room + 1} more lines"]
    return "\n".join([*lines, *(f"  {line}" for line in tree), ")"])


def _sizes(spec: ModelSpec) -> str:
    sizes = [
        f"{spec.num_hidden_layers} layers",
        f"hidden size {spec.hidden_size}",
        *spec.head_sizes,
        f"MLP {spec.intermediate_size}",
    ]
    if spec.experts is not None:
        of = spec.experts
        sizes.append(f"{of.per_token} of {of.count} experts of {of.intermediate_size}")
    sizes += [f"vocabulary {spec.vocab_size}", f"context {spec.max_position_embeddings}"]
    return ", ".join(sizes)


def _total(leaves: Sequence[jax.ShapeDtypeStruct]) -> str:
    numbers = sum(math.prod(leaf.shape) for leaf in leaves)
    size = sum(math.prod(leaf.shape) * itemsize_bits(leaf.dtype) for leaf in leaves) // 8
    return f"{len(leaves)} leaves, {numbers:,} numbers, {size / 2**20:,.1f} MiB"


def _tree(leaves: Sequence[Named]) -> list[str]:
    """Return a line per leaf, without those of layers that equal an earlier layer."""
    layers: dict[int, list[Named]] = {}
    for name, leaf in leaves:
        if found := _LAYER.fullmatch(name):
            layers.setdefault(int(found[1]), []).append((found[2], leaf))
    groups: dict[str, list[int]] = {}
    for index, own in sorted(layers.items()):
        groups.setdefault("\n".join(_lines(own)), []).append(index)
    lines = _lines([each for each in leaves if not _LAYER.fullmatch(each[0])])
    for text, indices in groups.items():
        lines += [f"layers.{_ranges(indices)}", *(f"  {line}" for line in text.split("\n"))]
    return lines


def _lines(leaves: Sequence[Named]) -> list[str]:
    width = max((len(name) for name, _ in leaves), default=0)
    return [f"{name:{width}}  {leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves]


def _ranges(numbers: Sequence[int]) -> str:
    """Return e.g. "0-2,4" for [0, 1, 2, 4]."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] == n - 1:
            parts[-1] = [parts[-1][0], n]
        else:
            parts.append([n])
    return ",".join("-".join(map(str, part)) for part in parts)
