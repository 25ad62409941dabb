"""The text models of multimodal checkpoints. Images, video and audio are not supported.

The text model is one of another family. Its fields are in the section `text_config`. The names of
its tensors have a prefix, which `forge_jax.checkpoint.text_side` removes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.host.files import short_repr
from forge_jax.models.families import (
    gemma3,
    gemma4,
    llama4,
    ministral3,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
)
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec
from forge_jax.models.weight_map import Tensor, WeightMap
from forge_jax.weights import ggml_types

_TIED = "tie_word_embeddings"
_DTYPES = ("dtype", "torch_dtype")
# Fields of the whole model, which replace those of the text model.
_SHARED = (
    *("quantization_config", "compression_config", "bos_token_id", "eos_token_id"),
    ggml_types.KEY,
)


@dataclass(frozen=True, kw_only=True)
class TextSide(Architecture):
    """An architecture whose checkpoints also have other models, such as a vision tower.

    Attributes:
      name: as in the field `architectures`.
      model_type: the type in `text_config`, which may omit it.
      flat: True if the fields of the text model may be next to `vision_config`, as transformers 4
        saved them. Then `tie_word_embeddings` of either place counts.
      tied: the default of `tie_word_embeddings`.
      others: other text models by `model_type`, which differ only in their configuration.
    """

    name: str
    model_type: str
    flat: bool = False
    tied: bool = False
    others: Mapping[str, Architecture] = field(default_factory=dict)

    def read(self, config: HFConfig, generation: HFConfig) -> ModelSpec:
        text = self._text_config(config)
        other = self.others.get(text.values.get("model_type", self.model_type))
        spec = (super() if other is None else other).read(text, generation)
        quantization = spec.quantization
        if quantization is not None:
            quantization = replace(quantization, is_text_side=True)
        return replace(spec, architecture=self.name, quantization=quantization)

    def _text_config(self, config: HFConfig) -> HFConfig:
        text = config.section("text_config")
        if text is None:
            if not self.flat:
                raise config.error("text_config", "an object with the fields of the text model")
            text = config
        elif text.values.get("model_type", self.model_type) not in (self.model_type, *self.others):
            raise UnsupportedModelError(
                f"{text.where}: model_type {short_repr(text.values['model_type'])} is not "
                f"supported in {self.name}; supported: {', '.join((self.model_type, *self.others))}"
            )
        values = {**text.values, _TIED: self._is_tied(config, text)}
        if any(config.has(name) for name in _DTYPES):
            values = {name: value for name, value in values.items() if name not in _DTYPES}
        values |= {name: config.values[name] for name in (*_DTYPES, *_SHARED) if config.has(name)}
        for name in ("rope_scaling", "rope_parameters"):
            if isinstance(values.get(name), dict):
                values[name] = _without_mrope(values[name])
        return HFConfig(values, text.where)

    def _is_tied(self, config: HFConfig, text: HFConfig) -> bool:
        given = [each.boolean(_TIED) for each in (config, text) if each.has(_TIED)]
        return self.tied if not given else any(given) if self.flat else given[0]


def _without_mrope(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rotation without M-RoPE (Wang et al. 2024, arXiv:2409.12191, section 2.1).

    M-RoPE splits the pairs of a head among three axes of positions. All axes of a text token have
    the same position, so its rotation is the ordinary one.
    """
    kept = dict(section)
    if kept.get("type") == "mrope" and "rope_type" in kept:
        del kept["type"]
    kinds = {name: "default" for name in ("type", "rope_type") if kept.get(name) == "mrope"}
    return {**kept, **kinds}


def text_side(architecture: Architecture, **parts: Any) -> TextSide:
    """Return an architecture with the text model of another one.

    Args:
      architecture: the text model's architecture.
      parts: the attributes of `TextSide`, and those of `architecture` that differ.
    """
    own = {field.name: getattr(architecture, field.name) for field in fields(Architecture)}
    return TextSide(**{**own, **parts})


