"""Phi-3 (2024, arXiv:2404.14219): Llama with fused matrices and LongRoPE."""

from functools import partial

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec, read_window, window_everywhere
from forge_jax.models.weight_map import decoder_weights

DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
}

_ROPE_TYPES = ("default", "longrope")


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    windows = window_everywhere(config, read_window(config))
    spec = decoder_spec(config, generation, "Phi3ForCausalLM", partial_rotary=True, windows=windows)
    if spec.rope.type not in _ROPE_TYPES:
        raise UnsupportedModelError(
            f"{config.where}: rope type {spec.rope.type!r} is not supported in this architecture; "
            f"supported: {', '.join(_ROPE_TYPES)}"
        )
    return spec


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"num_key_value_heads", "sliding_window"}),
    weights=partial(decoder_weights, fused=("qkv", "gate_up")),
)
