"""Command R (Cohere 2024): attention and MLP in parallel after one norm, and a factor on logits.

Command R7B and Command A (`Cohere2ForCausalLM`) have sliding windows, and full layers without
rotation.
"""

from typing import Any

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.phi import ONE_NORM
from forge_jax.models.spec import MAX_LAYERS, ModelSpec, decoder_spec, read_window, read_windows
from forge_jax.models.weight_map import WeightMap, decoder_weights, renamed

_COMMON = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": 255001,
    "attention_bias": False,
}
DEFAULTS = {**_COMMON, "rope_theta": 5e5, "use_qk_norm": False}
DEFAULTS_2 = {**_COMMON, "rope_theta": 1e4, "sliding_window": 4096, "sliding_window_pattern": 4}


def _spec(config: HFConfig, generation: HFConfig, name: str, **parts: Any) -> ModelSpec:
    bias = config.boolean("attention_bias")
    return decoder_spec(
        config,
        generation,
        name,
        norm_eps_name="layer_norm_eps",
        interleaved=True,
        parallel_block=True,
        norm_type="layer",
        attention_bias=bias,
        output_bias=bias,
        logit_scale=config.number("logit_scale"),
        **parts,
    )


def _read_cohere(config: HFConfig, generation: HFConfig) -> ModelSpec:
    normed = config.boolean("use_qk_norm", False)
    return _spec(config, generation, "CohereForCausalLM", qk_norm="each_head" if normed else None)


def _read_cohere2(config: HFConfig, generation: HFConfig) -> ModelSpec:
    every = config.integer("sliding_window_pattern", high=MAX_LAYERS)
    windows = read_windows(config, read_window(config), lambda layer: (layer + 1) % every != 0)
    full = frozenset(layer for layer, window in enumerate(windows) if window is None)
    return _spec(config, generation, "Cohere2ForCausalLM", windows=windows, no_rope=full)


def _weights(spec: ModelSpec) -> WeightMap:
    return renamed(decoder_weights(spec), ONE_NORM)


COHERE = Architecture(
    read_spec=_read_cohere,
    defaults=DEFAULTS,
    nullable=frozenset({"num_key_value_heads", "use_qk_norm"}),
    weights=_weights,
)
COHERE2 = Architecture(
    read_spec=_read_cohere2,
    defaults=DEFAULTS_2,
    nullable=frozenset({"num_key_value_heads"}),
    weights=_weights,
)