# ---- the families ------------------------------------------------------------------------------

_GEMMA4_UNIFIED = {
    **{"max_position_embeddings": 262_144, "sliding_window": 1024},
    **{"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0},
}
_QWEN2_VL = {
    **{"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568},
    **{"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
    **{"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80},
    **{"bos_token_id": 151643, "eos_token_id": 151645},
}
_QWEN3_VL = {"max_position_embeddings": 128000, "rope_theta": 5e5}
_QWEN3_VL_MOE = {
    **_QWEN3_VL,
    **{"intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16},
    **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
    **{"norm_topk_prob": True},
}


def _joined_experts(spec: ModelSpec) -> WeightMap:
    """Return the tensors of a checkpoint with one tensor for each matrix of all experts."""
    joined = qwen3_moe.ARCHITECTURE.other_weights
    assert joined is not None
    return joined(spec)


def _transposed_experts(spec: ModelSpec) -> WeightMap:
    """Return the same with inputs before outputs, as in Qwen's files."""

    def tensor_of(part: Tensor) -> Tensor:
        if len(part.shape) < 3:
            return part
        experts, outputs, inputs = part.shape
        return Tensor(part.name, (experts, inputs, outputs), transpose=True)

    weights = _joined_experts(spec)
    return {leaf: tuple(map(tensor_of, parts)) for leaf, parts in weights.items()}


ARCHITECTURES = {
    side.name: side
    for side in (
        text_side(
            gemma3.ARCHITECTURE,
            name="Gemma3ForConditionalGeneration",
            model_type="gemma3_text",
            tied=True,
        ),
        text_side(
            gemma4.ARCHITECTURE,
            name="Gemma4ForConditionalGeneration",
            model_type="gemma4_text",
            tied=True,
        ),
        text_side(
            gemma4.ARCHITECTURE,
            name="Gemma4UnifiedForConditionalGeneration",
            model_type="gemma4_unified_text",
            tied=True,
            defaults={**gemma4.DEFAULTS, **_GEMMA4_UNIFIED},
        ),
        text_side(
            llama4.ARCHITECTURE,
            name="Llama4ForConditionalGeneration",
            model_type="llama4_text",
        ),
        text_side(
            mistral.ARCHITECTURE,
            name="Mistral3ForConditionalGeneration",
            model_type="mistral",
            others={"ministral3": ministral3.ARCHITECTURE},
        ),
        text_side(
            qwen2.ARCHITECTURE,
            name="Qwen2VLForConditionalGeneration",
            model_type="qwen2_vl_text",
            flat=True,
            defaults={**qwen2.DEFAULTS, **_QWEN2_VL},
        ),
        text_side(
            qwen2.ARCHITECTURE,
            name="Qwen2_5_VLForConditionalGeneration",
            model_type="qwen2_5_vl_text",
            flat=True,
            defaults={**qwen2.DEFAULTS, **_QWEN2_VL},
        ),
        text_side(
            qwen3.ARCHITECTURE,
            name="Qwen3VLForConditionalGeneration",
            model_type="qwen3_vl_text",
            defaults={**qwen3.DEFAULTS, **_QWEN3_VL},
        ),
        text_side(
            qwen3_moe.ARCHITECTURE,
            name="Qwen3VLMoeForConditionalGeneration",
            model_type="qwen3_vl_moe_text",
            defaults={**qwen3_moe.DEFAULTS, **_QWEN3_VL_MOE},
            weights=_joined_experts,
            other_weights=_transposed_experts,
        ),
        text_side(
            qwen3_5.DENSE,
            name="Qwen3_5ForConditionalGeneration",
            model_type="qwen3_5_text",
        ),
        text_side(
            qwen3_5.MOE,
            name="Qwen3_5MoeForConditionalGeneration",
            model_type="qwen3_5_moe_text",
        ),
    )
}
