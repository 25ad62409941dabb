"""The fields of `config.json` about experts, from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forge_jax.checkpoint.gguf import gpt_oss
from forge_jax.checkpoint.gguf.families import Fields
from forge_jax.checkpoint.gguf.names import MAX_EXPERTS

_SOFTMAX, _SIGMOID, _SOFTMAX_OF_USED = (
    1,
    2,
    3,
)  # `expert_gating_func`; 0: the architecture's default
_GATING = "expert_gating_func"


def expert_fields(arch: str, fields: Fields) -> dict[str, Any]:
    """Return the fields about experts; none if the model has none.

    Raises:
      UnsupportedModelError: an option is not implemented for the architecture.
      CheckpointError: a key is missing or wrong.
    """
    count = fields.integer("expert_count", 0, high=MAX_EXPERTS)
    if not count:
        if arch in MOE:
            raise fields.metadata.error(f"{arch}.expert_count", "1 or more")
        return {}
    used = {"num_experts_per_tok": fields.integer("expert_used_count", low=1, high=count)}
    if arch in _ROUTED:
        return used | _ROUTED[arch](fields)
    _check_plain(arch, fields)
    found = {"num_local_experts": count, **used}
    if arch == "llama":
        return found | {"architectures": ["MixtralForCausalLM"]}
    if arch in ("granitehybrid", "granitemoe", "olmoe"):
        return found
    return found | {
        **_inner_size(fields),
        "norm_topk_prob": True,  # hard-coded in llama.cpp
    }


def _check_plain(arch: str, fields: Fields) -> None:
    """Reject routers other than a softmax over the experts that are used."""
    allowed = [("expert_shared_count", (0,)), (_GATING, (0, _SOFTMAX))]
    if arch == "granitemoe":
        allowed.append(("expert_shared_feed_forward_length", (0,)))
    for name, usual in allowed:
        if fields.integer(name, 0) not in usual:
            raise fields.metadata.unsupported(
                f"{arch}.{name} is {fields.integer(name)}, which is not supported"
            )
    _check_scale(arch, fields)


def _check_scale(arch: str, fields: Fields) -> None:
    if _scale(fields) != 1:
        raise fields.metadata.unsupported(f"{arch}.expert_weights_scale is not supported")


def _check_router(arch: str, fields: Fields, gating: int = _SOFTMAX) -> None:
    """Reject routers other than the one that llama.cpp hard-codes for an architecture."""
    found = fields.integer(_GATING, gating)
    if found not in (0, gating):
        raise fields.metadata.unsupported(
            f"{arch}.{_GATING} is {found}, which is not supported; supported: {gating}"
        )
    _check_scale(arch, fields)


def _inner_size(fields: Fields) -> dict[str, int]:
    return {"moe_intermediate_size": fields.integer("expert_feed_forward_length", low=1)}


def _scale(fields: Fields) -> float:
    """Return the factor of the experts' sum; llama.cpp reads 0 as no factor."""
    return fields.number("expert_weights_scale", 1.0) or 1.0


def _glm4_moe(fields: Fields) -> dict[str, Any]:
    gating = fields.integer(_GATING, _SIGMOID)
    if gating not in (0, _SIGMOID):
        raise fields.metadata.unsupported(
            f"glm4moe.{_GATING} is {gating}, which is not supported; supported: {_SIGMOID}"
        )
    return _shared_and_routed(fields)


def _deepseek2(fields: Fields) -> dict[str, Any]:
    """Return the fields of V3 if scores are sigmoids, else those of V2."""
    corrected = any(name.endswith("exp_probs_b.bias") for name in fields.gguf.tensors)
    gating = fields.integer(_GATING, 0) or (_SIGMOID if corrected else _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID) or (corrected and gating == _SOFTMAX):
        raise fields.metadata.unsupported(
            f"deepseek2.{_GATING} is {gating}, which is not supported"
            f"{' with corrected scores' if corrected else ''}; supported: "
            f"{_SIGMOID if corrected else f'{_SOFTMAX}, {_SIGMOID}'}"
        )
    found = _shared_and_routed(fields)
    if gating == _SIGMOID:
        return found | {"architectures": ["DeepseekV3ForCausalLM"]}
    method = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    return found | {"topk_method": method}


def _shared_and_routed(fields: Fields) -> dict[str, Any]:
    """Return the fields of GLM-4.5 and DeepSeek's models."""
    return {
        **_inner_size(fields),
        **_groups(fields),
        "n_routed_experts": fields.integer("expert_count"),
        "n_shared_experts": fields.integer("expert_shared_count"),
        "first_k_dense_replace": fields.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": _scale(fields),
        "norm_topk_prob": fields.boolean("expert_weights_norm", False),
    }


def _ernie(fields: Fields) -> dict[str, Any]:
    _check_router("ernie4_5-moe", fields)
    return {
        **_inner_size(fields),
        "moe_num_experts": fields.integer("expert_count"),
        "moe_k": fields.integer("expert_used_count"),
        "moe_num_shared_experts": fields.integer("expert_shared_count", 0),
        "moe_layer_start_index": fields.integer("leading_dense_block_count"),
        "moe_layer_interval": fields.integer("interleave_moe_layer_step", low=1),
    }


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    """Return also the quantization of experts in MXFP4."""
    _check_router(gpt_oss.ARCH, fields, _SOFTMAX_OF_USED)
    return {
        "num_local_experts": fields.integer("expert_count"),
        "intermediate_size": fields.integer("expert_feed_forward_length", low=1),
        "swiglu_limit": gpt_oss.SWIGLU_LIMIT,
        "quantization_config": gpt_oss.quantization(fields.gguf),
    }


def _hybrid(fields: Fields) -> dict[str, Any]:
    """Return the fields of Qwen3-Next and Qwen 3.5, whose expert weights sum to 1."""
    _check_router(fields.metadata.string("general.architecture"), fields)
    shared = "expert_shared_feed_forward_length"
    return {
        **_inner_size(fields),
        "num_experts": fields.integer("expert_count"),
        "shared_expert_intermediate_size": fields.integer(shared, low=1),
        "norm_topk_prob": True,
    }


def _llama4(fields: Fields) -> dict[str, Any]:
    """Return the fields of Llama 4; llama.cpp hard-codes the others to their defaults."""
    _check_router("llama4", fields, _SIGMOID)
    if fields.has("attention.sliding_window"):
        raise fields.metadata.unsupported("llama4.attention.sliding_window is not supported")
    count = fields.integer("expert_count")
    return {
        "num_local_experts": count,
        "intermediate_size": fields.integer("expert_feed_forward_length", low=1),
        "intermediate_size_mlp": fields.integer("feed_forward_length", low=1),
        "interleave_moe_layer_step": fields.integer("interleave_moe_layer_step", low=1),
        "use_qk_norm": count != 128,  # Maverick has none
    }


def _groups(fields: Fields) -> dict[str, int]:
    """Return the numbers of expert groups. If the file has none, llama.cpp uses one group."""
    return {
        "n_group": fields.integer("expert_group_count", 0) or 1,
        "topk_group": fields.integer("expert_group_used_count", 0) or 1,
    }


# Architectures with additional router options.
_ROUTED: Mapping[str, Callable[[Fields], dict[str, Any]]] = {
    "deepseek2": _deepseek2,
    "ernie4_5-moe": _ernie,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "llama4": _llama4,
    **dict.fromkeys(("qwen3next", "qwen35moe"), _hybrid),
}
# Architectures that always have experts.
MOE = ("qwen3moe", "qwen3vlmoe", "olmoe", "qwen2moe", "granitemoe", *_ROUTED)
