"""MiniCPM 1, 2 and 4 (2024, arXiv:2404.06395): Llama with factors that follow from its sizes."""

import math

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.models.families import llama
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import MAX_LAYERS, MAX_WIDTH, ModelSpec, decoder_spec

# Of the configuration class that the checkpoints bring along.
DEFAULTS = {
    **{field: value for field, value in llama.DEFAULTS.items() if field != "mlp_bias"},
    "tie_word_embeddings": True,
    "scale_emb": 1,
    "scale_depth": 1,
    "dim_model_base": 1,
    "sparse_config": None,
    "num_experts": 0,
}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    for name in ("sparse_config", "num_experts"):
        if config.values.get(name):
            raise UnsupportedModelError(f"{config.where}: {name} is not supported")
    bias = config.boolean("attention_bias")
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    hidden_size = config.integer("hidden_size", high=MAX_WIDTH)
    return decoder_spec(
        config,
        generation,
        "MiniCPMForCausalLM",
        attention_bias=bias,
        output_bias=bias,
        embedding_scale=config.number("scale_emb"),
        residual_scale=config.number("scale_depth") / math.sqrt(layers),
        logit_scale=config.number("dim_model_base") / hidden_size,
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"num_key_value_heads", "sparse_config"}),
)
