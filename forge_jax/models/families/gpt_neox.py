"""GPT-NeoX (Black et al. 2022, arXiv:2204.06745) and Pythia: attention and MLP in parallel."""

from dataclasses import replace

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.phi import check_head_dim
from forge_jax.models.spec import ModelSpec, decoder_spec
from forge_jax.models.weight_map import WeightMap, decoder_weights, renamed

DEFAULTS = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "rotary_emb_base": 1e4,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "attention_bias": True,
    "use_parallel_residual": True,
}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    check_head_dim(config)
    bias = config.boolean("attention_bias")
    return decoder_spec(
        config.replaced(
            rope_theta=config.number("rotary_emb_base"),
            partial_rotary_factor=config.number("rotary_pct"),
            num_key_value_heads=None,
        ),
        generation,
        "GPTNeoXForCausalLM",
        norm_eps_name="layer_norm_eps",
        whole_heads=True,
        partial_rotary=True,
        parallel_block=config.boolean("use_parallel_residual"),
        norm_type="layer",
        norm_bias=True,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        mlp_gated=False,
    )


def _weights(spec: ModelSpec, head: str = "embed_out") -> WeightMap:
    weights = renamed(
        decoder_weights(spec, fused={"qkv"}),
        {
            "model.layers": "gpt_neox.layers",
            "model.embed_tokens": "gpt_neox.embed_in",
            "model.norm": "gpt_neox.final_layer_norm",
            "lm_head": head,
            "self_attn.qkv_proj": "attention.query_key_value",
            "self_attn.o_proj": "attention.dense",
            "up_proj": "dense_h_to_4h",
            "down_proj": "dense_4h_to_h",
        },
    )
    heads = spec.num_attention_heads
    by_head = {
        leaf: tuple(replace(part, heads=heads) for part in parts)
        for leaf, parts in weights.items()
        if ".attention.qkv." in leaf
    }
    return weights | by_head


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    weights=_weights,
    other_weights=lambda spec: _weights(spec, head="lm_head"),  # as transformers 5 names it
)
