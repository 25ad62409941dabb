"""The description of a family of models: its config, its tensors and its decoder."""

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
    """How the config of an architecture is read, and its tensors are mapped.

    Attributes:
      read_spec: reads `config.json`, with defaults, and `generation_config.json`.
      defaults: of fields that `config.json` may leave out: those of transformers' configuration
        class. None: the value follows from others.
      nullable: fields with a default whose null has a meaning of its own in transformers. Of all
        others it is refused, as there.
      weights: the tensors of each leaf.
      other_weights: the same of checkpoints in another layout, which is taken if more of its
        tensors are there.
      decoder: the class that `Model.build` calls with (spec, dtype, matrix builder, shards). One
        with other mathematics has the methods `hidden` and `logits` of `Decoder`, and `norm`.
    """

    read_spec: Callable[[HFConfig, HFConfig], ModelSpec]
    defaults: Mapping[str, Any]
    nullable: frozenset[str] = frozenset()
    weights: Callable[[ModelSpec], WeightMap] = decoder_weights
    other_weights: Callable[[ModelSpec], WeightMap] | None = None
    decoder: Callable[[ModelSpec, Any, MatrixBuilder, int], nnx.Module] = Decoder

    def read(self, config: HFConfig, generation: HFConfig) -> ModelSpec:
        """The spec of a model from the two files as they are.

        Raises:
          as `forge_jax.models.spec.decoder_spec`.
        """
        nullable = {"bos_token_id", "eos_token_id", *self.nullable}
        return self.read_spec(config.with_defaults(self.defaults, nullable), generation)
