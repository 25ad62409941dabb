"""The names and shapes of Tunix's Llama 3, Qwen 2 and Qwen 3 as those of a checkpoint.

This module does not import Tunix. Letters: d hidden size, H heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from forge_jax.errors import ModelError

type Layout = Callable[[np.ndarray], np.ndarray]


def _same(array: np.ndarray) -> np.ndarray:
    return array


def _transposed(array: np.ndarray) -> np.ndarray:  # [in, out] -> [out, in]
    return array.T


def _from_heads(array: np.ndarray) -> np.ndarray:  # [H, D, d] -> [d, H * D]
    return array.reshape(-1, array.shape[-1]).T


def _to_heads(array: np.ndarray) -> np.ndarray:  # [d, H, D] -> [H * D, d]
    return array.reshape(array.shape[0], -1).T


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1)


_LAYER = r"layers\.(\d+)\."
# (Tunix's name, the checkpoint's, the number of axes, the change of layout)
_NAMES: tuple[tuple[re.Pattern[str], str, int | None, Layout], ...] = tuple(
    (re.compile(pattern), name, ndim, layout)
    for pattern, name, ndim, layout in (
        (r"embedder\.input_embedding", "model.embed_tokens.weight", 2, _same),
        (r"lm_head\.w", "lm_head.weight", 2, _transposed),
        (r"final_norm\.w", "model.norm.weight", 1, _same),
        (
            _LAYER + r"(input|post_attention)_layernorm\.w",
            r"model.layers.\1.\2_layernorm.weight",
            1,
            _same,
        ),
        (
            _LAYER + r"attn\.([qkv])_proj\.w",
            r"model.layers.\1.self_attn.\2_proj.weight",
            3,
            _to_heads,
        ),
        (_LAYER + r"attn\.o_proj\.w", r"model.layers.\1.self_attn.o_proj.weight", 3, _from_heads),
        (_LAYER + r"attn\.([qkv])_bias", r"model.layers.\1.self_attn.\2_proj.bias", None, _flat),
        (_LAYER + r"attn\.([qk])_norm\.w", r"model.layers.\1.self_attn.\2_norm.weight", 1, _same),
        (
            _LAYER + r"mlp\.(gate|up|down)_proj\.kernel",
            r"model.layers.\1.mlp.\2_proj.weight",
            2,
            _transposed,
        ),
    )
)


def checkpoint_weights(params: Mapping[Any, Any]) -> dict[str, np.ndarray]:
    """Return the parameters of a Tunix model by the names of its checkpoint, for `update_weights`.

    Args:
      params: nested mappings of arrays, as `nnx.to_pure_dict(nnx.state(model))` returns them.

    Returns:
      Host arrays in the shapes of the checkpoint. Types stay as they are.

    Raises:
      ModelError: a parameter is a LoRA adapter, unknown, or has another number of axes. The message
        names it.
    """
    return dict(_converted(name, array) for name, array in flat_names(params).items())


def flat_names(params: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the arrays of nested mappings by their paths, such as "layers.0.attn.q_proj.w"."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= flat_names(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _converted(name: str, array: Any) -> tuple[str, np.ndarray]:
    if "_lora_" in name:
        raise ModelError(
            f"{name} is a LoRA parameter, which ForgeRollout cannot load: train all parameters, "
            "without LoRA"
        )
    for pattern, target, ndim, layout in _NAMES:
        found = pattern.fullmatch(name)
        if found is None:
            continue
        host = np.asarray(array)
        if ndim is not None and host.ndim != ndim:
            raise ModelError(
                f"{name} has shape {host.shape}, but ForgeRollout expects {ndim} axes, as in "
                "Tunix's Llama 3, Qwen 2 and Qwen 3"
            )
        return found.expand(target), layout(host)
    raise ModelError(
        f"{name} is not a parameter of Tunix's dense Llama 3, Qwen 2 or Qwen 3: train a "
        "ForgePolicy, which supports every model of the engine"
    )
