"""GLM-4 (Zhipu AI 2024, arXiv:2406.12793): half of each head is rotated, in neighboring pairs.

The 0414 releases (`Glm4ForCausalLM`) also have norms after sublayers.
"""

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, NormPlacement, decoder_spec
from forge_jax.models.weight_map import WeightMap, decoder_weights, renamed

DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "attention_bias": True,
}
_NULLABLE = frozenset({"partial_rotary_factor"})
_END_IDS = [151329, 151336, 151338]  # if the file has none, as in transformers
_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def _spec(config: HFConfig, generation: HFConfig, name: str, norms: NormPlacement) -> ModelSpec:
    if not config.has("eos_token_id") and config.integer("vocab_size") > max(_END_IDS):
        config = config.replace(eos_token_id=_END_IDS)
    return decoder_spec(
        config,
        generation,
        name,
        partial_rotary=True,
        interleaved=True,
        norm_placement=norms,
        attention_bias=config.boolean("attention_bias"),
    )


def _read_glm(config: HFConfig, generation: HFConfig) -> ModelSpec:
    return _spec(config, generation, "GlmForCausalLM", "before")


def _read_glm4(config: HFConfig, generation: HFConfig) -> ModelSpec:
    return _spec(config, generation, "Glm4ForCausalLM", "both")


def _glm_weights(spec: ModelSpec) -> WeightMap:
    return decoder_weights(spec, fused=("gate_up",))


def _glm_gguf_weights(spec: ModelSpec) -> WeightMap:
    """Return the tensors of files from the first releases, which have queries to values in one."""
    types = spec.ggml_types
    if types is not None and types.blocks_of("model.layers.0.self_attn.q_proj.weight"):
        return _glm_weights(spec)
    return decoder_weights(spec, fused=("qkv", "gate_up"))


GLM = Architecture(
    read_spec=_read_glm,
    defaults=DEFAULTS,
    nullable=_NULLABLE,
    weights=_glm_weights,
    gguf_weights=_glm_gguf_weights,
)
GLM4 = Architecture(
    read_spec=_read_glm4,
    defaults=DEFAULTS,
    nullable=_NULLABLE,
    weights=lambda spec: renamed(_glm_weights(spec), _NORMS),
)
