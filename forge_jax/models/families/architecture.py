"""The description of a model family: its config, its tensors and its decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.decoder import Decoder, MatrixBuilder
from forge_jax.models.spec import ModelSpec
from forge_jax.models.weight_map import WeightMap, decoder_weights


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How to read an architecture's config and map its tensors.

    Attributes:
      read_spec: reads `config.json`, with defaults, and `generation_config.json`.
      defaults: values of fields that `config.json` may omit, from transformers' configuration
        class. None means that the value follows from other fields.
      nullable: fields with a default whose null has its own meaning in transformers. All others
        must not be null, as in transformers.
      weights: the tensors of each leaf.
      other_weights: the same for checkpoints in another layout, which is used if more of its
        tensors exist.
      decoder: the class that `Model.build` calls with (spec, dtype, matrix builder, shards). A
        class with other math must have the methods `hidden` and `logits` of `Decoder`, and `norm`.
    """

    read_spec: Callable[[HFConfig, HFConfig], ModelSpec]
    defaults: Mapping[str, Any]
    nullable: frozenset[str] = frozenset()
    weights: Callable[[ModelSpec], WeightMap] = decoder_weights
    other_weights: Callable[[ModelSpec], WeightMap] | None = None
    decoder: Callable[[ModelSpec, Any, MatrixBuilder, int], nnx.Module] = Decoder

    def read(self, config: HFConfig, generation: HFConfig) -> ModelSpec:
        """Return the spec of a model from the two files.

        Raises:
          UnsupportedModelError: as in `forge_jax.models.spec.decoder_spec`.
          ModelError: as in `forge_jax.models.spec.decoder_spec`.
        """
        nullable = {"bos_token_id", "eos_token_id", *self.nullable}
        return self.read_spec(config.with_defaults(self.defaults, nullable), generation)
