"""The description of a model family: its config, tensors, decoder and KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.decoder import Decoder
from forge_jax.models.interface import DecoderFactory
from forge_jax.models.kv import LayerLayout, keys_and_values
from forge_jax.models.spec import ModelSpec
from forge_jax.models.weight_map import WeightMap, decoder_weights


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model family: how to read its config, which tensors it has, and how it computes.

    Only the first two attributes are required. The defaults of the others are those of a decoder
    like Llama, which `ModelSpec` configures.

    Attributes:
      read_spec: reads `config.json`, with defaults, and `generation_config.json`.
      defaults: values of fields that `config.json` may omit, from transformers' configuration
        class. None means that the value follows from other fields.
      nullable: fields with a default whose null has its own meaning in transformers. All others
        must not be null, as in transformers.
      weights: the tensors of each leaf.
      other_weights: the same for checkpoints in another layout, which is used if more of its
        tensors exist.
      gguf_weights: the same for GGUF files, as `forge_jax.checkpoint.gguf` names their tensors. It
        is needed if `weights` has experts stacked or matrices transposed.
      decoder: the class that computes the model.
      plain_swiglu: True if experts are SwiGLU without biases, as in the C++ kernels.
      cache: the layout of each layer's cache, for the spec of one shard.
      lora: True if adapters can change the matrices of attention and MLP, as in `Attention` and
        `MLP`.
      tensor_parallel: True if the decoder can be one shard. Leaves with the names and shapes of
        `Attention`, `MLP`, `Experts` and `Decoder` are split. `ModelSpec.own_sections` defines how
        others are.
    """

    read_spec: Callable[[HFConfig, HFConfig], ModelSpec]
    defaults: Mapping[str, Any]
    nullable: frozenset[str] = frozenset()
    weights: Callable[[ModelSpec], WeightMap] = decoder_weights
    other_weights: Callable[[ModelSpec], WeightMap] | None = None
    gguf_weights: Callable[[ModelSpec], WeightMap] | None = None
    decoder: DecoderFactory = Decoder
    plain_swiglu: bool = True
    cache: Callable[[ModelSpec], tuple[LayerLayout, ...]] = keys_and_values
    lora: bool = True
    tensor_parallel: bool = True

    def read(self, config: HFConfig, generation: HFConfig) -> ModelSpec:
        """Return the spec of a model from the two files.

        Raises:
          UnsupportedModelError: as in `forge_jax.models.spec.decoder_spec`.
          ModelError: as in `forge_jax.models.spec.decoder_spec`.
        """
        nullable = {"bos_token_id", "eos_token_id", *self.nullable}
        return self.read_spec(config.with_defaults(self.defaults, nullable), generation)

    def layouts(self, spec: ModelSpec) -> list[Callable[[ModelSpec], WeightMap]]:
        """Return the layouts that a checkpoint may have; the first decides on weight formats."""
        if spec.ggml_types is not None and self.gguf_weights is not None:
            return [self.gguf_weights]
        others = (self.other_weights, self.gguf_weights)
        return [self.weights, *(each for each in others if each is not None)]
