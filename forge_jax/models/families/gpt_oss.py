"""OpenAI's gpt-oss (2025, arXiv:2508.10925): attention sinks, and experts with biases.

Every other layer has a sliding window. A router with a bias chooses experts, whose weights are the
softmax over the chosen logits. Their SwiGLU is clamped, and its gates and ups alternate.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.decoder import Attention, Decoder, Experts, Ragged
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.kv import PagedKV
from forge_jax.models.linear import Linear, MatrixBuilder, new_bias
from forge_jax.models.spec import (
    MAX_POSITIONS,
    MAX_WIDTH,
    ModelSpec,
    decoder_spec,
    read_experts,
    read_windows,
)
from forge_jax.models.weight_map import (
    FUSED_EXPERTS,
    ExpertNames,
    Tensor,
    WeightMap,
    decoder_weights,
)
from forge_kernels.experts import ClampedSwiGLU

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}


@dataclass(frozen=True, kw_only=True)
class GptOssSpec(ModelSpec):
    """A gpt-oss model.

    Attributes:
      swiglu_limit: the largest gate, and the largest magnitude of an up.
      swiglu_alpha: the factor in the gate's sigmoid.
    """

    swiglu_limit: float
    swiglu_alpha: float

    def own_sections(self, leaf: str) -> tuple[int, tuple[int, ...]] | None:
        """Return the sections of sinks, and of gates and ups, which alternate."""
        assert self.experts is not None
        both = (2 * self.experts.intermediate_size,)
        return {
            "attention.sinks": (-1, (self.num_attention_heads,)),
            "mlp.gate_up.weight": (-2, both),
            "mlp.gate_up_bias": (-1, both),
        }.get(leaf)


class SinkAttention(Attention):
    """Attention with a sink for each query head."""

    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        super().__init__(spec, dtype, matrix, layer)
        self.sinks = nnx.Param(jnp.zeros(self.heads, dtype))

    def sink_logits(self) -> jax.Array:
        return self.sinks[...].astype(jnp.float32)


class GptOssExperts(Experts):
    """Experts whose router and matrices have biases, with a clamped SwiGLU."""

    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        assert isinstance(spec, GptOssSpec) and spec.experts is not None
        super().__init__(spec, dtype, matrix, layer, spec.experts)
        count, inner = spec.experts.count, spec.experts.intermediate_size
        self.router = Linear(self.router.matrix.get_value(), new_bias(count, dtype, exists=True))
        self.gate_up_bias = nnx.Param(jnp.zeros((self.own, 2 * inner), dtype))
        self.down_bias = nnx.Param(jnp.zeros((self.own, spec.hidden_size), dtype))
        self.activation = ClampedSwiGLU(spec.swiglu_limit, spec.swiglu_alpha)

    def options(self, axis: str | None) -> dict[str, Any]:
        down_bias = self.down_bias[...]
        if axis is not None and self.own == self.count:  # devices add up parts of each output
            first = jax.lax.axis_index(axis) == 0
            down_bias = jnp.where(first, down_bias, jnp.zeros((), down_bias.dtype))
        return {"biases": (self.gate_up_bias[...], down_bias), "activation": self.activation}


class GptOssLayer(nnx.Module):
    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        self.attention = SinkAttention(spec, dtype, matrix, layer)
        self.mlp = GptOssExperts(spec, dtype, matrix, layer)

    def __call__(self, x: jax.Array, kv: PagedKV, ragged: Ragged) -> tuple[PagedKV, jax.Array]:
        kv, x = self.attention(x, kv, ragged)
        return kv, self.mlp(x, ragged)


class GptOssDecoder(Decoder):
    layer = GptOssLayer


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    scaling = config.section("rope_scaling")
    if config.section("rope_parameters") is None and (scaling is None or not scaling.values):
        config = _with(config, rope_parameters=YARN)
    if config.has("quantization_config") and not (config.has("dtype") or config.has("torch_dtype")):
        config = _with(config, dtype="bfloat16")  # the published files' dtype, which they omit
    bias = config.boolean("attention_bias")
    window = config.integer("sliding_window", high=MAX_POSITIONS)
    return decoder_spec(
        config,
        generation,
        "GptOssForCausalLM",
        kind=GptOssSpec,
        attention_bias=bias,
        output_bias=bias,
        windows=read_windows(config, window, lambda layer: layer % 2 == 0),
        experts=read_experts(
            config,
            "num_local_experts",
            intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
        ),
        swiglu_limit=config.number("swiglu_limit"),
        swiglu_alpha=config.number("swiglu_alpha"),
    )


def _with(config: HFConfig, **values: Any) -> HFConfig:
    changed = copy.copy(config)
    changed.values = {**config.values, **values}
    return changed


def _weights(spec: ModelSpec) -> WeightMap:
    """Return the tensors of transformers' layout: experts [E, K_in, N_out], or MXFP4 blocks."""
    assert spec.experts is not None
    d, count, inner = spec.hidden_size, spec.experts.count, spec.experts.intermediate_size
    names = ExpertNames(router="router", fused=FUSED_EXPERTS)
    weights = decoder_weights(spec, experts=names)
    for layer in range(spec.num_hidden_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        weights[f"{ours}.attention.sinks"] = (
            Tensor(f"{theirs}.self_attn.sinks", (spec.num_attention_heads,)),
        )
        weights[f"{ours}.mlp.router.bias"] = (Tensor(f"{theirs}.mlp.router.bias", (count,)),)
        for name, outputs, inputs in (("gate_up", 2 * inner, d), ("down", d, inner)):
            tensor = f"{theirs}.mlp.experts.{name}_proj"
            matrix = (
                Tensor(tensor, (count, outputs, inputs))
                if _is_quantized(spec, tensor)
                else Tensor(tensor, (count, inputs, outputs), transpose=True)
            )
            weights[f"{ours}.mlp.{name}.weight"] = (matrix,)
            bias = Tensor(f"{tensor}_bias", (count, outputs))
            weights[f"{ours}.mlp.{name}_bias"] = (bias,)
    return weights


def _gguf_weights(spec: ModelSpec) -> WeightMap:
    """Return the tensors of a GGUF file: one matrix per expert, or MXFP4 blocks."""
    assert spec.experts is not None
    d, count, inner = spec.hidden_size, spec.experts.count, spec.experts.intermediate_size
    weights = _weights(spec)
    for layer in range(spec.num_hidden_layers):
        for name, outputs, inputs in (("gate_up", 2 * inner, d), ("down", d, inner)):
            module, leaf = f"model.layers.{layer}.mlp.experts", f"layers.{layer}.mlp.{name}.weight"
            if _is_quantized(spec, f"{module}.{name}_proj"):
                continue
            weights[leaf] = tuple(
                Tensor(f"{module}.{expert}.{name}_proj.weight", (outputs, inputs))
                for expert in range(count)
            )
    return weights


def _is_quantized(spec: ModelSpec, tensor: str) -> bool:
    return spec.quantization is not None and spec.quantization.scheme_of(tensor) is not None


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    weights=_weights,
    gguf_weights=_gguf_weights,
    decoder=GptOssDecoder,
    plain_swiglu=False,
)
