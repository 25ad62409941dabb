"""Granite 4 (IBM 2025): Granite's factors, with Mamba-2 in most layers.

Each layer has an MLP, which is shared by all tokens if there are also experts. The models without
"H" in their name have attention in all layers.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.host.files import short_repr
from forge_jax.models.decoder import Attention, Decoder, Ragged, new_mlp
from forge_jax.models.families import granite
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.granitemoe import RELEASED, SAVED
from forge_jax.models.kv import LayerKV
from forge_jax.models.linear import MatrixBuilder
from forge_jax.models.mamba import Mamba2, MambaSpec, read_mamba, with_mamba
from forge_jax.models.recurrent import LINEAR, read_recurrent_layers, recurrent_cache
from forge_jax.models.spec import MAX_LAYERS, MAX_WIDTH, ModelSpec, decoder_spec, read_experts
from forge_jax.models.weight_map import ExpertNames, Tensor, WeightMap, decoder_weights, renamed

DEFAULTS = {
    **{f: value for f, value in granite.DEFAULTS.items() if f not in ("mlp_bias", "head_dim")},
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "position_embedding_type": None,
    "layer_types": None,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": [0.0, float("inf")],
}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    if "head_dim" in config.values and not config.has("head_dim"):
        raise config.error("head_dim", "an integer, or left out")  # as in transformers
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    shared = config.integer("shared_intermediate_size", high=MAX_WIDTH)
    experts = read_experts(
        config,
        "num_local_experts",
        alias=False,
        least=0,
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
        shared_size=shared,
    )
    return decoder_spec(
        config.replace(layer_types=None).replaced(intermediate_size=shared),
        generation,
        "GraniteMoeHybridForCausalLM",
        kind=MambaSpec,
        **granite.factors(config),
        **read_mamba(config),
        recurrent_layers=read_recurrent_layers(config, [LINEAR] * layers),
        no_rope=frozenset() if _is_rotated(config) else frozenset(range(layers)),
        experts=experts,
    )


def _is_rotated(config: HFConfig) -> bool:
    kind = config.values.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise UnsupportedModelError(
            f"{config.where}: position_embedding_type {short_repr(kind)} is not supported; "
            "supported: nope, rope"
        )
    return kind == "rope"


class GraniteHybridLayer(nnx.Module):
    """Mamba-2 or attention, and the MLP or experts."""

    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        assert isinstance(spec, MambaSpec)
        has_state = layer in spec.recurrent_layers
        self.mamba = Mamba2(spec, dtype, matrix, layer) if has_state else None
        self.attention = None if has_state else Attention(spec, dtype, matrix, layer)
        self.mlp = new_mlp(spec, dtype, matrix, layer)

    def __call__(self, x: jax.Array, kv: LayerKV, ragged: Ragged) -> tuple[LayerKV, jax.Array]:
        mixer: Any = self.attention or self.mamba
        kv, x = mixer(x, kv, ragged)
        return kv, self.mlp(x, ragged)


class GraniteHybrid(Decoder):
    layer = GraniteHybridLayer


def _weights(spec: ModelSpec, names: ExpertNames) -> WeightMap:
    assert isinstance(spec, MambaSpec)
    weights = with_mamba(spec, decoder_weights(spec, fused=("gate_up",), experts=names))
    if spec.experts is None:
        own = {
            "mlp.gate_up_proj": "shared_mlp.input_linear",
            "mlp.down_proj": "shared_mlp.output_linear",
        }
        return renamed(weights, own)
    d, size = spec.hidden_size, spec.experts.shared_size
    for layer in range(spec.num_hidden_layers):
        leaf, module = f"layers.{layer}.mlp.shared", f"model.layers.{layer}.shared_mlp"
        gate_up = Tensor(f"{module}.input_linear.weight", (2 * size, d))
        down = Tensor(f"{module}.output_linear.weight", (d, size))
        weights |= {f"{leaf}.gate_up.weight": (gate_up,), f"{leaf}.down.weight": (down,)}
    return weights


def _gguf_weights(spec: ModelSpec) -> WeightMap:
    assert isinstance(spec, MambaSpec)
    return with_mamba(spec, decoder_weights(spec))


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset(
        {
            *("num_key_value_heads", "position_embedding_type", "layer_types"),
            *("mamba_conv_bias", "mamba_proj_bias"),
        }
    ),
    weights=lambda spec: _weights(spec, RELEASED),
    other_weights=lambda spec: _weights(spec, SAVED),
    gguf_weights=_gguf_weights,
    decoder=GraniteHybrid,
    cache=recurrent_cache,
)
