"""Decoders with linear recurrences in place of attention in some layers.

Such a layer keeps a state of constant size per sequence, see `forge_kernels.recurrence`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.models.decoder import Ragged
from forge_jax.models.kv import (
    LayerLayout,
    PagedLayout,
    StateArray,
    StateArrays,
    StateLayout,
)
from forge_jax.models.spec import FULL, MAX_LAYERS, ModelSpec
from forge_kernels.recurrence import (
    Form,
    Heads,
    RecurrentState,
    RecurrentWeights,
    Rule,
    ragged_recurrence,
)

LINEAR = "linear_attention"
_OLD_NAMES = {"mamba": LINEAR, "attention": FULL}  # as in transformers, in every family
MAX_TAPS = 64


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec(ModelSpec):
    """A decoder with a linear recurrence in some layers, and attention in the others.

    Attributes:
      recurrent_layers: the layers with a recurrence in place of attention.
      recurrent_heads: their heads.
      conv_taps: the tokens that the convolution combines.
    """

    recurrent_layers: frozenset[int]
    recurrent_heads: Heads
    conv_taps: int


def read_recurrent_layers(config: HFConfig, default: list[str]) -> frozenset[int]:
    """Return the layers that `layer_types`, else `default`, lists as `LINEAR`.

    At least one layer must have attention, because the cache has blocks of tokens.
    """
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    types = config.values.get("layer_types")
    types = default if types is None else types
    if isinstance(types, list):
        types = [_OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
    if (
        not isinstance(types, list)
        or len(types) != layers
        or any(kind not in (FULL, LINEAR) for kind in types)
    ):
        raise config.error("layer_types", f"a list of {layers}, each {LINEAR} or {FULL}")
    if FULL not in types:
        raise UnsupportedModelError(
            f"{config.where}: layer_types without {FULL} is not supported: at least one layer must "
            "have attention"
        )
    return frozenset(layer for layer, kind in enumerate(types) if kind == LINEAR)


def recurrent_cache(spec: ModelSpec) -> tuple[LayerLayout, ...]:
    """Return a `RecurrentState` in layers with a recurrence, and keys and values in the others."""
    assert isinstance(spec, RecurrentSpec)
    heads = spec.recurrent_heads
    H, channels = heads.values, heads.channels
    state = StateLayout(
        arrays=(
            StateArray(name="state", shape=(H, heads.key_dim, heads.value_dim), axis=0),
            StateArray(name="base", shape=(), dtype="int32"),
            StateArray(name="tail", shape=(spec.conv_taps - 1, channels), axis=1),
            StateArray(name="inputs", shape=(channels,), pending=True, axis=0),
            StateArray(name="gates", shape=(2, H), pending=True, axis=1),
        )
    )
    paged = PagedLayout(heads=spec.num_key_value_heads, dim=spec.head_dim)
    layers = range(spec.num_hidden_layers)
    return tuple(state if layer in spec.recurrent_layers else paged for layer in layers)


def recur(
    x: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    weights: RecurrentWeights,
    kv: StateArrays,
    ragged: Ragged,
    *,
    heads: Heads,
    rule: Rule,
) -> tuple[StateArrays, jax.Array]:
    """Apply a layer's convolution and recurrence to the rows of a step, and update its state.

    Args:
      x: dtype[T, C], the inputs of the convolution.
      log_decay: f32[T, H].
      beta: f32[T, H].
      weights: parameters of the convolution and the skip.
      kv: the layer's cache, a `RecurrentState` as a dict.
      ragged: the step.
      heads: the sizes.
      rule: the recurrence.

    Returns:
      (kv, f32[T, H, Dv]), see `ragged_recurrence`.
    """
    assert ragged.state_slots is not None
    state, out = ragged_recurrence(
        x,
        log_decay,
        beta,
        weights,
        RecurrentState(**kv),
        ragged.state_slots,
        ragged.positions,
        ragged.cu_q_lens,
        ragged.num_seqs,
        heads=heads,
        rule=rule,
        max_q_len=ragged.max_q_len,
        form=_form(ragged),
    )
    return state._asdict(), out


def _form(ragged: Ragged) -> Form:
    if ragged.implementation == "reference":
        return "scan"
    return "token" if ragged.uniform else "auto"
