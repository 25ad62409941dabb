"""The fields of `config.json` of Gemma 4, whose layers differ, from the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from forge_jax.checkpoint.gguf.families import Fields
from forge_jax.checkpoint.gguf.names import MAX_EXPERTS, PER_LAYER_EMBEDDING, ROPE_FREQS

ARCH = "gemma4"
_UNROTATED = 1e30  # the frequency factor of pairs that are not rotated
_SLIDING, _FULL = "sliding_attention", "full_attention"


def fields_of(fields: Fields) -> dict[str, Any]:
    """Return the fields that only Gemma 4 has, or that differ from layer to layer.

    Raises:
      UnsupportedModelError: layers of one type differ, or an option is not implemented.
      CheckpointError: a key or tensor is missing or wrong.
    """
    types = fields.windows()["layer_types"]
    full_dim, own_dim = fields.head_dim, fields.integer("attention.key_length_swa", low=2)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if fields.integer(name, own_dim) != own_dim:
            raise fields.metadata.unsupported(
                f"{ARCH}.{name} must be the head dim {own_dim}, got {fields.integer(name)}, which "
                "is not supported"
            )
    kv_heads = _by_type(fields, types)
    full = {"head_dim": full_dim, "num_key_value_heads": kv_heads[_FULL]}
    cap = "final_logit_softcapping"
    return {
        "head_dim": own_dim,
        "num_key_value_heads": kv_heads[_SLIDING],
        "per_layer_config": {str(i): full for i, kind in enumerate(types) if kind == _FULL},
        "rope_parameters": _ropes(fields, full_dim),
        "attention_k_eq_v": _has_keys_as_values(fields, types),
        "num_kv_shared_layers": fields.integer("attention.shared_kv_layers", 0),
        cap: fields.number(cap) if fields.has(cap) else None,
        **_inner_sizes(fields),
        **_inputs(fields),
        **_experts(fields),
    }


def _by_type(fields: Fields, types: list[str]) -> dict[str, int]:
    """Return the number of key/value heads by type of layer."""
    name = "attention.head_count_kv"
    counts = fields.by_layer(name)
    found = dict.fromkeys((_SLIDING, _FULL), counts[0])
    found |= dict(zip(types, counts, strict=True))
    if any(found[kind] != count for kind, count in zip(types, counts, strict=True)):
        raise fields.metadata.unsupported(
            f"{ARCH}.{name} is not supported if layers of one type differ"
        )
    return found


def _ropes(fields: Fields, full_dim: int) -> dict[str, Any]:
    """Return the rotations. The file lists the pairs that layers with full attention rotate."""
    theta = fields.number("rope.freq_base", 1e6)
    tensor, pairs = fields.gguf.tensors.get(ROPE_FREQS), full_dim // 2
    share = 1.0
    if tensor is not None:
        # The file bounds the size of this tensor, but not that of the head dim.
        factors = np.asarray(tensor.read() if tensor.shape == (pairs,) else [])
        rotated = int((factors == 1).sum())
        want = np.where(np.arange(len(factors)) < rotated, 1.0, _UNROTATED).astype(np.float32)
        if not len(factors) or not np.array_equal(factors, want):
            raise fields.metadata.unsupported(
                f"the tensor {ROPE_FREQS} must have {pairs} factors, first 1 and then 1e30"
            )
        if rotated < pairs:  # rounding must not remove a pair
            share = math.nextafter(rotated / pairs, 1.0)
    return {
        _FULL: {
            "rope_type": "proportional",
            "rope_theta": theta,
            "partial_rotary_factor": share,
        },
        _SLIDING: {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 1e4)},
    }


def _has_keys_as_values(fields: Fields, types: list[str]) -> bool:
    """Return True if layers with full attention have no matrix for values."""
    first = types.index(_FULL) if _FULL in types else len(types) - 1
    return f"blk.{first}.attn_v.weight" not in fields.gguf.tensors


def _inner_sizes(fields: Fields) -> dict[str, Any]:
    """Return the size of MLPs, which may be twice as large in layers with shared keys."""
    sizes = fields.by_layer("feed_forward_length")
    shared = fields.integer("attention.shared_kv_layers", 0, high=fields.layers)
    own = fields.layers - shared
    wide = bool(shared) and sizes[-1] == 2 * sizes[0]
    if sizes != [sizes[0]] * own + [sizes[0] * (2 if wide else 1)] * shared:
        raise fields.metadata.unsupported(
            f"{ARCH}.feed_forward_length must be twice as large in the {shared} layers with shared "
            "keys, or the same in all layers"
        )
    return {"intermediate_size": sizes[0], "use_double_wide_mlp": wide}


def _inputs(fields: Fields) -> dict[str, int]:
    """Return the sizes of the per-layer inputs."""
    size = fields.integer("embedding_length_per_layer_input", 0)
    table = fields.gguf.tensors.get(PER_LAYER_EMBEDDING)
    vocab = {} if table is None else {"vocab_size_per_layer_input": table.shape[0]}
    return {"hidden_size_per_layer_input": size, **vocab}


def _experts(fields: Fields) -> dict[str, Any]:
    count = fields.integer("expert_count", 0, high=MAX_EXPERTS)
    if not count:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": fields.integer("expert_used_count", low=1, high=count),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length", low=1),
    }
