"""ModelSpec: the description of a model, read from `config.json` and checked.

This module reads the fields that all families share; `families` has each family's own.

It reads both spellings of Hugging Face's files: `rope_theta`, `rope_scaling` and `torch_dtype`
(transformers 4), `rope_parameters` and `dtype` (transformers 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.host.files import short_repr
from forge_jax.weights.ggml_types import GGMLTypes, read_ggml_types
from forge_jax.weights.methods import read_quantization
from forge_jax.weights.quantization import QuantSpec
from forge_kernels.rope import yarn_attention_factor

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "longrope", "yarn")
DTYPES = ("bfloat16", "float16", "float32")

# Far above any existing model. These bound everything that is made per layer or token.
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_WIDTH = 2**20  # limit of hidden, intermediate and head sizes
MAX_VOCAB = 2**22
MAX_POSITIONS = 2**27
MAX_EXPERTS = 4096


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embeddings: their base, their scaling, and which numbers of a head they turn.

    Attributes:
      type: the scaling; "default" is none.
      theta: the base.
      factor: the context's extension.
      low_freq_factor: llama3's factor for low frequencies.
      high_freq_factor: llama3's factor for high frequencies.
      original_max_position_embeddings: the original context of llama3 and yarn, in tokens.
      factors: longrope's factors, per pair.
      beta_fast: yarn's upper threshold, in turns within the original context.
      beta_slow: yarn's lower threshold, in turns within the original context.
      truncate: an option of yarn, see `forge_kernels.rope.yarn_scaling`.
      attention_factor: on cos and sin.
      dims: how many numbers of a head are rotated, from the first on; None for all (partial RoPE).
      interleaved: pairs are neighbors (2i, 2i + 1) instead of (i, i + dims / 2).
      pairs: with "proportional", how many pairs are rotated, from the first on. The others have
        frequency 0.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    dims: int | None = None
    interleaved: bool = False
    pairs: int = 0


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How experts are chosen, see `forge_kernels.experts.choose_experts`.

    `correction` is True if the model has a correction of the scores. `best_of_group` is the number
    of experts whose scores a group's score is the sum of.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    groups: int = 1
    kept_groups: int = 1
    best_of_group: int = 2
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """A mixture of experts in place of the MLP (Shazeer et al. 2017, arXiv:1701.06538).

    Attributes:
      count: experts per layer.
      per_token: experts that compute each token.
      intermediate_size: one expert's intermediate size.
      normalized: True if the weights of a token's experts are scaled to sum to one.
      dense_layers: layers with an ordinary MLP.
      router: how experts are chosen.
      shared_size: the inner size of the MLP that computes every token in addition to its experts
        (shared experts, DeepSeekMoE, arXiv:2401.06066); 0 is none.
      shared_gate: True if the output of that MLP is multiplied by a sigmoid of its input.
      whole: True if devices divide the experts among them (expert parallelism), instead of each
        expert's matrices.
      devices: the devices that divide the experts; above 1 only in the spec of a shard.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool = True
    dense_layers: frozenset[int] = frozenset()
    router: RouterSpec = RouterSpec()
    shared_size: int = 0
    shared_gate: bool = False
    whole: bool = False
    devices: int = 1

    @property
    def own(self) -> int:
        """The experts of one device."""
        return self.count // self.devices


