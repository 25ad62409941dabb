"""Stages of pipeline parallelism: contiguous layers of a model, on separate devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from jax.dtypes import itemsize_bits

from forge_jax.errors import ConfigError
from forge_jax.models.kv import LayerLayout, PagedLayout

if TYPE_CHECKING:
    from forge_jax.models.decoder import Model

_LAYERS = "layers."


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Some of a model's layers. The first stage also embeds, and the last one computes logits.

    Attributes:
      index: from 0.
      count: number of stages.
      layers: the indices of the layers.
      tied: True if the head's matrix is also the embedding, so that both ends store it.
    """

    index: int
    count: int
    layers: range
    tied: bool

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def owns(self, leaf: str) -> bool:
        """Return True if the stage stores a leaf, such as "layers.0.mlp.down.weight"."""
        if leaf.startswith(_LAYERS):
            return int(leaf.split(".", 2)[1]) in self.layers
        module = leaf.partition(".")[0]
        if module == "embedding":
            return self.is_first
        if module in ("norm", "head"):
            return self.is_last or (module == "head" and self.is_first and self.tied)
        # Small leaves of some families, such as learned positions.
        return self.is_first or self.is_last


def split_stages(model: Model, layouts: Sequence[LayerLayout], count: int) -> tuple[Stage, ...]:
    """Divide a model's layers so that the weights of the largest stage are as small as possible.

    Args:
      model: all of the model, or one shard of all of it.
      layouts: the layouts of the layers' caches.
      count: number of stages.

    Raises:
      ConfigError: the model has too few layers, its decoder cannot be divided, or a stage would
        have no attention.
    """
    option = f"--pipeline-parallel {count}"
    num_layers = model.spec.num_hidden_layers
    if count > num_layers:
        raise ConfigError(
            f"{option} is more than the model's {num_layers} layers: use at most {num_layers}"
        )
    if not model.has_stages:
        raise ConfigError(
            f"{option} is not supported for {model.spec.architecture}, whose decoder computes all "
            "layers together: use --tensor-parallel"
        )
    tied = model.spec.tie_word_embeddings
    whole = Stage(index=0, count=1, layers=range(num_layers), tied=tied)
    ends = _ends(*_leaf_bytes(model, whole), count)
    stages = tuple(
        Stage(index=index, count=count, layers=range(start, end), tied=tied)
        for index, (start, end) in enumerate(zip((0, *ends), ends, strict=False))
    )
    for stage in stages:
        own = [layouts[layer] for layer in stage.layers]
        if not any(isinstance(each, PagedLayout) and each.shares is None for each in own):
            raise ConfigError(
                f"{option}: layers {stage.layers[0]} to {stage.layers[-1]} would have no "
                "attention: use fewer stages"
            )
    return stages


def _leaf_bytes(model: Model, whole: Stage) -> tuple[list[int], int, int]:
    """Return the bytes of each layer, and those outside the layers of the first and last stage."""
    layers = [0] * len(whole.layers)
    first, last = (Stage(index=i, count=2, layers=range(0), tied=whole.tied) for i in (0, 1))
    outside_first = outside_last = 0
    for name, leaf in zip(model.names, model.leaves, strict=True):
        num_bytes = math.prod(leaf.shape) * itemsize_bits(leaf.dtype) // 8
        if name.startswith(_LAYERS):
            layers[int(name.split(".", 2)[1])] += num_bytes
            continue
        outside_first += num_bytes * first.owns(name)
        outside_last += num_bytes * last.owns(name)
    return layers, outside_first, outside_last


def _ends(layers: list[int], first: int, last: int, count: int) -> tuple[int, ...]:
    """Return where each stage's layers end, so that the largest stage has the fewest bytes.

    Args:
      layers: bytes of each layer.
      first, last: further bytes of the first and the last stage.
    """
    before = [0]
    for num_bytes in layers:
        before.append(before[-1] + num_bytes)

    @cache
    def best(start: int, stages: int) -> tuple[int, tuple[int, ...]]:
        """Return the largest sum and the ends of so many stages from layer `start` on."""
        extra = first if start == 0 else 0
        if stages == 1:
            return before[-1] - before[start] + extra + last, (len(layers),)
        found = []
        for end in range(start + 1, len(layers) - stages + 2):
            largest, ends = best(end, stages - 1)
            found.append((max(before[end] - before[start] + extra, largest), (end, *ends)))
        return min(found)

    return best(0, count)[1]
