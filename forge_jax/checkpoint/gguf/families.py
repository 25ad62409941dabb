"""The fields of `config.json` that only one family has, from the metadata of a GGUF file.

llama.cpp hard-codes some values, such as the layers of SmolLM3 that have no rotation. They are
added here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from forge_jax.checkpoint.gguf import delta_net, mamba
from forge_jax.checkpoint.gguf.metadata import Metadata
from forge_jax.checkpoint.gguf.reader import GGUFFile


class Fields(Protocol):
    """The metadata of a file, and the fields that all families share."""

    gguf: GGUFFile
    metadata: Metadata
    layers: int
    hidden_size: int
    head_dim: int

    def integer(self, name: str, default: int | None = None, **limits: int) -> int: ...

    def number(self, name: str, default: float | None = None) -> float: ...

    def boolean(self, name: str, default: bool) -> bool: ...

    def has(self, name: str) -> bool: ...

    def partial_rotation(self) -> dict[str, float]: ...

    def rope_scaling(self) -> dict[str, Any] | None: ...

    def windows(self) -> dict[str, Any]: ...

    def by_layer(self, name: str) -> list[int]: ...


_EPS = "attention.layer_norm_epsilon"  # LayerNorm's epsilon


def has_layer_norm(arch: str) -> bool:
    """Return True if the norms of an architecture are LayerNorm."""
    return arch in (
        *("command-r", "cohere2", "falcon", "gpt2", "gptneox", "phi2", "stablelm", "starcoder2"),
    )


def own_fields(arch: str, fields: Fields) -> dict[str, Any]:
    """Return the fields that only this architecture has."""
    return _FAMILIES[arch](fields) if arch in _FAMILIES else {}


def _has(fields: Fields, tensor: str) -> bool:
    return tensor in fields.gguf.tensors


def _cohere(fields: Fields) -> dict[str, Any]:
    return {
        "layer_norm_eps": fields.number(_EPS),
        "logit_scale": fields.number("logit_scale"),
        "use_qk_norm": _has(fields, "blk.0.attn_q_norm.weight"),
    }


def _falcon(fields: Fields) -> dict[str, Any]:
    """Return Falcon's fields. The file has neither its biases nor layers in sequence."""
    kv_heads = fields.integer("attention.head_count_kv", 1)
    # The converter writes four times the hidden size, whatever the model has.
    up = fields.gguf.tensors.get("blk.0.ffn_up.weight")
    return {
        "layer_norm_epsilon": fields.number(_EPS),
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": None if up is None else up.shape[0],
        "new_decoder_architecture": kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if _has(fields, "blk.0.attn_norm_2.weight") else 1,
    }


def _gpt2(fields: Fields) -> dict[str, Any]:
    # The converter writes four times the hidden size, whatever the model has.
    up = fields.gguf.tensors.get("blk.0.ffn_up.weight")
    return {
        "layer_norm_epsilon": fields.number(_EPS),
        "n_inner": None if up is None else up.shape[0],
    }


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    """Return the rotation. The model does not round the bounds of YaRN's ramp; llama.cpp does."""
    rope = fields.rope_scaling() or {"rope_type": "default"}
    theta = fields.number("rope.freq_base", 10000.0)
    return {
        "rope_scaling": None,
        "rope_parameters": {**rope, "rope_theta": theta, "truncate": False},
    }


def _gpt_neox(fields: Fields) -> dict[str, Any]:
    return {
        "layer_norm_eps": fields.number(_EPS),
        "rotary_emb_base": fields.number("rope.freq_base", 10000.0),
        "rotary_pct": fields.partial_rotation()["partial_rotary_factor"],
        "attention_bias": _has(fields, "blk.0.attn_qkv.bias"),
        "use_parallel_residual": fields.boolean("use_parallel_residual", True),
    }


def _phi2(fields: Fields) -> dict[str, Any]:
    # The converter writes four times the hidden size, whatever the model has.
    up = fields.gguf.tensors.get("blk.0.ffn_up.weight")
    inner = {} if up is None else {"intermediate_size": up.shape[0]}
    return {"layer_norm_eps": fields.number(_EPS), **inner}


def _stablelm(fields: Fields) -> dict[str, Any]:
    return {
        "layer_norm_eps": fields.number(_EPS),
        "use_qkv_bias": _has(fields, "blk.0.attn_q.bias"),
        "qk_layernorm": _has(fields, "blk.0.attn_q_norm.weight"),
        # llama.cpp also decides by this tensor.
        "use_parallel_residual": not _has(fields, "blk.0.ffn_norm.weight"),
    }