Activation = Literal["silu", "gelu", "gelu_tanh"]
NormPlacement = Literal["before", "after", "both"]  # relative to attention and MLP
NormType = Literal["rms", "layer"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer; fields are named as in `config.json` if they are in it.

    Attributes:
      dtype: the checkpoint's type, which "auto" selects.
      norm_eps: the number that norms add to the mean square or variance.
      activation: the gate's function, or the whole MLP's if it is not gated.
      norm_type: RMSNorm ("rms") or LayerNorm ("layer").
      norm_bias: True if a LayerNorm adds a bias.
      norm_placement: where norms are applied; "after" means before the residual sum.
      norm_offset: a number added to the weight of every norm.
      norm_in_float32: True if a norm is multiplied by its weight before it is rounded; implied by
        an offset.
      attention_bias: True if queries, keys and values have a bias.
      output_bias: True if the output projection of attention has a bias.
      mlp_bias: True if the matrices of the MLP have biases.
      mlp_gated: True if the MLP multiplies its up projection by an activated gate. Otherwise, it
        activates the up projection.
      parallel_block: True if attention and MLP have the same input, and their outputs are added to
        it together (Wang and Komatsuzaki 2021, GPT-J). Otherwise, the MLP follows attention.
      qk_norm: norms of queries and keys, or None. "head" and "each_head" are per head, with shared
        or separate weights. "all" is over all heads together.
      windows: per layer, how many keys a query attends to, or None for all. Empty means all keys in
        every layer.
      chunks: per layer, the size of the chunks of positions that queries attend within, or None for
        one. Empty means one in every layer.
      local_rope: the rotation of layers with a window, if it differs.
      no_rope: layers whose queries and keys are not rotated.
      attention_scale: the factor on scores; None is head_dim ** -0.5.
      attention_soft_cap: the cap of scores, where x becomes cap * tanh(x / cap).
      query_growth: beta of the factor 1 + beta log(1 + floor(p / original_max_position_embeddings))
        on queries at position p; 0 for none.
      logit_soft_cap: the same for logits.
      embedding_scale: the factor on embeddings.
      residual_scale: the factor on each layer's contribution.
      logit_scale: the factor on logits.
      head_bias: True if the LM head has a bias.
      experts: a mixture in place of the MLP of some or all layers.
      quantization: the quantization of the checkpoint's matrices.
      ggml_types: the types of the tensors of a GGUF file that stay in GGML blocks.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    activation: Activation = "silu"
    norm_type: NormType = "rms"
    norm_bias: bool = False
    norm_placement: NormPlacement = "before"
    norm_offset: float = 0.0
    norm_in_float32: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    mlp_gated: bool = True
    parallel_block: bool = False
    qk_norm: Literal["head", "each_head", "all"] | None = None
    windows: tuple[int | None, ...] = ()
    chunks: tuple[int | None, ...] = ()
    local_rope: RopeSpec | None = None
    no_rope: frozenset[int] = frozenset()
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    query_growth: float = 0.0
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    head_bias: bool = False
    experts: ExpertSpec | None = None
    quantization: QuantSpec | None = None
    ggml_types: GGMLTypes | None = None

    @property
    def max_context(self) -> int:
        """The longest sequence in tokens; YaRN extends the original context by its factor."""
        if self.rope.type != "yarn":
            return self.max_position_embeddings
        extended = self.rope.original_max_position_embeddings * self.rope.factor
        return max(self.max_position_embeddings, min(int(extended), MAX_POSITIONS))

    @property
    def head_sizes(self) -> tuple[str, ...]:
        """The heads of attention in words, for a summary."""
        return (
            f"{self.num_attention_heads} heads of {self.head_dim}",
            f"{self.num_key_value_heads} key/value heads",
        )

    @property
    def attention_width(self) -> int:
        """The numbers per token that attention computes at once."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    @property
    def query_parts(self) -> int:
        """The vectors of a query head in the matrix of queries, keys and values."""
        return 1

    @property
    def sm_scale(self) -> float:
        """The factor on attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def has_checkpoint_layout(self) -> bool:
        """True if leaves are built from the tensors of the architecture's checkpoints.

        The leaves of some GGUF files have rows or columns in a different order.
        """
        return True

    def window(self, layer: int) -> int | None:
        """Return how many keys a query of this layer attends to, or None for all."""
        return self.windows[layer] if self.windows else None

    def chunk(self, layer: int) -> int | None:
        """Return the size of the chunks that queries of this layer attend within, or None."""
        return self.chunks[layer] if self.chunks else None

    def of_layer(self, layer: int) -> ModelSpec:
        """Return the spec of a model whose layers all have the sizes of this one."""
        del layer
        return self

    def own_sizes_of_shard(self, shards: int) -> dict[str, Any]:
        """Return the fields of a subclass that differ on a shard, with their values."""
        del shards
        return {}

    def own_counts(self) -> dict[str, int]:
        """Return the numbers of a subclass that tensor parallelism divides evenly, by field."""
        return {}

    def own_sections(self, leaf: str) -> tuple[int, tuple[int, ...]] | None:
        """Return how tensor parallelism splits a leaf, if a subclass splits it differently.

        Args:
          leaf: a leaf of a layer, such as "delta.out.weight".

        Returns:
          The negative axis to split, and the sizes of the sections along it. Each device has an
          equal part of every section, and all of a section whose size is a
          `forge_jax.weights.partition.Whole`. None for a leaf that is split as in `Attention`,
          `MLP` and `Experts`, and for a leaf with another name that every device has whole.
        """
        del leaf
        return None

    def projections(self, layer: int) -> str:
        """Return which of queries, keys and values ("qkv") this layer projects."""
        del layer
        return "qkv"

    @property
    def expert_parallel(self) -> bool:
        """True if devices divide the experts among them, see `ExpertSpec.whole`."""
        return self.experts is not None and self.experts.whole

    def experts_of(self, layer: int) -> ExpertSpec | None:
        """Return the experts of this layer, or None if it has an ordinary MLP."""
        none = self.experts is None or layer in self.experts.dense_layers
        return None if none else self.experts


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def decoder_spec(
    config: HFConfig,
    generation: HFConfig,
    architecture: str,
    *,
    kind: type[ModelSpec] = ModelSpec,
    activation_name: str = "hidden_act",
    norm_eps_name: str = "rms_norm_eps",
    whole_heads: bool = False,
    partial_rotary: bool = False,
    interleaved: bool = False,
    rope: RopeSpec | None = None,
    **parts: Any,
) -> ModelSpec:
    """Return the spec of a decoder from its `config.json`, with defaults, and generation config.

    Args:
      config: the fields of `config.json`, with defaults.
      generation: the fields of `generation_config.json`.
      architecture: the name in `config.json`.
      kind: the class of the spec: `ModelSpec`, or a subclass with the family's own fields.
      activation_name: the name of the activation's field.
      norm_eps_name: the name of the field with the number that norms add.
      whole_heads: require `hidden_size` to be a multiple of the heads even if `head_dim` is given.
      partial_rotary: True if the family's heads may be rotated in part (`partial_rotary_factor`).
      interleaved: True if the rotation's pairs are neighbors.
      rope: replaces the rotation in the file in all layers.
      parts: fields that only this family has.

    Raises:
      UnsupportedModelError: an option is not implemented; the message names it.
      ModelError: a field is missing, or has the wrong type or range.
    """
    _refuse_what_changes_layers(config)
    read_layer_types(config)  # checked even if the family does not use it
    activation = _read_activation(config, activation_name)
    hidden_size = config.integer("hidden_size", high=MAX_WIDTH)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", heads, high=MAX_HEADS)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if (whole_heads or not config.has("head_dim")) and hidden_size % heads:
        raise config.error("num_attention_heads", f"a divisor of hidden_size ({hidden_size})")
    head_dim = read_head_dim(config)
    vocab_size = config.integer("vocab_size", high=MAX_VOCAB)
    max_positions = config.integer("max_position_embeddings", high=MAX_POSITIONS)
    bos_token_ids = _own_token_ids(config, "bos_token_id", vocab_size)
    return kind(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
        num_hidden_layers=config.integer("num_hidden_layers", high=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        norm_eps=config.number(norm_eps_name),
        rope=rope
        or read_rope(
            config, max_positions, head_dim, partial_rotary=partial_rotary, interleaved=interleaved
        ),
        tie_word_embeddings=config.boolean("tie_word_embeddings"),
        dtype=read_dtype(config),
        quantization=read_quantization(config),
        ggml_types=read_ggml_types(config),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=_end_ids(config, generation, vocab_size),
        activation=activation,
        **parts,
    )


def _read_activation(config: HFConfig, field: str) -> Activation:
    name = config.string(field)
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{config.where}: {field} {short_repr(name)} is not supported; "
            f"supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _refuse_what_changes_layers(config: HFConfig) -> None:
    """Reject fields that transformers reads in every family and that are not implemented here."""
    for name in ("use_bidirectional_attention", "per_layer_config"):
        if config.values.get(name):
            raise UnsupportedModelError(f"{config.where}: {name} is not supported")
    if not config.boolean("is_causal", True):
        raise UnsupportedModelError(f"{config.where}: is_causal false is not supported")


def read_head_dim(config: HFConfig) -> int:
    """Return the width of a head, by default `hidden_size` over the number of heads."""
    hidden_size = config.integer("hidden_size", high=MAX_WIDTH)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    head_dim = config.integer("head_dim", hidden_size // heads, high=MAX_WIDTH)
    if head_dim % 2:
        raise config.error("head_dim", "even, for rotary embeddings")
    return head_dim


def _end_ids(config: HFConfig, generation: HFConfig, vocab_size: int) -> tuple[int, ...]:
    """Return the EOS token ids of both files; `generation_config.json` overrides the default."""
    ids = generation.token_ids("eos_token_id", vocab_size)
    if not (generation.values and config.leaves_out("eos_token_id")):
        ids += _own_token_ids(config, "eos_token_id", vocab_size)
    return tuple(dict.fromkeys(ids))


def _own_token_ids(config: HFConfig, name: str, vocab_size: int) -> tuple[int, ...]:
    if config.leaves_out(name):  # a default outside a small vocabulary can never be sampled
        default = config.values[name]
        return () if default is None or default >= vocab_size else (default,)
    return config.token_ids(name, vocab_size)


FULL, SLIDING = "full_attention", "sliding_attention"


def read_layer_types(config: HFConfig) -> tuple[str, ...] | None:
    """Return `full_attention` or `sliding_attention` per layer; None if the file has no field."""
    types = config.value("layer_types")
    if types is None:
        return None
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    if (
        not isinstance(types, list)
        or len(types) != layers
        or any(kind not in (FULL, SLIDING) for kind in types)
    ):
        raise config.error("layer_types", f"a list of {layers}, each {SLIDING} or {FULL}")
    return tuple(types)


def read_window(config: HFConfig) -> int | None:
    """Return how many keys a query attends to, or None for all."""
    if not config.has("sliding_window"):
        return None
    return config.integer("sliding_window", high=MAX_POSITIONS)


def read_windows(
    config: HFConfig, window: int | None, windowed: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Return the window of each layer, from `layer_types` or else from `windowed`.

    Args:
      config: the fields of `config.json`.
      window: the size in layers that have a window.
      windowed: returns True if a layer has a window, for files without `layer_types`.

    Raises:
      ModelError: a layer has a window, but the size is missing.
    """
    types, layers = read_layer_types(config), config.integer("num_hidden_layers", high=MAX_LAYERS)
    if types is None:
        types = [SLIDING if windowed(layer) else FULL for layer in range(layers)]
    if window is None and SLIDING in types:
        raise config.error("sliding_window", "set (and used), because some layers have a window")
    return tuple(window if kind == SLIDING else None for kind in types) if window else ()


def window_everywhere(config: HFConfig, window: int | None) -> tuple[int | None, ...]:
    """Return the same window for every layer; `layer_types` is ignored."""
    return (window,) * config.integer("num_hidden_layers", high=MAX_LAYERS) if window else ()


def read_experts(
    config: HFConfig, own_name: str, *, alias: bool = True, least: int = 1, **parts: Any
) -> ExpertSpec | None:
    """Return the experts of a model, or None if it has none.

    Args:
      config: the fields of `config.json`.
      own_name: the field with their number in transformers' class of the family.
      alias: True if the other of `num_experts` and `num_local_experts` is the same field in
        transformers. If a file has both, the alias wins.
      least: the minimum number.
      parts: fields that only this family has.

    Raises:
      UnsupportedModelError: shared experts in another family, or an activation other than SiLU.
    """
    shared = ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts")
    for name in () if "shared_size" in parts else shared:
        if config.values.get(name):
            raise UnsupportedModelError(
                f"{config.where}: {name} is not supported: this architecture has no shared experts"
            )
    other = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}[own_name]
    name = other if alias and other in config.values else own_name
    count = config.integer(name, low=least, high=MAX_EXPERTS)
    if count == 0:
        return None
    activation = config.string("hidden_act")
    if ACTIVATIONS.get(activation) != "silu":
        raise UnsupportedModelError(
            f"{config.where}: hidden_act {short_repr(activation)} is not supported with experts; "
            "supported: silu, swish"
        )
    per_token = config.integer("num_experts_per_tok", high=MAX_EXPERTS)
    if per_token > count:
        raise config.error("num_experts_per_tok", f"at most {name} ({count})")
    return ExpertSpec(count=count, per_token=per_token, **parts)


def read_dtype(config: HFConfig) -> str:
    """Return the checkpoint's dtype; float32 if the file has none, as in transformers."""
    name = "dtype" if config.has("dtype") else "torch_dtype"
    dtype = config.string(name, "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedModelError(
            f"{config.where}: {name} {short_repr(dtype)} is not supported; "
            f"supported: {', '.join(DTYPES)}"
        )
    return dtype


def read_rope(
    config: HFConfig,
    max_position_embeddings: int,
    head_dim: int,
    *,
    partial_rotary: bool = False,
    interleaved: bool = False,
) -> RopeSpec:
    """Return the rotation from `rope_scaling`, else from `rope_parameters`, as in transformers.

    `rope_scaling` replaces `rope_parameters` completely. A `rope_theta` or
    `partial_rotary_factor` outside of them is the default of the one inside. An
    `original_max_position_embeddings` outside of them overrides the one inside.
    """
    section = rope_section(config)
    for name in (FULL, SLIDING):
        if name in section.values:
            raise UnsupportedModelError(
                f"{section.where}: {name} is not supported: all layers of this architecture "
                "have the same rotation"
            )
    rope = rope_of(
        section,
        config,
        max_position_embeddings,
        head_dim,
        beside=True,
        partial_rotary=partial_rotary,
    )
    return replace(rope, interleaved=interleaved)


def rope_section(config: HFConfig) -> HFConfig:
    """Return the section that describes the rotation; without fields if the file has none."""
    scaling, parameters = config.section("rope_scaling"), config.section("rope_parameters")
    section = scaling if scaling is not None and scaling.values else parameters
    return HFConfig({}, config.where) if section is None else section


_ORIGINAL = "original_max_position_embeddings"


def rope_of(
    section: HFConfig,
    config: HFConfig,
    max_position_embeddings: int,
    head_dim: int,
    *,
    theta_name: str = "rope_theta",
    beside: bool = False,
    partial_rotary: bool = False,
) -> RopeSpec:
    """Return the rotation that a section of `config` describes.

    Args:
      section: the fields of the rotation.
      config: the fields of `config.json`.
      max_position_embeddings: the longest context.
      head_dim: the width of a head.
      theta_name: the field of `config` that replaces a missing `rope_theta` of the section.
      beside: True if `original_max_position_embeddings` of `config` overrides the section's.
      partial_rotary: True if `partial_rotary_factor` may be below 1.
    """
    dims = _rotated_dims(section, config, head_dim, partial_rotary=partial_rotary)
    kind = _rope_type(section)
    if "rope_theta" in section.values:
        theta = section.number("rope_theta")
    else:
        theta = config.number(theta_name)
    rope = RopeSpec(type=kind, theta=theta, dims=None if dims == head_dim else dims)
    if kind == "default":
        return rope
    if kind == "linear":
        return replace(rope, factor=section.number("factor"))
    if kind == "dynamic":
        # Up to `max_position_embeddings`, nothing is scaled. A longer sequence would change the
        # base with each token, which cached keys cannot follow.
        return replace(rope, factor=section.number("factor"))
    original, holder = max_position_embeddings, section
    if beside and _ORIGINAL in config.values:
        holder = config
    if _ORIGINAL in holder.values:
        original = holder.integer(_ORIGINAL, low=2, high=MAX_POSITIONS)
    if kind == "longrope":
        return _longrope(section, rope, max_position_embeddings, original, dims)
    if kind == "yarn":
        return _yarn(section, rope, max_position_embeddings, original)
    factor = section.number("factor")
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if low >= high:
        raise section.error("high_freq_factor", f"above low_freq_factor ({low:g})")
    return replace(
        rope,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def _rotated_dims(
    section: HFConfig, config: HFConfig, head_dim: int, *, partial_rotary: bool
) -> int:
    """Return how many numbers of a head are rotated."""
    holder = section if section.has("partial_rotary_factor") else config
    share = holder.number("partial_rotary_factor", 1.0)
    if share == 1.0:
        return head_dim
    if not partial_rotary:
        raise UnsupportedModelError(
            f"{holder.where}: partial_rotary_factor is not supported in this architecture: all "
            "numbers of a head are rotated"
        )
    dims = int(head_dim * share)
    if dims % 2 or not 2 <= dims <= head_dim:
        raise holder.error("partial_rotary_factor", f"an even share of the head dim {head_dim}")
    return dims


def _rope_type(section: HFConfig) -> str:
    """Return `rope_type`, or `type`, its name before transformers 4.43.

    transformers ignores `type` if there is a `rope_type`. Here the two must agree.
    """
    old = section.values.get("type")
    if "rope_type" in section.values:
        kind = section.string("rope_type")
        old = "longrope" if old == "su" else old
        if isinstance(old, str) and old != kind:
            raise UnsupportedModelError(
                f"{section.where}: type {short_repr(old)} contradicts rope_type "
                f"{short_repr(kind)}: remove the wrong one"
            )
    else:
        kind = section.string("type") if "type" in section.values else "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{section.where}: rope type {short_repr(kind)} is not supported; "
            f"supported: {', '.join(ROPE_TYPES)}"
        )
    return kind


def _longrope(
    section: HFConfig, rope: RopeSpec, max_position_embeddings: int, original: int, dims: int
) -> RopeSpec:
    """Return LongRoPE (Ding et al. 2024, arXiv:2402.13753), with a factor for each pair.

    There are two lists, for sequences up to the original length and for longer ones. A model with
    a longer context uses the second for all sequences, because cached keys cannot change.
    """
    extended, pairs = max_position_embeddings > original, dims // 2
    lists = {}
    for field in ("short_factor", "long_factor"):
        lists[field] = factors = section.values.get(field)
        if (
            not isinstance(factors, list)
            or len(factors) != pairs
            or any(isinstance(f, bool) or not isinstance(f, int | float) for f in factors)
            or any(not 0 < f < 1e9 for f in factors)
        ):
            raise section.error(field, f"a list of {pairs} positive numbers")
    stretch = section.number("factor", max_position_embeddings / original)
    default = math.sqrt(1 + math.log(stretch) / math.log(max(original, 2))) if stretch > 1 else 1.0
    return replace(
        rope,
        factors=tuple(float(f) for f in lists["long_factor" if extended else "short_factor"]),
        attention_factor=section.number("attention_factor", default),
    )


def _yarn(
    section: HFConfig, rope: RopeSpec, max_position_embeddings: int, original: int
) -> RopeSpec:
    """Return YaRN (Peng et al. 2023, arXiv:2309.00071), with the defaults of transformers.

    The default of `attention_factor` follows from `factor`, or from `mscale` and `mscale_all_dim`
    if both are set and not 0.
    """
    if section.values.get("factor", 0) is None:
        factor = max_position_embeddings / original
    else:
        factor = section.number("factor")
    if rope.theta <= 1:
        raise section.error("rope_theta", "above 1 for YaRN")
    mscales = [_number_or_zero(section, name) for name in ("mscale", "mscale_all_dim")]
    if all(mscales):
        above, below = (yarn_attention_factor(factor, mscale) for mscale in mscales)
        default = above / below
    else:
        default = yarn_attention_factor(factor)
    return replace(
        rope,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=_number_or_zero(section, "beta_fast") or 32.0,
        beta_slow=_number_or_zero(section, "beta_slow") or 1.0,
        truncate=section.boolean("truncate", True),
        attention_factor=section.number("attention_factor", default),
    )


def _number_or_zero(section: HFConfig, name: str) -> float:
    """Return a positive number, or 0 if the field is 0, null or missing."""
    return section.number(name) if section.values.get(name) else 0.0
