"""OLMoE (2024, arXiv:2409.02060): experts in every layer, and norms on queries and keys."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import MAX_WIDTH, ModelSpec, decoder_spec, read_experts
from forge_jax.models.weight_map import FUSED_EXPERTS, ExpertNames, decoder_weights

DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 50279,
    "attention_bias": False,
    "clip_qkv": None,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    if config.has("clip_qkv"):
        raise UnsupportedModelError(f"{config.where}: clip_qkv is not supported")
    if config.has("head_dim"):  # the norms of queries and keys have this size
        sizes = config.integer("hidden_size"), config.integer("num_attention_heads")
        if config.integer("head_dim") * sizes[1] != sizes[0]:
            raise config.error("head_dim", "hidden_size / num_attention_heads")
    bias = config.boolean("attention_bias")
    return decoder_spec(
        config,
        generation,
        "OlmoeForCausalLM",
        whole_heads=True,
        qk_norm="all",
        attention_bias=bias,
        output_bias=bias,
        experts=read_experts(
            config,
            "num_experts",
            intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
            normalized=config.boolean("norm_topk_prob"),
        ),
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"num_key_value_heads", "clip_qkv"}),
    weights=decoder_weights,
    other_weights=lambda spec: decoder_weights(spec, experts=ExpertNames(fused=FUSED_EXPERTS)),
)
