"""Gated DeltaNet in GGUF files: the projections and parameters of Qwen3-Next and Qwen 3.5.

Files have queries, keys and values of all heads in one matrix and the gates in another, as in
Qwen 3.5. A key head may have several value heads. In files of Qwen 3.5, the first value heads of
all key heads precede the second ones. This module restores Hugging Face's order of the rows. It
does not change the columns of the output matrix, because a block may have columns of two heads.
The model reorders its input instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from forge_jax.checkpoint.gguf.metadata import Metadata
from forge_jax.checkpoint.gguf.names import MAX_HEADS, MAX_WIDTH, is_number
from forge_jax.checkpoint.gguf.reader import GGUFFile, GGUFTensor
from forge_jax.checkpoint.gguf.weights import GGUFWeight
from forge_jax.errors import CheckpointError
from forge_jax.host.files import short_repr
from forge_jax.weights.stored import TensorSource

NEXT = "qwen3next"
ARCHES = (NEXT, "qwen35", "qwen35moe")
_DECAY, _TAPS, _BOTH_GATES = "ssm_a", "ssm_conv1d.weight", "ssm_ba.weight"
_NAMES = {
    "attn_qkv.weight": "in_proj_qkv.weight",
    "attn_gate.weight": "in_proj_z.weight",
    "ssm_beta.weight": "in_proj_b.weight",
    "ssm_alpha.weight": "in_proj_a.weight",
    "ssm_dt.bias": "dt_bias",
    "ssm_norm.weight": "norm.weight",
    "ssm_out.weight": "out_proj.weight",
    _DECAY: "A_log",
    _TAPS: "conv1d.weight",
}


def is_part(name: str) -> bool:
    """Return True for a tensor of a layer's gated DeltaNet."""
    match name.split(".", 2):
        case ["blk", str(layer), str(part)]:
            return (part in _NAMES or part == _BOTH_GATES) and is_number(layer)
    return False


def is_layer(gguf: GGUFFile, layer: int) -> bool:
    """Return True if the layer has gated DeltaNet, not attention."""
    return f"blk.{layer}.{_DECAY}" in gguf.tensors


@dataclass(frozen=True)
class Heads:
    """The heads of gated DeltaNet.

    Attributes:
      keys: the number of key heads.
      values: the number of value heads.
      key_dim: the width of a key.
      value_dim: the width of a value.
      tiled: True if the value heads of a key head are not consecutive in the file.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    tiled: bool

    def rows(self, width: int) -> np.ndarray | None:
        """Return the file's row of each row of value heads, `width` per head; None: the same."""
        if not self.tiled:
            return None
        rows = np.arange(self.values * width).reshape(-1, self.keys, width)
        return rows.swapaxes(0, 1).reshape(-1)

    def by_head(self) -> np.ndarray | None:
        """Return the same for one row per value head."""
        return self.rows(1)

    def by_value(self) -> np.ndarray | None:
        """Return the same for all rows of value heads."""
        return self.rows(self.value_dim)

    def channels(self) -> np.ndarray | None:
        """Return the same for queries, keys and values."""
        values, first = self.by_value(), 2 * self.keys * self.key_dim
        return None if values is None else np.concatenate([np.arange(first), first + values])

    def gates(self, place: int) -> np.ndarray:
        """Return the rows of one of the two gates, which are together for each key head."""
        return np.arange(2 * self.values).reshape(self.keys, 2, -1)[:, place].reshape(-1)


def read_heads(metadata: Metadata, arch: str) -> Heads:
    """Return the heads.

    Raises:
      CheckpointError: a key is missing or wrong.
    """
    keys = metadata.integer(f"{arch}.ssm.group_count", low=1, high=MAX_HEADS)
    values = metadata.integer(f"{arch}.ssm.time_step_rank", low=1, high=MAX_HEADS)
    inner = metadata.integer(f"{arch}.ssm.inner_size", low=1)
    if values % keys:
        raise metadata.error(f"{arch}.ssm.time_step_rank", f"a multiple of ssm.group_count {keys}")
    if inner % values:
        raise metadata.error(f"{arch}.ssm.inner_size", f"a multiple of ssm.time_step_rank {values}")
    return Heads(
        keys=keys,
        values=values,
        key_dim=metadata.integer(f"{arch}.ssm.state_size", low=1, high=MAX_WIDTH),
        value_dim=inner // values,
        tiled=arch != NEXT and values > keys,
    )


