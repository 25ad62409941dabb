"""Ministral 3 (Mistral AI 2025): Mistral with YaRN, for contexts of 256k tokens.

Queries grow with the position, as in Llama 4, so that attention over long contexts stays sharp.
"""

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import (
    ModelSpec,
    decoder_spec,
    read_window,
    rope_section,
    window_everywhere,
)

DEFAULTS = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": None,
}
YARN = {
    **{"type": "yarn", "rope_theta": 1e6, "factor": 16.0},
    **{"original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    scaling = config.section("rope_scaling")
    if config.section("rope_parameters") is None and (scaling is None or not scaling.values):
        config = config.replace(rope_parameters=YARN)
    section = rope_section(config)
    spec = decoder_spec(
        config,
        generation,
        "Ministral3ForCausalLM",
        windows=window_everywhere(config, read_window(config)),
        query_growth=section.number("llama_4_scaling_beta"),
    )
    if spec.rope.type != "yarn":
        raise UnsupportedModelError(
            f"{section.where}: rope type {spec.rope.type!r} is not supported in this architecture; "
            "supported: yarn"
        )
    return spec


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"sliding_window"}),
)
