"""StableLM (Stability AI 2024, arXiv:2402.17834): LayerNorm, partial RoPE, and an option to compute
attention and MLP in parallel."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.phi import ONE_NORM, check_head_dim, check_no_qk_norm
from forge_jax.models.spec import ModelSpec, decoder_spec
from forge_jax.models.weight_map import WeightMap, decoder_weights, renamed

DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "use_qkv_bias": False,
    "qk_layernorm": False,
    "use_parallel_residual": False,
}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    check_no_qk_norm(config)
    check_head_dim(config)
    return decoder_spec(
        config,
        generation,
        "StableLmForCausalLM",
        norm_eps_name="layer_norm_eps",
        whole_heads=True,
        partial_rotary=True,
        parallel_block=config.boolean("use_parallel_residual"),
        norm_type="layer",
        norm_bias=True,
        attention_bias=config.boolean("use_qkv_bias"),
    )


def _weights(spec: ModelSpec) -> WeightMap:
    weights = decoder_weights(spec)
    return renamed(weights, ONE_NORM) if spec.parallel_block else weights


ARCHITECTURE = Architecture(read_spec=_read_spec, defaults=DEFAULTS, weights=_weights)
