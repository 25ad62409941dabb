"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts in place of every MLP."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import (
    MAX_WIDTH,
    ModelSpec,
    decoder_spec,
    read_experts,
    read_window,
    window_everywhere,
)
from forge_jax.models.weight_map import FUSED_EXPERTS, ExpertNames, decoder_weights

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    inner = config.integer("intermediate_size", high=MAX_WIDTH)
    return decoder_spec(
        config,
        generation,
        "MixtralForCausalLM",
        windows=window_everywhere(config, read_window(config)),
        experts=read_experts(config, "num_local_experts", intermediate_size=inner),
    )


_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"head_dim", "sliding_window"}),
    weights=lambda spec: decoder_weights(spec, experts=_NAMES),
    other_weights=lambda spec: decoder_weights(spec, experts=ExpertNames(fused=FUSED_EXPERTS)),
)
