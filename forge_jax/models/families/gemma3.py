"""Gemma 3's text models (2025, arXiv:2503.19786).

Five layers with a sliding window and their own rotation precede each layer with full attention.
Queries and keys have norms per head. `attn_logit_softcapping` has no effect, as in transformers.
"""

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.gemma2 import NULLABLE, gemma_parts
from forge_jax.models.spec import (
    FULL,
    MAX_WIDTH,
    SLIDING,
    ModelSpec,
    RopeSpec,
    decoder_spec,
    read_head_dim,
    read_window,
    read_windows,
    rope_of,
)

DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "rope_local_base_freq": 1e4,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "sliding_window_pattern": 6,
}


def read_ropes(config: HFConfig) -> tuple[RopeSpec, RopeSpec]:
    """Return the rotation of layers with full attention, and that of layers with a window.

    `rope_parameters` has a section for each. `rope_scaling` is merged into the first.
    """
    parameters, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    full = local = None
    if parameters is not None:
        flat = [name for name in parameters.values if name not in (FULL, SLIDING)]
        if flat:
            raise UnsupportedModelError(
                f"{parameters.where}: {flat[0]} is not supported: put it into {FULL} or {SLIDING}"
            )
        full, local = parameters.section(FULL), parameters.section(SLIDING)
        if full is None and scaling is not None:
            raise parameters.error(FULL, "an object, because rope_scaling is merged into it")
    if scaling is not None:
        before = {"rope_type": "default"} if full is None else full.values
        full = HFConfig({**before, **scaling.values}, scaling.where)
    positions, head_dim = config.integer("max_position_embeddings"), read_head_dim(config)
    return (
        rope_of(full or HFConfig({}), config, positions, head_dim),
        rope_of(
            local or HFConfig({}), config, positions, head_dim, theta_name="rope_local_base_freq"
        ),
    )


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    every = config.integer("sliding_window_pattern", high=MAX_WIDTH)
    rope, local_rope = read_ropes(config)
    return decoder_spec(
        config,
        generation,
        "Gemma3ForCausalLM",
        rope=rope,
        local_rope=local_rope,
        qk_norm="head",
        windows=read_windows(config, read_window(config), lambda layer: (layer + 1) % every != 0),
        **gemma_parts(config),
    )


ARCHITECTURE = Architecture(read_spec=_read_spec, defaults=DEFAULTS, nullable=NULLABLE)
