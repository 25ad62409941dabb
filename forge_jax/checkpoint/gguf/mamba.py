"""Granite 4 with Mamba-2 in GGUF files (`granitehybrid`): its layers and their sizes.

The converter stores A instead of its logarithm, and adds an axis to the vectors of heads and to the
weight of the norm. A layer without key/value heads has Mamba-2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_jax.checkpoint.gguf.delta_net import Decay, Taps
from forge_jax.checkpoint.gguf.metadata import Metadata
from forge_jax.checkpoint.gguf.names import MAX_HEADS, is_number
from forge_jax.checkpoint.gguf.reader import GGUFFile, GGUFTensor
from forge_jax.checkpoint.gguf.weights import GGUFWeight
from forge_jax.errors import CheckpointError
from forge_jax.host.files import short_repr
from forge_jax.weights.stored import TensorSource

if TYPE_CHECKING:
    from forge_jax.checkpoint.gguf.families import Fields

ARCH = "granitehybrid"
_DECAY, _TAPS = "ssm_a", "ssm_conv1d.weight"
_NAMES = {
    "ssm_in.weight": "in_proj.weight",
    "ssm_in.bias": "in_proj.bias",
    "ssm_out.weight": "out_proj.weight",
    "ssm_out.bias": "out_proj.bias",
    "ssm_conv1d.bias": "conv1d.bias",
    "ssm_dt.bias": "dt_bias",
    "ssm_norm.weight": "norm.weight",
    "ssm_d": "D",
    _DECAY: "A_log",
    _TAPS: "conv1d.weight",
}
_VECTORS = ("ssm_norm.weight", "ssm_d", _DECAY)  # stored with two axes


def is_part(name: str) -> bool:
    """Return True for a tensor of a layer's Mamba-2."""
    match name.split(".", 2):
        case ["blk", str(layer), str(part)]:
            return part in _NAMES and is_number(layer)
    return False


def layer_weights(gguf: GGUFFile) -> dict[str, TensorSource]:
    """Return the weights of all layers with Mamba-2 by name.

    Raises:
      CheckpointError: a tensor has the wrong number of axes.
    """
    found: dict[str, TensorSource] = {}
    for name, stored in gguf.tensors.items():
        if not is_part(name):
            continue
        _, layer, part = name.split(".", 2)
        theirs = f"model.layers.{layer}.mamba.{_NAMES[part]}"
        if part in _VECTORS:
            stored = replace(stored, shape=(int(np.prod(stored.shape)),))
        if part == _DECAY:
            found[theirs] = Decay(stored, None)
        elif part == _TAPS:
            found[theirs] = _taps(gguf, stored)
        else:
            found[theirs] = GGUFWeight(theirs, stored)
    return found


def _taps(gguf: GGUFFile, stored: GGUFTensor) -> Taps:
    if len(stored.shape) != 2:
        raise CheckpointError(
            f"{gguf.file}: the tensor {short_repr(stored.name)} must be a matrix, got shape "
            f"{stored.shape}"
        )
    return Taps(stored, None)


def kv_heads(metadata: Metadata, layers: int) -> tuple[int, list[bool]]:
    """Return the key/value heads of layers with attention, and which layers have Mamba-2.

    Raises:
      CheckpointError: the key is missing or wrong, or layers with attention differ.
    """
    key = f"{ARCH}.attention.head_count_kv"
    counts = metadata.values.get(key)
    if not isinstance(counts, np.ndarray):
        return metadata.integer(key, low=1, high=MAX_HEADS), [False] * layers
    if (
        counts.dtype.kind not in "iu"
        or len(counts) != layers
        or len(distinct := set(counts.tolist()) - {0}) != 1
        or not 0 < min(distinct) <= MAX_HEADS
    ):
        raise metadata.error(key, f"an array of {layers} integers, each 0 or the same number")
    return distinct.pop(), (counts == 0).tolist()


def fields_of(fields: Fields) -> dict[str, Any]:
    """Return the fields of `config.json` that only this architecture has.

    Raises:
      CheckpointError: a key is missing or wrong.
    """
    tensors: Mapping[str, Any] = fields.gguf.tensors
    _, mamba = kv_heads(fields.metadata, fields.layers)
    inner = fields.integer("ssm.inner_size", low=1)
    if inner % fields.hidden_size:
        raise fields.metadata.error(f"{ARCH}.ssm.inner_size", f"a multiple of {fields.hidden_size}")
    is_rotated = fields.boolean("rope.scaling.finetuned", True)  # which llama.cpp reads so

    def some(part: str) -> bool:
        return any(f"blk.{layer}.{part}" in tensors for layer in range(fields.layers))

    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in mamba],
        "position_embedding_type": "rope" if is_rotated else "nope",
        "attention_bias": some("attn_q.bias"),
        "shared_intermediate_size": fields.integer("expert_shared_feed_forward_length", low=1),
        "num_local_experts": fields.integer("expert_count", 0),
        "mamba_n_heads": fields.integer("ssm.time_step_rank", low=1),
        "mamba_n_groups": fields.integer("ssm.group_count", low=1),
        "mamba_d_state": fields.integer("ssm.state_size", low=1),
        "mamba_d_conv": fields.integer("ssm.conv_kernel", low=1),
        "mamba_expand": inner // fields.hidden_size,
        "mamba_d_head": "auto",
        "mamba_conv_bias": some("ssm_conv1d.bias"),
        "mamba_proj_bias": some("ssm_in.bias"),
    }
