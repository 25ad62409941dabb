"""Decoders with Mamba-2 layers (Dao and Gu 2024, arXiv:2405.21060) between attention layers.

A Mamba-2 layer keeps a state of constant size per sequence, see `forge_kernels.recurrence`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.host.files import short_repr
from forge_jax.models.decoder import Ragged, ResidualBlock
from forge_jax.models.kv import StateArrays
from forge_jax.models.linear import Linear, MatrixBuilder, new_bias
from forge_jax.models.recurrent import MAX_TAPS, RecurrentSpec, recur
from forge_jax.models.spec import ACTIVATIONS, MAX_HEADS, MAX_WIDTH
from forge_jax.models.weight_map import Tensor, WeightMap
from forge_jax.weights.partition import Whole
from forge_kernels.norm import rms_norm
from forge_kernels.recurrence import STATE_SPACE, Heads, RecurrentWeights


@dataclass(frozen=True, kw_only=True)
class MambaSpec(RecurrentSpec):
    """A decoder with Mamba-2 in some layers. Its key heads are the groups of B and C.

    Attributes:
      conv_bias: True if the convolution has a bias.
      projection_bias: True if the input and output projections have biases.
      time_step_limit: the least and the largest time step.
      one_group: True if all heads of the whole model share B and C, and the norm is over all heads.
    """

    conv_bias: bool
    projection_bias: bool
    time_step_limit: tuple[float, float]
    one_group: bool

    @property
    def mamba_width(self) -> int:
        """The rows of the input projection: gates, inputs of the convolution, and time steps."""
        heads = self.recurrent_heads
        return heads.values * (heads.value_dim + 1) + heads.channels

    @property
    def attention_width(self) -> int:
        own = self.mamba_width if self.recurrent_layers else 0
        return max(super().attention_width, own)

    def own_sizes_of_shard(self, shards: int) -> dict[str, Any]:
        heads = self.recurrent_heads
        keys = 1 if self.one_group else heads.keys // shards
        return {"recurrent_heads": heads._replace(keys=keys, values=heads.values // shards)}

    def own_counts(self) -> dict[str, int]:
        if not self.recurrent_layers:
            return {}
        groups = {} if self.one_group else {"mamba_n_groups": self.recurrent_heads.keys}
        return {**groups, "mamba_n_heads": self.recurrent_heads.values}

    def own_sections(self, leaf: str) -> tuple[int, tuple[int, ...]] | None:
        """Return how a leaf is split: a device has some heads, and B and C of their groups."""
        heads = self.recurrent_heads
        H, inner, size = heads.values, heads.values * heads.value_dim, heads.keys * heads.key_dim
        group = Whole(size) if self.one_group else size
        match leaf:
            case "mamba.inputs.weight" | "mamba.inputs.bias":
                return -2 if leaf.endswith("weight") else -1, (inner, inner, group, group, H)
            case "mamba.taps" | "mamba.taps_bias":
                return -2 if leaf == "mamba.taps" else -1, (inner, group, group)
            case "mamba.out.weight" | "mamba.out_norm":
                return -1, (inner,)
            case "mamba.decay" | "mamba.step_bias" | "mamba.skip":
                return -1, (H,)
        return None


def read_mamba(config: HFConfig) -> dict[str, Any]:
    """Return the fields of `MambaSpec` other than `recurrent_layers`, from fields `mamba_*`.

    Raises:
      UnsupportedModelError: an activation other than SiLU.
      ModelError: a field is missing, or has the wrong type or range.
    """
    activation = config.string("hidden_act")
    if ACTIVATIONS.get(activation) != "silu":
        raise UnsupportedModelError(
            f"{config.where}: hidden_act {short_repr(activation)} is not supported with Mamba-2; "
            "supported: silu, swish"
        )
    heads = config.integer("mamba_n_heads", high=MAX_HEADS)
    groups = config.integer("mamba_n_groups", high=MAX_HEADS)
    expand = config.integer("mamba_expand", high=MAX_HEADS)
    inner = expand * config.integer("hidden_size", high=MAX_WIDTH)
    if inner % heads:
        raise config.error("mamba_n_heads", f"a divisor of mamba_expand * hidden_size ({inner})")
    if heads % groups:
        raise config.error("mamba_n_groups", f"a divisor of mamba_n_heads ({heads})")
    automatic = config.values.get("mamba_d_head") == "auto"
    if not automatic and config.integer("mamba_d_head", high=MAX_WIDTH) * heads != inner:
        want = f"mamba_expand * hidden_size / mamba_n_heads ({inner // heads})"
        raise config.error("mamba_d_head", want)
    return {
        "recurrent_heads": Heads(
            keys=groups,
            values=heads,
            key_dim=config.integer("mamba_d_state", high=MAX_WIDTH),
            value_dim=inner // heads,
        ),
        "conv_taps": config.integer("mamba_d_conv", high=MAX_TAPS),
        # In transformers, null is false, whatever the default.
        "conv_bias": config.boolean("mamba_conv_bias", False),
        "projection_bias": config.boolean("mamba_proj_bias", False),
        "time_step_limit": _time_step_limit(config),
        "one_group": groups == 1,
    }


def _time_step_limit(config: HFConfig) -> tuple[float, float]:
    """Return the two limits. transformers 5 writes infinity as {"__float__": "Infinity"}."""
    field = config.values.get("time_step_limit")
    limits = [
        math.inf if each == {"__float__": "Infinity"} else each
        for each in (field if isinstance(field, list) else ())
    ]
    if (
        len(limits) != 2
        or any(isinstance(each, bool) or not isinstance(each, int | float) for each in limits)
        or not 0 <= limits[0] <= limits[1]
        or limits[0] == math.inf
    ):
        raise config.error("time_step_limit", "a list of two numbers from 0, the smaller one first")
    return float(limits[0]), float(limits[1])


class Mamba2(ResidualBlock):
    """The projections around `forge_kernels.recurrence`, the time steps, and the gated norm."""

    def __init__(self, spec: MambaSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        super().__init__(spec, dtype)
        self.heads, self.eps = spec.recurrent_heads, spec.norm_eps
        self.limit, self.one_group = spec.time_step_limit, spec.one_group
        H, self.inner = self.heads.values, self.heads.values * self.heads.value_dim
        d, name, bias = spec.hidden_size, f"layers.{layer}.mamba", spec.projection_bias
        self.inputs = Linear(
            matrix(f"{name}.inputs.weight", spec.mamba_width, d),
            new_bias(spec.mamba_width, dtype, exists=bias),
        )
        self.out = Linear(
            matrix(f"{name}.out.weight", d, self.inner), new_bias(d, dtype, exists=bias)
        )
        channels = self.heads.channels
        self.taps = nnx.Param(jnp.zeros((channels, spec.conv_taps), dtype))
        self.taps_bias = nnx.Param(jnp.zeros(channels, dtype)) if spec.conv_bias else None
        self.decay = nnx.Param(jnp.zeros(H, jnp.float32))
        self.step_bias = nnx.Param(jnp.zeros(H, jnp.float32))
        self.skip = nnx.Param(jnp.zeros(H, jnp.float32))
        self.out_norm = nnx.Param(jnp.zeros(self.inner, dtype))

    def __call__(
        self, x: jax.Array, kv: StateArrays, ragged: Ragged
    ) -> tuple[StateArrays, jax.Array]:
        """Return (state, x plus the layer's output). x: dtype[T, d]."""
        ragged = ragged._replace(lora=None)  # adapters change attention and MLPs only
        with jax.named_scope("mamba_in"):
            y = self.inputs(x, norm=self.norm, num_rows=ragged.num_rows)
            gate, y, steps = jnp.split(y, (self.inner, self.inner + self.heads.channels), axis=1)
            steps = steps.astype(jnp.float32)
            steps = jax.nn.softplus(steps + jnp.broadcast_to(self.step_bias[...], steps.shape))
            steps = jnp.clip(steps, *self.limit)
            log_decay = -jnp.broadcast_to(jnp.exp(self.decay[...]), steps.shape) * steps
        bias = None if self.taps_bias is None else self.taps_bias[...]
        kv, out = recur(
            y,
            log_decay,
            steps,
            RecurrentWeights(self.taps[...], bias, self.skip[...]),
            kv,
            ragged,
            heads=self.heads,
            rule=STATE_SPACE,
        )
        with jax.named_scope("mamba_out"):
            out = out.reshape(gate.shape) * jax.nn.silu(gate.astype(jnp.float32))
            out = self._normed(out, ragged.axis).astype(gate.dtype)
            return kv, self.add(x, self.out, out, ragged, "o")

    def _normed(self, x: jax.Array, axis: str | None) -> jax.Array:
        """Normalize f32[T, inner] over the heads of each group, which devices may share."""
        groups = (len(x), self.heads.keys, -1)
        weight = self.out_norm[...].astype(jnp.float32).reshape(groups[1:])
        shared = axis if self.one_group else None
        return rms_norm(x.reshape(groups), weight, self.eps, axis_name=shared).reshape(x.shape)


def with_mamba(spec: MambaSpec, weights: WeightMap, module: str = "mamba") -> WeightMap:
    """Return the map with Mamba-2 in place of attention in the layers that have it.

    Args:
      spec: the model.
      weights: as from `decoder_weights`.
      module: the checkpoint's name of a layer's Mamba-2.
    """
    found: WeightMap = {}
    for leaf, parts in weights.items():
        _, layer, part = f"{leaf}..".split(".", 2)
        if layer.isdecimal() and int(layer) in spec.recurrent_layers:
            if part.startswith("attention.norm"):
                found[leaf.replace("attention", "mamba")] = parts
                continue
            if part.startswith("attention."):
                continue
        found[leaf] = parts
    for layer in spec.recurrent_layers:
        found |= _mamba_weights(spec, f"layers.{layer}.mamba", f"model.layers.{layer}.{module}")
    return found


def _mamba_weights(spec: MambaSpec, leaf: str, module: str) -> WeightMap:
    heads, d = spec.recurrent_heads, spec.hidden_size
    H, channels, inner = heads.values, heads.channels, heads.values * heads.value_dim
    shapes: Mapping[str, tuple[str, tuple[int, ...]]] = {
        "inputs.weight": ("in_proj.weight", (spec.mamba_width, d)),
        "out.weight": ("out_proj.weight", (d, inner)),
        "taps": ("conv1d.weight", (channels, 1, spec.conv_taps)),
        "decay": ("A_log", (H,)),
        "step_bias": ("dt_bias", (H,)),
        "skip": ("D", (H,)),
        "out_norm": ("norm.weight", (inner,)),
    }
    if spec.conv_bias:
        shapes = {**shapes, "taps_bias": ("conv1d.bias", (channels,))}
    if spec.projection_bias:
        biases = {
            "inputs.bias": ("in_proj.bias", (spec.mamba_width,)),
            "out.bias": ("out_proj.bias", (d,)),
        }
        shapes = {**shapes, **biases}
    return {
        f"{leaf}.{part}": (Tensor(f"{module}.{name}", shape),)
        for part, (name, shape) in shapes.items()
    }
