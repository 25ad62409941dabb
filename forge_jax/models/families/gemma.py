"""Gemma (2024, arXiv:2403.08295): a GELU gate, norms with an offset, scaled embeddings."""

import math

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec

DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "attention_bias": False,
    "use_bidirectional_attention": None,
}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    if config.values["hidden_act"] == "gelu":  # the first releases mean the approximation by tanh
        config = config.replace(hidden_act="gelu_pytorch_tanh")
    bias = config.boolean("attention_bias")
    return decoder_spec(
        config,
        generation,
        "GemmaForCausalLM",
        whole_heads=True,
        norm_offset=1.0,
        attention_bias=bias,
        output_bias=bias,
        embedding_scale=math.sqrt(config.integer("hidden_size")),
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"use_bidirectional_attention"}),
)
