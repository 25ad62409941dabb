"""Gemma 4's text models (Google 2026).

Layers with a sliding window and layers with full attention differ in head dim, rotation and
key/value heads. The last layers may attend to the keys and values of earlier ones. Each layer may
have experts in addition to its MLP, and a per-layer input.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.host.files import short_repr
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.gemma2 import soft_cap
from forge_jax.models.families.gemma4_decoder import Gemma4Decoder, Gemma4Spec
from forge_jax.models.kv import LayerLayout, PagedLayout
from forge_jax.models.spec import (
    ACTIVATIONS,
    FULL,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    SLIDING,
    ExpertSpec,
    ModelSpec,
    RopeSpec,
    decoder_spec,
    read_layer_types,
)
from forge_jax.models.weight_map import Tensor, WeightMap, decoder_weights

DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "attention_bias": False,
    "sliding_window": 512,
    "layer_types": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
}
NULLABLE = frozenset(
    {
        *("num_global_key_value_heads", "layer_types", "final_logit_softcapping"),
        *("use_bidirectional_attention", "num_experts", "top_k_experts", "moe_intermediate_size"),
    }
)
SLIDING_EVERY = 6  # without `layer_types`, one layer in six has full attention
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_HEADS = ("num_key_value_heads", "head_dim")


def _read_types(config: HFConfig) -> tuple[str, ...]:
    """Return the type of each layer. The last one is always `full_attention`."""
    types = read_layer_types(config)
    if types is None:
        layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
        types = [FULL if (i + 1) % SLIDING_EVERY == 0 else SLIDING for i in range(layers)]
    return (*types[:-1], FULL)


def _read_heads(config: HFConfig, types: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the number of key/value heads and the head dim, by type of layer.

    `per_layer_config`, which transformers 5 saves, replaces the fields of layers with full
    attention.
    """
    own = (
        config.integer("num_key_value_heads", high=MAX_HEADS),
        config.integer("head_dim", high=MAX_WIDTH),
    )
    if "per_layer_config" not in config.values:
        name = "num_global_key_value_heads"
        other = config.boolean("attention_k_eq_v") and config.has(name)
        kv_heads = config.integer(name, high=MAX_HEADS) if other else own[0]
        return {SLIDING: own, FULL: (kv_heads, config.integer("global_head_dim", high=MAX_WIDTH))}
    layers = config.section("per_layer_config") or HFConfig({})
    unknown = layers.values.keys() - {str(i) for i in range(len(types))}
    if unknown:
        raise layers.error(min(unknown), f"missing: the model has {len(types)} layers")
    found = {SLIDING: own}
    for i, kind in enumerate(types):
        fields = layers.section(str(i)) or HFConfig({})
        for name in fields.values.keys() - set(_HEADS):
            raise UnsupportedModelError(
                f"{config.where}: per_layer_config is not supported with {short_repr(name)}"
            )
        heads = (
            fields.integer("num_key_value_heads", own[0], high=MAX_HEADS),
            fields.integer("head_dim", own[1], high=MAX_WIDTH),
        )
        if i != types.index(kind) and found[kind] != heads:
            raise UnsupportedModelError(
                f"{config.where}: per_layer_config is not supported if layers with {kind} differ"
            )
        found[kind] = heads
    return found


