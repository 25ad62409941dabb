"""Hugging Face's names of the tensors of a GGUF file, by architecture."""

from __future__ import annotations

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OUTSIDE_PARTS = (
    *("token_embd", "position_embd", "output_norm", "output"),
    *("per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm"),
)
PER_LAYER_EMBEDDING = "per_layer_token_embd.weight"
_LINEAR = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
# By architecture: the module of the experts and the router, and the matrices of each expert.
_USUAL_EXPERTS = (
    "mlp",
    {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"},
)
_EXPERTS = {
    "llama": ("block_sparse_moe", {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}),
    **dict.fromkeys(("qwen3moe", "qwen3vlmoe", "olmoe", "qwen2moe", "glm4moe"), _USUAL_EXPERTS),
    **dict.fromkeys(("ernie4_5-moe", "granitemoe", "granitehybrid", "deepseek2"), _USUAL_EXPERTS),
    **dict.fromkeys(("qwen3next", "qwen35moe"), _USUAL_EXPERTS),
    "llama4": ("feed_forward", _USUAL_EXPERTS[1]),
    "gemma4": ("", {"ffn_gate_up": "gate_up_proj", "ffn_down": "down_proj"}),
}
_SHARED_GATE = "mlp.shared_expert_gate"
# By architecture: the tensor that corrects the scores of experts.
_CORRECTIONS = {
    "deepseek2": "mlp.gate.e_score_correction_bias",
    "glm4moe": "mlp.gate.e_score_correction_bias",
    "ernie4_5-moe": "mlp.moe_statics.e_score_correction_bias",
}
# Vectors that are matrices of one row in Hugging Face's checkpoints.
ONE_ROW = (_SHARED_GATE, _CORRECTIONS["ernie4_5-moe"])
MAX_LAYERS, MAX_HEADS, MAX_EXPERTS, MAX_WIDTH = 1024, 4096, 4096, 2**20
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = {
    **_GEMMA,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_PHI3 = {"ffn_up": "mlp.gate_up_proj"}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GATED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": _SHARED_GATE,
}
_NORM_BEFORE_MLP = {"post_attention_norm": "post_attention_layernorm"}
_OWN_NAMES = {
    **{"gemma2": _GEMMA, "gemma3": _GEMMA, "gemma4": _GEMMA4, "phi3": _PHI3},
    **{"exaone4": _NORMS_AFTER, "olmo2": _NORMS_AFTER},
    "seed_oss": _NORM_BEFORE_MLP,
    "chatglm": {"ffn_up": "mlp.gate_up_proj"},
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "deepseek2": {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        **_SHARED_EXPERTS,
    },
    "ernie4_5-moe": _SHARED_EXPERTS,
    "granitehybrid": _SHARED_EXPERTS,
    "gpt2": {"position_embd": "model.wpe"},
    "glm4moe": _NORM_BEFORE_MLP | _SHARED_EXPERTS,
    "llama4": {
        f"ffn_{part}{suffix}": f"feed_forward.{module}{part}_proj"
        for part in ("gate", "up", "down")
        for suffix, module in (("", ""), ("_shexp", "shared_expert."))
    },
    "gpt-oss": _NORM_BEFORE_MLP,
    "phi2": {
        "attn_output": "self_attn.dense",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
        "output_norm": "model.final_layernorm",
    },
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "qwen2moe": _GATED_EXPERT,
    **dict.fromkeys(("qwen3next", "qwen35moe"), _GATED_EXPERT | _NORM_BEFORE_MLP),
    "qwen35": _NORM_BEFORE_MLP,
    "falcon": {
        "attn_norm_2": "ln_attn",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
        "token_embd": "transformer.word_embeddings",
        "output_norm": "transformer.ln_f",
    },
    "gptneox": {
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
    },
}
_ROUTER = "ffn_gate_inp"
# By architecture: tensors of a layer whose names do not follow from those of their modules.
_WHOLE_NAMES = {
    **{arch: {"exp_probs_b.bias": name} for arch, name in _CORRECTIONS.items()},
    "gemma4": {
        "layer_output_scale.weight": "layer_scalar",
        f"{_ROUTER}.weight": "router.proj.weight",
        f"{_ROUTER}.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    "llama4": {f"{_ROUTER}.weight": "feed_forward.router.weight"},
    "gpt-oss": {
        "attn_sinks.weight": "self_attn.sinks",
        **{f"{_ROUTER}.{kind}": f"mlp.router.{kind}" for kind in ("weight", "bias")},
    },
}
_LAYERS = {"gptneox": "gpt_neox.layers", "falcon": "transformer.h"}
PAIRED_ROWS = (
    *("llama", "mistral3", "granite", "granitemoe", "granitehybrid", "minicpm", "smollm3"),
)
SHIFTED_NORMS = ("gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
_NORM_BIASES = ("gpt2", "phi2", "stablelm", "starcoder2", "gptneox", "falcon")

# Tensors that are read with the configuration or follow from it.
ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
NO_WEIGHTS = {ROPE_FREQS, ROPE_LONG, ROPE_SHORT}


def hf_name(name: str, arch: str) -> str | None:
    """Return Hugging Face's name of a tensor, or None if it is unknown."""
    own = _OWN_NAMES.get(arch, {})
    match name.split("."):
        case ["blk", str(layer), str(part), str(kind)] if is_number(
            layer
        ) and f"{part}.{kind}" in _whole_names(arch):
            return f"model.layers.{layer}.{_whole_names(arch)[f'{part}.{kind}']}"
        case ["blk", str(layer), str(part), "weight" | "bias" as kind] if is_number(layer):
            found = (_LINEAR | _NORMS | own).get(part)
            if found is None or (kind == "bias" and part not in _LINEAR | _biased_norms(arch)):
                return None
            return f"{_LAYERS.get(arch, 'model.layers')}.{layer}.{found}.{kind}"
        case ["output_norm", "bias"] if arch in _NORM_BIASES:
            return f"{own.get('output_norm', 'model.norm')}.bias"
        case [str(part), "weight"] if part in _OUTSIDE_PARTS and part in own:
            return f"{own[part]}.weight"
        case ["output", "bias"] if arch == "phi2":
            return "lm_head.bias"
    return _OUTSIDE.get(name)


def _whole_names(arch: str) -> dict[str, str]:
    """Return the names of a layer's tensors that do not follow the usual pattern."""
    names = _WHOLE_NAMES.get(arch, {})
    if arch in _EXPERTS and arch != "gemma4":
        return {f"{_ROUTER}.weight": f"{_EXPERTS[arch][0]}.gate.weight"} | names
    return names


def _biased_norms(arch: str) -> dict[str, str]:
    return _NORMS | {"attn_norm_2": ""} if arch in _NORM_BIASES else {}


def experts_name(name: str, arch: str) -> str | None:
    """Return Hugging Face's name of a matrix of a layer's experts, with {} for the expert."""
    where, matrices = _EXPERTS.get(arch, ("", {}))
    match name.split("."):
        case ["blk", str(layer), str(part), "weight"] if part.endswith("_exps"):
            found = matrices.get(part.removesuffix("_exps"))
            if found is not None and is_number(layer):
                module = f"model.layers.{layer}.{where}".removesuffix(".")
                return f"{module}.experts.{{}}.{found}.weight"
    return None


def is_number(layer: str) -> bool:
    """Return True for a number without leading zeros, so that no two names mean the same layer."""
    return layer.isdecimal() and len(layer) < 6 and str(int(layer)) == layer
