"""Qwen3-Next (2025): gated DeltaNet layers (arXiv:2412.06464) between layers of gated attention.

Three of four layers keep a state of constant size per sequence in place of keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.host.files import short_repr
from forge_jax.models.decoder import Attention, Decoder, Ragged, ResidualBlock, attend, new_mlp
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.qwen3_moe import dense_layers
from forge_jax.models.kv import LayerKV, PagedKV, StateArrays
from forge_jax.models.linear import Linear, MatrixBuilder
from forge_jax.models.recurrent import (
    LINEAR,
    MAX_TAPS,
    RecurrentSpec,
    read_recurrent_layers,
    recur,
    recurrent_cache,
)
from forge_jax.models.spec import (
    ACTIVATIONS,
    FULL,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    ModelSpec,
    decoder_spec,
    read_experts,
)
from forge_jax.models.weight_map import (
    FUSED_EXPERTS,
    ExpertNames,
    Tensor,
    WeightMap,
    decoder_weights,
)
from forge_kernels.recurrence import DELTA_RULE, Heads, RecurrentWeights, gated_rms_norm

# The fields that all hybrid models of Qwen share.
COMMON_DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "layer_types": None,
}
DEFAULTS = {
    **COMMON_DEFAULTS,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
    "mlp_only_layers": None,
}
NULLABLE = frozenset({"layer_types"})

_ARCHITECTURE = "Qwen3NextForCausalLM"


@dataclass(frozen=True, kw_only=True)
class DeltaNetSpec(RecurrentSpec):
    """A decoder with gated DeltaNet in some layers, and gated attention in the others.

    Attributes:
      grouped: True if the rows of queries, keys, values and gates are together for each key head,
        instead of for all heads.
      tiled: True if the columns of the output matrix have the first value head of each key head
        before the second ones.
    """

    grouped: bool
    tiled: bool = False

    @property
    def query_parts(self) -> int:
        return 2  # each head's query is followed by its gate

    @property
    def has_checkpoint_layout(self) -> bool:
        # Only checkpoints of Qwen3-Next are grouped.
        return not self.tiled and self.grouped == (self.architecture == _ARCHITECTURE)

    def own_sizes_of_shard(self, shards: int) -> dict[str, Any]:
        keys, values = (
            n // shards for n in (self.recurrent_heads.keys, self.recurrent_heads.values)
        )
        return {"recurrent_heads": self.recurrent_heads._replace(keys=keys, values=values)}

    def own_counts(self) -> dict[str, int]:
        # The number of value heads is a multiple of it.
        return {"linear_num_key_heads": self.recurrent_heads.keys}

    def own_sections(self, leaf: str) -> tuple[int, tuple[int, ...]] | None:
        """Return how a leaf is split: a device has some key heads and all of their value heads."""
        heads = self.recurrent_heads
        H, keys, inner = heads.values, heads.keys * heads.key_dim, heads.values * heads.value_dim
        match leaf:
            case "delta.qkvz.weight":  # if grouped, the rows of each key head are together
                rows = (keys, keys, inner, inner)
                return -2, ((sum(rows),) if self.grouped else rows)
            case "delta.ba.weight":
                return -2, ((2 * H,) if self.grouped else (H, H))
            case "delta.out.weight":  # if tiled, there is a section for each value head of a key
                tiles = H // heads.keys if self.tiled else 1
                return -1, (inner // tiles,) * tiles
            case "delta.taps":
                return -2, (keys, keys, inner)
            case "delta.decay" | "delta.decay_bias":
                return -1, (H,)
        return None


# ---- config.json -------------------------------------------------------------------------------


def hybrid_spec(
    config: HFConfig, generation: HFConfig, architecture: str, *, grouped: bool, **parts: Any
) -> ModelSpec:
    """Return the spec of a model with gated DeltaNet, as `decoder_spec` does.

    Args:
      config: the fields of `config.json`, with defaults.
      generation: the fields of `generation_config.json`.
      architecture: the name in `config.json`.
      grouped: as in `DeltaNetSpec`.
      parts: fields that only this family has.
    """
    activation = config.string("hidden_act")
    if ACTIVATIONS.get(activation) != "silu":
        raise UnsupportedModelError(
            f"{config.where}: hidden_act {short_repr(activation)} is not supported with "
            f"{LINEAR}; supported: silu, swish"
        )
    if not config.boolean("attn_output_gate", True):
        raise UnsupportedModelError(f"{config.where}: attn_output_gate false is not supported")
    heads = Heads(
        keys=config.integer("linear_num_key_heads", high=MAX_HEADS),
        values=config.integer("linear_num_value_heads", high=MAX_HEADS),
        key_dim=config.integer("linear_key_head_dim", high=MAX_WIDTH),
        value_dim=config.integer("linear_value_head_dim", high=MAX_WIDTH),
    )
    if heads.values % heads.keys:
        want = f"a multiple of linear_num_key_heads ({heads.keys})"
        raise config.error("linear_num_value_heads", want)
    bias = config.boolean("attention_bias")
    return decoder_spec(
        config.replace(layer_types=None),
        generation,
        architecture,
        kind=DeltaNetSpec,
        partial_rotary=True,
        attention_bias=bias,
        output_bias=bias,
        qk_norm="head",
        norm_offset=1.0,
        recurrent_layers=read_recurrent_layers(config, _layer_types(config)),
        recurrent_heads=heads,
        conv_taps=config.integer("linear_conv_kernel_dim", high=MAX_TAPS),
        # Not fields of Hugging Face's, see `forge_jax.checkpoint.gguf.delta_net`.
        grouped=grouped and not config.boolean("gguf_split_projections", False),
        tiled=config.boolean("gguf_tiled_values", False),
        **parts,
    )


def _layer_types(config: HFConfig) -> list[str]:
    """Return the layers of a file without `layer_types`: every n-th one has attention."""
    layers = range(config.integer("num_hidden_layers", high=MAX_LAYERS))
    interval = config.integer("full_attention_interval")
    return [LINEAR if (layer + 1) % interval else FULL for layer in layers]


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    return hybrid_spec(
        config,
        generation,
        _ARCHITECTURE,
        grouped=True,
        experts=read_experts(
            config,
            "num_experts",
            alias=False,
            least=0,
            intermediate_size=config.integer("moe_intermediate_size", high=MAX_WIDTH),
            normalized=config.boolean("norm_topk_prob"),
            dense_layers=dense_layers(config),
            shared_size=config.integer("shared_expert_intermediate_size", high=MAX_WIDTH),
            shared_gate=True,
        ),
    )


# ---- decoder -----------------------------------------------------------------------------------


class GatedAttention(Attention):
    """Attention whose output is multiplied by a sigmoid of the input.

    The matrix of queries also has the gates. Each head's query is followed by its gate.
    """

    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        super().__init__(spec, dtype, matrix, layer)
        rows = 2 * (self.heads + self.kv_heads) * self.head_dim
        weight = matrix(f"layers.{layer}.attention.qkv.weight", rows, spec.hidden_size)
        bias = jnp.zeros(rows, dtype) if spec.attention_bias else None
        self.qkv = Linear(weight, bias)

    def __call__(self, x: jax.Array, kv: PagedKV, ragged: Ragged) -> tuple[PagedKV, jax.Array]:
        """Return (kv, x plus the attention). x: dtype[T, d]; kv: one layer's."""
        H, D = self.heads, self.head_dim
        with jax.named_scope("qkv"):
            delta = ragged.delta("q", "k", "v")
            qkv = self.qkv(x, norm=self.norm, delta=delta, num_rows=ragged.num_rows)
            qkv = qkv.reshape(len(x), -1, D)
            q, gate = jnp.split(qkv[:, : 2 * H].reshape(len(x), H, 2 * D), 2, axis=2)
            qkv = self._normed(jnp.concatenate([q, qkv[:, 2 * H :]], axis=1), ragged.axis)
        kv, out = attend(qkv, kv, ragged, rope=self.rope, sm_scale=self.sm_scale)
        with jax.named_scope("attention_out"):
            out = out * jax.nn.sigmoid(gate.reshape(out.shape))
            return kv, self.add(x, self.out, out, ragged, "o")