def _read_rope(config: HFConfig, kind: str, head_dim: int) -> RopeSpec:
    """Return the rotation for one type of layer, covering all dimensions of a head.

    `rope_scaling` is an older name of `rope_parameters`, and replaces it.
    """
    old = "rope_scaling"
    parameters = config.section(old if old in config.values else "rope_parameters")
    if parameters is None:
        if old in config.values:
            raise config.error(old, "removed, or an object with the fields of the rotations")
        parameters = HFConfig(_ROPES)
    section = parameters.section(kind)
    if section is None:
        raise parameters.error(kind, "an object with the fields of the rotation")
    name = section.string("rope_type")
    if name not in ("default", "proportional"):
        raise UnsupportedModelError(
            f"{section.where}: rope type {short_repr(name)} is not supported in this architecture; "
            "supported: default, proportional"
        )
    rope = RopeSpec(type=name, theta=section.number("rope_theta"), dims=head_dim)
    share = section.number("partial_rotary_factor", 1.0)
    if name == "default":
        if share != 1.0:
            raise UnsupportedModelError(
                f"{section.where}: partial_rotary_factor is not supported with rope type 'default'"
            )
        return rope
    pairs = int(share * head_dim // 2)
    if pairs > head_dim // 2:
        raise section.error("partial_rotary_factor", "at most 1")
    return replace(rope, pairs=pairs, factor=section.number("factor", 1.0))


def _read_sources(config: HFConfig, types: Sequence[str]) -> tuple[int, ...]:
    """Return, per layer, the layer that writes its keys and values."""
    shared = config.integer("num_kv_shared_layers", low=0, high=MAX_LAYERS)
    writing = types[: max(0, len(types) - shared)]
    if shared and set(writing) != set(types):
        raise config.error(
            "num_kv_shared_layers", "so small that each type has a layer with its own keys"
        )
    last = {kind: i for i, kind in enumerate(writing)}
    return tuple(i if i < len(writing) else last[kind] for i, kind in enumerate(types))


def _read_experts(config: HFConfig) -> ExpertSpec | None:
    if not config.boolean("enable_moe_block"):
        return None
    if config.boolean("use_double_wide_mlp"):
        raise UnsupportedModelError(
            f"{config.where}: use_double_wide_mlp is not supported with enable_moe_block"
        )
    activation = config.string("hidden_activation")
    if ACTIVATIONS.get(activation) == "gelu":
        raise UnsupportedModelError(
            f"{config.where}: hidden_activation {short_repr(activation)} is not supported with "
            "enable_moe_block; supported: gelu_pytorch_tanh, silu"
        )
    count = config.integer("num_experts", high=MAX_EXPERTS)
    per_token = config.integer("top_k_experts", high=MAX_EXPERTS)
    if per_token > count:
        raise config.error("top_k_experts", f"at most num_experts ({count})")
    return ExpertSpec(
        count=count,
        per_token=per_token,
        intermediate_size=config.integer("moe_intermediate_size", high=MAX_WIDTH),
        shared_size=config.integer("intermediate_size", high=MAX_WIDTH),
    )


def _per_layer(config: HFConfig) -> dict[str, Any]:
    """Return the sizes of the layers' own inputs."""
    size = config.integer("hidden_size_per_layer_input", low=0, high=MAX_WIDTH)
    vocab = config.integer("vocab_size_per_layer_input", high=MAX_VOCAB)
    if size and vocab < config.integer("vocab_size"):
        raise config.error("vocab_size_per_layer_input", "at least vocab_size")
    count = config.integer("num_hidden_layers", high=MAX_LAYERS)
    return {"per_layer_size": size, "per_layer_count": count, "per_layer_vocab": vocab}


def _causal(config: HFConfig) -> HFConfig:
    """Return a copy without fields that have no effect on texts, or that are read here."""
    vision = config.values.get("use_bidirectional_attention") == "vision"  # among image tokens
    kept = None if vision else config.values.get("use_bidirectional_attention")
    return config.replace(per_layer_config=None, use_bidirectional_attention=kept)


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    types = _read_types(config)
    heads = _read_heads(config, types)
    for name, sizes in zip(_HEADS, zip(*heads.values(), strict=True), strict=True):
        queries = config.integer("num_attention_heads", high=MAX_HEADS)
        if name == "num_key_value_heads" and any(queries % size for size in sizes):
            raise config.error(name, f"a divisor of num_attention_heads ({queries})")
        if name == "head_dim" and any(size % 2 for size in sizes):
            raise config.error(name, "even, for rotary embeddings")
    bias = config.boolean("attention_bias")
    sliding = SLIDING in types
    window = config.integer("sliding_window", high=MAX_POSITIONS)
    return decoder_spec(
        _causal(config).replaced(num_key_value_heads=heads[SLIDING][0], head_dim=heads[SLIDING][1]),
        generation,
        "Gemma4ForCausalLM",
        kind=Gemma4Spec,
        activation_name="hidden_activation",
        rope=_read_rope(config, FULL, heads[FULL][1]),
        local_rope=_read_rope(config, SLIDING, heads[SLIDING][1]) if sliding else None,
        windows=tuple(window if kind == SLIDING else None for kind in types),
        norm_placement="both",
        norm_in_float32=True,
        qk_norm="head",
        attention_bias=bias,
        output_bias=bias,
        attention_scale=1.0,
        embedding_scale=math.sqrt(config.integer("hidden_size", high=MAX_WIDTH)),
        logit_soft_cap=soft_cap(config, "final_logit_softcapping"),
        experts=_read_experts(config),
        global_head_dim=heads[FULL][1],
        global_kv_heads=heads[FULL][0],
        keys_as_values=config.boolean("attention_k_eq_v"),
        kv_sources=_read_sources(config, types),
        double_wide=config.boolean("use_double_wide_mlp"),
        **_per_layer(config),
    )


def _weights(spec: ModelSpec) -> WeightMap:
    assert isinstance(spec, Gemma4Spec)
    d, size, layers = spec.hidden_size, spec.per_layer_size, range(spec.num_hidden_layers)
    weights = decoder_weights(replace(spec, experts=None))
    found: dict[str, tuple[str, tuple[int, ...]]] = {}  # by leaf: a tensor and its shape
    if size:
        rows = spec.per_layer_count * size
        shape = (spec.per_layer_vocab, rows)
        found["inputs.embedding"] = ("model.embed_tokens_per_layer.weight", shape)
        found["inputs.projection.weight"] = ("model.per_layer_model_projection.weight", (rows, d))
        found["inputs.norm.weight"] = ("model.per_layer_projection_norm.weight", (size,))
    for layer in layers:
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        found[f"{ours}.scalar"] = (f"{theirs}.layer_scalar", (1,))
        if size:
            own = f"{ours}.input"
            found[f"{own}.gate.weight"] = (f"{theirs}.per_layer_input_gate.weight", (size, d))
            found[f"{own}.projection.weight"] = (f"{theirs}.per_layer_projection.weight", (d, size))
            found[f"{own}.post_norm.weight"] = (f"{theirs}.post_per_layer_input_norm.weight", (d,))
        if spec.experts is not None:
            for part in ("gate_up", "down"):  # it is added to that of the experts
                mlp = weights.pop(f"{ours}.mlp.{part}.weight")
                weights[f"{ours}.mlp.shared.{part}.weight"] = mlp
            found |= _expert_tensors(f"{ours}.mlp", theirs, spec.experts, d)
    return weights | {leaf: (Tensor(*tensor),) for leaf, tensor in found.items()}


def _gguf_weights(spec: ModelSpec) -> WeightMap:
    """Return the tensors of a GGUF file, which have one matrix per expert."""
    weights, experts, d = _weights(spec), spec.experts, spec.hidden_size
    if experts is None:
        return weights
    sizes = {"gate_up": (2 * experts.intermediate_size, d), "down": (d, experts.intermediate_size)}
    for layer in range(spec.num_hidden_layers):
        for part, shape in sizes.items():
            weights[f"layers.{layer}.mlp.{part}.weight"] = tuple(
                Tensor(f"model.layers.{layer}.experts.{expert}.{part}_proj.weight", shape)
                for expert in range(experts.count)
            )
    return weights


def _expert_tensors(
    mlp: str, layer: str, experts: ExpertSpec, d: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of a layer's experts, its router and their norms, by leaf."""
    count, inner = experts.count, experts.intermediate_size
    norm = f"{layer}.post_feedforward_layernorm"
    return {
        f"{mlp}.router.weight": (f"{layer}.router.proj.weight", (count, d)),
        f"{mlp}.router_scale": (f"{layer}.router.scale", (d,)),
        f"{mlp}.expert_scale": (f"{layer}.router.per_expert_scale", (count,)),
        f"{mlp}.gate_up.weight": (f"{layer}.experts.gate_up_proj", (count, 2 * inner, d)),
        f"{mlp}.down.weight": (f"{layer}.experts.down_proj", (count, d, inner)),
        f"{mlp}.shared_post_norm.weight": (f"{norm}_1.weight", (d,)),
        f"{mlp}.routed_norm.weight": (f"{layer}.pre_feedforward_layernorm_2.weight", (d,)),
        f"{mlp}.routed_post_norm.weight": (f"{norm}_2.weight", (d,)),
    }


def _cache(spec: ModelSpec) -> tuple[LayerLayout, ...]:
    """Return the layouts of the layers, some of which have no cache."""
    assert isinstance(spec, Gemma4Spec)
    layouts = []
    for layer, source in enumerate(spec.kv_sources[: spec.num_hidden_layers]):
        sizes = spec.of_layer(layer)
        shares = None if source == layer else source
        layouts.append(
            PagedLayout(heads=sizes.num_key_value_heads, dim=sizes.head_dim, shares=shares)
        )
    return tuple(layouts)


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=NULLABLE,
    weights=_weights,
    gguf_weights=_gguf_weights,
    decoder=Gemma4Decoder,
    plain_swiglu=False,
    cache=_cache,
    lora=False,
)
