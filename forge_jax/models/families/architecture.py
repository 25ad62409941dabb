"""What a family of models has to say of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forge_jax.checkpoint.weight_map import WeightMap, decoder_weights
from forge_jax.config_file import Config
from forge_jax.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How the config of an architecture is read, and its tensors are mapped."""

    read_spec: Callable[[Config, Config], ModelSpec]  # config.json, generation_config.json
    weights: Callable[[ModelSpec], WeightMap] = decoder_weights
    # Of another form that its checkpoints come in: taken where more of these tensors are there.
    other_weights: Callable[[ModelSpec], WeightMap] | None = None
