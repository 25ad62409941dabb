"""Qwen 1.5 and 2 with experts (2024, arXiv:2407.10671), and a shared expert with a gate."""

from functools import partial

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.qwen2 import qwen_window
from forge_jax.models.families.qwen3_moe import dense_layers
from forge_jax.models.spec import MAX_WIDTH, ModelSpec, decoder_spec, read_experts, read_windows
from forge_jax.models.weight_map import FUSED_EXPERTS, ExpertNames, decoder_weights

DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "qkv_bias": True,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}

_NAMES = ExpertNames(shared="shared_expert")
_FUSED_NAMES = ExpertNames(shared="shared_expert", fused=FUSED_EXPERTS)


def _windows(config: HFConfig) -> tuple[int | None, ...]:
    """Return windows by `layer_types`, else for every second layer before `max_window_layers`."""
    window, last = qwen_window(config), config.integer("max_window_layers", low=0)
    if window is None and config.boolean("use_sliding_window"):
        raise config.error("sliding_window", "set, because use_sliding_window is true")
    return read_windows(
        config, window, lambda layer: window is not None and layer < last and layer % 2 == 0
    )


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    return decoder_spec(
        config,
        generation,
        "Qwen2MoeForCausalLM",
        attention_bias=config.boolean("qkv_bias"),
        windows=_windows(config),
        experts=read_experts(
            config,
            "num_experts",
            alias=False,
            intermediate_size=config.integer("moe_intermediate_size", high=MAX_WIDTH),
            normalized=config.boolean("norm_topk_prob"),
            dense_layers=dense_layers(config),
            shared_size=config.integer("shared_expert_intermediate_size", high=MAX_WIDTH),
            shared_gate=True,
        ),
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"sliding_window", "mlp_only_layers"}),
    weights=partial(decoder_weights, experts=_NAMES),
    other_weights=partial(decoder_weights, experts=_FUSED_NAMES),
)