def layer_weights(gguf: GGUFFile, arch: str) -> dict[str, TensorSource]:
    """Return the weights of all layers with gated DeltaNet by name.

    Raises:
      CheckpointError: a key is missing or wrong, or a tensor has the wrong shape.
    """
    heads = read_heads(gguf.view, arch)
    inner, channels = heads.values * heads.value_dim, 2 * heads.keys * heads.key_dim
    channels += inner
    by_channel, by_head = (channels, cache(heads.channels)), (heads.values, cache(heads.by_head))
    orders: dict[str, tuple[int, Callable[[], np.ndarray | None]]] = {  # the rows, their order
        "attn_qkv.weight": by_channel,
        "attn_gate.weight": (inner, cache(heads.by_value)),
        _TAPS: by_channel,
        **dict.fromkeys(("ssm_dt.bias", _DECAY, "ssm_beta.weight", "ssm_alpha.weight"), by_head),
    }
    kinds: dict[str, Callable[..., TensorSource]] = {_DECAY: Decay, _TAPS: Taps}
    found: dict[str, TensorSource] = {}
    for name, stored in gguf.tensors.items():
        if not is_part(name):
            continue
        _, layer, part = name.split(".", 2)
        module = f"model.layers.{layer}.linear_attn"
        if part == _BOTH_GATES:
            _check_rows(gguf, stored, 2 * heads.values)
            for place, own in enumerate((f"{module}.in_proj_b", f"{module}.in_proj_a")):
                theirs = f"{own}.weight"
                found[theirs] = GGUFWeight(theirs, stored, order=heads.gates(place))
            continue
        order: np.ndarray | None = None
        if part in orders:
            rows, make = orders[part]
            _check_rows(gguf, stored, rows)  # the file bounds the size of an order
            order = make()
        theirs = f"{module}.{_NAMES[part]}"
        if part in kinds:
            found[theirs] = kinds[part](stored, order)
        else:
            found[theirs] = GGUFWeight(theirs, stored, order=order)
    return found


def _check_rows(gguf: GGUFFile, stored: GGUFTensor, rows: int) -> None:
    axes = 1 if stored.name.endswith((_DECAY, ".bias")) else 2
    if len(stored.shape) != axes or stored.shape[0] != rows:
        raise CheckpointError(
            f"{gguf.file}: the tensor {short_repr(stored.name)} must have {rows} rows on {axes} "
            f"axes, got shape {stored.shape}"
        )


def _in_order(values: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    return values if order is None else values[order]


@dataclass(frozen=True, eq=False)
class Decay:
    """The logarithms of the heads' decays, of which the file has the negative exponentials."""

    stored: GGUFTensor
    order: np.ndarray | None
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def read_rows(self, out: np.ndarray, first: int) -> None:
        values = _in_order(np.asarray(self.stored.read(), np.float32), self.order)
        if not (values < 0).all():
            raise CheckpointError(
                f"{self.stored.file}: the tensor {short_repr(self.stored.name)} must be negative"
            )
        np.copyto(out, np.log(-values)[first : first + len(out)], casting="unsafe")


@dataclass(frozen=True, eq=False)
class Taps:
    """The taps of the convolution, [channels, 1, taps]."""

    stored: GGUFTensor
    order: np.ndarray | None
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        channels, taps = self.stored.shape
        return channels, 1, taps

    def read_rows(self, out: np.ndarray, first: int) -> None:
        values = _in_order(self.stored.read(), self.order)
        np.copyto(out, values[first : first + len(out)], casting="unsafe")


def fields_of(gguf: GGUFFile, arch: str, layers: int) -> dict[str, Any]:
    """Return the fields of `config.json` for gated DeltaNet. Two are specific to forge-jax.

    Raises:
      CheckpointError: a key is missing or wrong.
    """
    heads = read_heads(gguf.view, arch)
    linear = [is_layer(gguf, layer) for layer in range(layers)]
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in linear],
        "linear_conv_kernel_dim": gguf.view.integer(f"{arch}.ssm.conv_kernel", low=1),
        "linear_num_key_heads": heads.keys,
        "linear_num_value_heads": heads.values,
        "linear_key_head_dim": heads.key_dim,
        "linear_value_head_dim": heads.value_dim,
        "gguf_split_projections": True,
        "gguf_tiled_values": heads.tiled,
    }
