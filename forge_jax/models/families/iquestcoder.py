"""IQuest-Coder (2026): Llama with its own defaults."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.models.families import llama
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec

DEFAULTS = {
    **llama.DEFAULTS,
    "vocab_size": 76800,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 80,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    for name in ("clip_qkv", "use_sliding_window"):
        if config.values.get(name):
            raise UnsupportedModelError(f"{config.where}: {name} is not supported")
    return decoder_spec(
        config, generation, "IQuestCoderForCausalLM", whole_heads=True, **llama.biases(config)
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"num_key_value_heads", "head_dim"}),
)
