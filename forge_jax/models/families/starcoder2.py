"""StarCoder2 (Lozhkov et al. 2024, arXiv:2402.19173): LayerNorm, biases and an MLP without a gate,
with an optional sliding window."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec, read_window, window_everywhere
from forge_jax.models.weight_map import WeightMap, decoder_weights, renamed

DEFAULTS = {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "sliding_window": None,
    "use_bias": True,
}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    bias = config.boolean("use_bias")
    return decoder_spec(
        config,
        generation,
        "Starcoder2ForCausalLM",
        norm_eps_name="norm_epsilon",
        norm_type="layer",
        norm_bias=True,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        mlp_gated=False,
        windows=window_everywhere(config, read_window(config)),
    )


def _weights(spec: ModelSpec) -> WeightMap:
    return renamed(decoder_weights(spec), {"up_proj": "c_fc", "down_proj": "c_proj"})


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"sliding_window"}),
    weights=_weights,
)