def _starcoder2(fields: Fields) -> dict[str, Any]:
    bias = _has(fields, "blk.0.attn_q.bias")
    return {"norm_epsilon": fields.number(_EPS), "use_bias": bias}


def _chatglm(fields: Fields) -> dict[str, Any]:
    return {"attention_bias": any(_has(fields, f"blk.0.attn_{x}.bias") for x in ("qkv", "q"))}


def _mistral3(fields: Fields) -> dict[str, Any]:
    return {
        "rope_scaling": None,
        "rope_parameters": {
            **(fields.rope_scaling() or {}),
            "rope_theta": fields.number("rope.freq_base", 10000.0),
            "llama_4_scaling_beta": fields.number("attention.temperature_scale"),
        },
    }


def _glm4_moe(fields: Fields) -> dict[str, Any]:
    return {"use_qk_norm": _has(fields, "blk.0.attn_q_norm.weight")}


def _granite(fields: Fields) -> dict[str, Any]:
    return {
        "attention_multiplier": fields.number("attention.scale", fields.head_dim**-0.5),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "logits_scaling": fields.number("logit_scale", 1.0),
    }


def _deepseek2(fields: Fields) -> dict[str, Any]:
    """Return the sizes of latent attention. Newer files have them in keys that end with `_mla`."""
    if fields.has("attention.temperature_scale"):
        raise fields.metadata.unsupported("deepseek2.attention.temperature_scale is not supported")
    suffix = "_mla" if fields.has("attention.key_length_mla") else ""
    rotated = fields.integer("rope.dimension_count", low=1)
    key = fields.integer(f"attention.key_length{suffix}", low=rotated + 1)
    rank = "attention.q_lora_rank"
    return {
        "num_key_value_heads": fields.integer("attention.head_count"),
        "q_lora_rank": fields.integer(rank, low=1) if fields.has(rank) else None,
        "kv_lora_rank": fields.integer("attention.kv_lora_rank", low=1),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": fields.integer(f"attention.value_length{suffix}", low=1),
        "rope_interleave": True,  # as for all models of this architecture in llama.cpp
    }


def _ernie(fields: Fields) -> dict[str, Any]:
    return {"use_bias": _has(fields, "blk.0.attn_q.bias")}


def _minicpm(fields: Fields) -> dict[str, Any]:
    divisor = fields.number("logit_scale")
    if not divisor > 0:
        raise fields.metadata.error("minicpm.logit_scale", "above 0")
    return {
        "scale_emb": fields.number("embedding_scale"),
        "scale_depth": fields.number("residual_scale") * math.sqrt(fields.layers),
        "dim_model_base": fields.hidden_size / divisor,
    }


def _olmoe(fields: Fields) -> dict[str, Any]:
    return {"norm_topk_prob": False}  # hard-coded in llama.cpp


def _qwen2_moe(fields: Fields) -> dict[str, Any]:
    return {
        "num_experts": fields.integer("expert_count"),
        "shared_expert_intermediate_size": fields.integer(
            "expert_shared_feed_forward_length", low=1
        ),
        "qkv_bias": _has(fields, "blk.0.attn_q.bias"),
        "norm_topk_prob": False,  # hard-coded in llama.cpp
    }


def _hybrid(fields: Fields) -> dict[str, Any]:
    arch = fields.metadata.string("general.architecture")
    return delta_net.fields_of(fields.gguf, arch, fields.layers)


def _seed_oss(fields: Fields) -> dict[str, Any]:
    return {"attention_out_bias": _has(fields, "blk.0.attn_output.bias")}


def _smollm3(fields: Fields) -> dict[str, Any]:
    return {"no_rope_layer_interval": 4}


_FAMILIES: Mapping[str, Callable[[Fields], dict[str, Any]]] = {
    "chatglm": _chatglm,
    "cohere2": _cohere,
    "command-r": _cohere,
    "deepseek2": _deepseek2,
    "ernie4_5": _ernie,
    "ernie4_5-moe": _ernie,
    "glm4moe": _glm4_moe,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt-oss": _gpt_oss,
    "gptneox": _gpt_neox,
    "granite": _granite,
    "granitemoe": _granite,
    mamba.ARCH: lambda fields: _granite(fields) | mamba.fields_of(fields),
    "minicpm": _minicpm,
    "mistral3": _mistral3,
    "olmoe": _olmoe,
    "phi2": _phi2,
    "qwen2moe": _qwen2_moe,
    **dict.fromkeys(delta_net.ARCHES, _hybrid),
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