class GatedDeltaNet(ResidualBlock):
    """The projections around `forge_kernels.recurrence`, its norm and its gates."""

    def __init__(self, spec: DeltaNetSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        super().__init__(spec, dtype)
        self.heads, self.grouped, self.eps = spec.recurrent_heads, spec.grouped, spec.norm_eps
        self.tiled = spec.tiled
        H, inner = self.heads.values, self.heads.values * self.heads.value_dim
        d, name = spec.hidden_size, f"layers.{layer}.delta"
        self.qkvz = Linear(matrix(f"{name}.qkvz.weight", self.heads.channels + inner, d))
        self.ba = Linear(matrix(f"{name}.ba.weight", 2 * H, d))
        self.out = Linear(matrix(f"{name}.out.weight", d, inner))
        self.taps = nnx.Param(jnp.zeros((self.heads.channels, spec.conv_taps), dtype))
        self.decay = nnx.Param(jnp.zeros(H, jnp.float32))
        self.decay_bias = nnx.Param(jnp.zeros(H, jnp.float32))
        self.out_norm = nnx.Param(jnp.zeros(self.heads.value_dim, dtype))

    def __call__(
        self, x: jax.Array, kv: StateArrays, ragged: Ragged
    ) -> tuple[StateArrays, jax.Array]:
        """Return (state, x plus the layer's output). x: dtype[T, d]."""
        ragged = ragged._replace(lora=None)  # adapters change attention and MLPs only
        assert self.norm is not None
        rows = ragged.num_rows
        with jax.named_scope("delta_in"):
            normed = self.norm(x)
            qkv, z = self._projected(self.qkvz(normed, num_rows=rows))
            b, a = self._gates(self.ba(normed, num_rows=rows, out_dtype=jnp.float32))
            a = a + jnp.broadcast_to(self.decay_bias[...], a.shape)
            log_decay = -jnp.broadcast_to(jnp.exp(self.decay[...]), a.shape) * jax.nn.softplus(a)
        kv, out = recur(
            qkv,
            log_decay,
            jax.nn.sigmoid(b),
            RecurrentWeights(self.taps[...]),
            kv,
            ragged,
            heads=self.heads,
            rule=DELTA_RULE,
        )
        with jax.named_scope("delta_out"):
            out = gated_rms_norm(out, z, self.out_norm[...], self.eps)
            if self.tiled:
                by_key = out.reshape(len(x), self.heads.keys, -1, self.heads.value_dim)
                out = by_key.swapaxes(1, 2)
            out = out.reshape(len(x), -1)
            return kv, self.add(x, self.out, out, ragged, "o")

    def _projected(self, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return queries, keys and values dtype[T, channels], and gates dtype[T, H, Dv]."""
        heads, T = self.heads, len(y)
        if not self.grouped:
            qkv, z = y[:, : heads.channels], y[:, heads.channels :]
            return qkv, z.reshape(T, heads.values, heads.value_dim)
        K, D, group = heads.keys, heads.key_dim, heads.values // heads.keys * heads.value_dim
        y = y.reshape(T, K, 2 * D + 2 * group)
        q, k, v, z = jnp.split(y, (D, 2 * D, 2 * D + group), axis=2)
        qkv = jnp.concatenate([each.reshape(T, -1) for each in (q, k, v)], axis=1)
        return qkv, z.reshape(T, heads.values, heads.value_dim)

    def _gates(self, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the inputs of beta and of the decay, f32[T, H] each."""
        groups = self.heads.keys if self.grouped else 1
        b, a = jnp.split(y.reshape(len(y), groups, -1), 2, axis=2)
        return b.reshape(len(y), -1), a.reshape(len(y), -1)


class HybridLayer(nnx.Module):
    """Gated DeltaNet or attention, and the MLP or experts."""

    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        assert isinstance(spec, DeltaNetSpec)
        has_state = layer in spec.recurrent_layers
        self.delta = GatedDeltaNet(spec, dtype, matrix, layer) if has_state else None
        self.attention = None if has_state else GatedAttention(spec, dtype, matrix, layer)
        self.mlp = new_mlp(spec, dtype, matrix, layer)

    def __call__(self, x: jax.Array, kv: LayerKV, ragged: Ragged) -> tuple[LayerKV, jax.Array]:
        mixer: Any = self.attention or self.delta
        kv, x = mixer(x, kv, ragged)
        return kv, self.mlp(x, ragged)


class HybridDecoder(Decoder):
    layer = HybridLayer


# ---- tensors -----------------------------------------------------------------------------------


def hybrid_weights(spec: ModelSpec, *, experts: ExpertNames | None = None) -> WeightMap:
    """Return the tensors of a checkpoint, see `decoder_weights`."""
    assert isinstance(spec, DeltaNetSpec)
    weights = decoder_weights(spec, experts=experts)
    for layer in range(spec.num_hidden_layers):
        own, theirs = f"layers.{layer}", f"model.layers.{layer}"
        if layer in spec.recurrent_layers:
            prefix = f"{own}.attention."
            weights = {leaf: t for leaf, t in weights.items() if not leaf.startswith(prefix)}
            norm = Tensor(f"{theirs}.input_layernorm.weight", (spec.hidden_size,))
            weights[f"{own}.delta.norm.weight"] = (norm,)
            weights |= _delta_weights(spec, f"{own}.delta", f"{theirs}.linear_attn")
            continue
        for kind in ("weight", "bias") if spec.attention_bias else ("weight",):
            q, k, v = weights[f"{own}.attention.qkv.{kind}"]
            q = Tensor(q.name, (2 * q.shape[0], *q.shape[1:]))
            weights[f"{own}.attention.qkv.{kind}"] = (q, k, v)
    return weights


def _delta_weights(spec: DeltaNetSpec, leaf: str, module: str) -> WeightMap:
    heads, d = spec.recurrent_heads, spec.hidden_size
    H, inner, channels = heads.values, heads.values * heads.value_dim, heads.channels
    if spec.grouped:
        qkvz, ba = {"in_proj_qkvz": channels + inner}, {"in_proj_ba": 2 * H}
    else:
        qkvz, ba = {"in_proj_qkv": channels, "in_proj_z": inner}, {"in_proj_b": H, "in_proj_a": H}

    def stacked(rows: Mapping[str, int]) -> tuple[Tensor, ...]:
        return tuple(Tensor(f"{module}.{name}.weight", (n, d)) for name, n in rows.items())

    return {
        f"{leaf}.qkvz.weight": stacked(qkvz),
        f"{leaf}.ba.weight": stacked(ba),
        f"{leaf}.out.weight": (Tensor(f"{module}.out_proj.weight", (d, inner)),),
        f"{leaf}.taps": (Tensor(f"{module}.conv1d.weight", (channels, 1, spec.conv_taps)),),
        f"{leaf}.decay": (Tensor(f"{module}.A_log", (H,)),),
        f"{leaf}.decay_bias": (Tensor(f"{module}.dt_bias", (H,)),),
        f"{leaf}.out_norm": (Tensor(f"{module}.norm.weight", (heads.value_dim,)),),
    }


NAMES = ExpertNames(shared="shared_expert")
FUSED_NAMES = ExpertNames(shared="shared_expert", fused=FUSED_EXPERTS)

ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=NULLABLE | {"mlp_only_layers"},
    weights=partial(hybrid_weights, experts=NAMES),
    other_weights=partial(hybrid_weights, experts=FUSED_NAMES),
    decoder=HybridDecoder,
    cache=recurrent_cache,
)
