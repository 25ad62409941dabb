"""ModelSpec: what a model is, read from `config.json` and checked.

What all families share is read here; what is a family's own, in `families`.

Knows both spellings of Hugging Face's files: `rope_theta`, `rope_scaling` and `torch_dtype`
(transformers 4), `rope_parameters` and `dtype` (transformers 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from forge_jax.config_file import Config
from forge_jax.errors import UnsupportedModelError
from forge_jax.files import shown
from forge_jax.quant.block_types import BlockTypes, read_block_types
from forge_jax.quant.spec import QuantSpec, read_quantization

ROPE_TYPES = ("default", "linear", "llama3", "longrope")
DTYPES = ("bfloat16", "float16", "float32")

# Far above any model that exists. What is made per layer or token is bounded by them.
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_WIDTH = 2**20  # of hidden, intermediate and head sizes
MAX_VOCAB = 2**22
MAX_POSITIONS = 2**27
MAX_EXPERTS = 4096


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embeddings: their base, and how they are stretched."""

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()  # of longrope: of each pair
    attention_factor: float = 1.0  # on cos and sin


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """A mixture of experts in place of the MLP (Shazeer et al. 2017, arXiv:1701.06538).

    Attributes:
      count: experts of a layer. per_token: how many of them compute a token.
      intermediate_size: of one expert.
      normalised: whether the weights of a token's experts are made to sum to one.
      dense_layers: layers that have an ordinary MLP.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalised: bool = True
    dense_layers: frozenset[int] = frozenset()


Activation = Literal["silu", "gelu_tanh"]
NormPlacement = Literal["before", "after", "both"]  # of attention and MLP


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer; the names are those of `config.json`, where it has one.

    Attributes:
      dtype: of the checkpoint: what "auto" means.
      activation: of the gate. norm_placement: where norms stand; "after": before the result is
        added to the stream.
      norm_offset: added to the weight of every norm. norm_in_float32: whether a norm is multiplied
        with its weight before it is rounded; with an offset it is.
      attention_bias: of queries, keys and values; output_bias: of what attention gives; mlp_bias.
      qk_norm: of queries and keys: by "head", over all heads as one ("all"), or None.
      windows: for each layer, how many keys a query sees; None: all. Empty: all in every layer.
      local_rope: of layers with a window, where theirs is another.
      no_rope: layers whose queries and keys are not rotated.
      attention_scale: the factor on scores; None: head_dim ** -0.5.
      attention_soft_cap, logit_soft_cap: x becomes cap * tanh(x / cap).
      embedding_scale, residual_scale, logit_scale: factors on embeddings, on what a layer adds,
        and on logits.
      experts: in place of the MLP of some or all layers.
      quantization: of the checkpoint's matrices.
      block_types: of those of a GGUF file, which stay in their blocks.
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
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    activation: Activation = "silu"
    norm_placement: NormPlacement = "before"
    norm_offset: float = 0.0
    norm_in_float32: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    windows: tuple[int | None, ...] = ()
    local_rope: RopeSpec | None = None
    no_rope: frozenset[int] = frozenset()
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: ExpertSpec | None = None
    quantization: QuantSpec | None = None
    block_types: BlockTypes | None = None

    @property
    def sm_scale(self) -> float:
        """The factor on attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window(self, layer: int) -> int | None:
        """How many keys a query of this layer sees; None: all."""
        return self.windows[layer] if self.windows else None

    def experts_of(self, layer: int) -> ExpertSpec | None:
        """The experts of this layer; None: it has an ordinary MLP."""
        none = self.experts is None or layer in self.experts.dense_layers
        return None if none else self.experts


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def decoder_spec(
    config: Config,
    generation: Config,
    architecture: str,
    *,
    activation: str | None = "silu",
    activation_name: str = "hidden_act",
    eps: float = 1e-6,
    tied: bool = False,
    rope: RopeSpec | None = None,
    **parts: Any,
) -> ModelSpec:
    """The spec of a decoder from its `config.json` and `generation_config.json`.

    Args:
      activation, eps, tied: Hugging Face's defaults, where the file does not say.
      activation_name: of the field.
      rope: instead of what the file says for all layers.
      parts: what is the family's own.

    Raises:
      UnsupportedModelError: an option that is not implemented, by name.
      ModelError: a field is missing, or has the wrong type or range.
    """
    name = config.string(activation_name, activation)
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{config.where}: {activation_name} {shown(name)} is not supported; "
            f"supported: {', '.join(ACTIVATIONS)}"
        )
    hidden_size = config.integer("hidden_size", high=MAX_WIDTH)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", heads, high=MAX_HEADS)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if not config.has("head_dim") and hidden_size % heads:
        raise config.error("num_attention_heads", f"a divisor of hidden_size ({hidden_size})")
    head_dim = config.integer("head_dim", hidden_size // heads, high=MAX_WIDTH)
    if head_dim % 2:
        raise config.error("head_dim", "even, for rotary embeddings")
    vocab_size = config.integer("vocab_size", high=MAX_VOCAB)
    max_positions = config.integer("max_position_embeddings", high=MAX_POSITIONS)
    eos_token_ids = dict.fromkeys(
        generation.token_ids("eos_token_id", vocab_size)
        + config.token_ids("eos_token_id", vocab_size)
    )
    bos_token_ids = config.token_ids("bos_token_id", vocab_size)
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
        num_hidden_layers=config.integer("num_hidden_layers", high=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=config.number("rms_norm_eps", eps),
        rope=rope or read_rope(config, max_positions, head_dim),
        tie_word_embeddings=config.boolean("tie_word_embeddings", tied),
        dtype=read_dtype(config),
        quantization=read_quantization(config),
        block_types=read_block_types(config),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=tuple(eos_token_ids),
        activation=ACTIVATIONS[name],
        **parts,
    )


def read_windows(
    config: Config, windowed: Callable[[int], bool], size: int | None = None
) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types` where the file has them, else by `windowed`.

    Args:
      windowed: whether the layer of this index has one, where the file does not say.
      size: Hugging Face's default; None: no window.
    """
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    if not config.has("sliding_window") and size is None:
        return ()
    window = config.integer("sliding_window", size, high=MAX_POSITIONS)
    types = config.values.get("layer_types")
    if types is None:
        return tuple(window if windowed(layer) else None for layer in range(layers))
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or any(t not in known for t in types):
        raise config.error("layer_types", f"a list of {layers}, each {' or '.join(known)}")
    return tuple(window if kind == known[0] else None for kind in types)


def read_experts(config: Config, *, count: int, per_token: int, **parts: Any) -> ExpertSpec | None:
    """The experts of a model; None: it has none.

    Args:
      count, per_token: Hugging Face's defaults, where the file does not say.
      parts: what is the family's own.

    Raises:
      UnsupportedModelError: experts that every token takes, or another activation.
    """
    for name in ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"):
        if config.values.get(name):
            raise UnsupportedModelError(
                f"{config.where}: {name} is not supported: experts that every token takes"
            )
    # transformers 5 writes one name for all families, older files have the family's own.
    name = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    count = config.integer(name, count, low=0, high=MAX_EXPERTS)
    if count == 0:
        return None
    activation = config.string("hidden_act", "silu")
    if ACTIVATIONS.get(activation) != "silu":
        raise UnsupportedModelError(
            f"{config.where}: hidden_act {shown(activation)} is not supported with experts; "
            "supported: silu, swish"
        )
    per_token = config.integer("num_experts_per_tok", per_token, high=MAX_EXPERTS)
    if per_token > count:
        raise config.error("num_experts_per_tok", f"at most {name} ({count})")
    return ExpertSpec(count=count, per_token=per_token, **parts)


def read_dtype(config: Config) -> str:
    """The checkpoint's dtype; float32 where the file does not say, as in Hugging Face."""
    name = "dtype" if config.has("dtype") else "torch_dtype"
    dtype = config.string(name, "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedModelError(
            f"{config.where}: {name} {shown(dtype)} is not supported; "
            f"supported: {', '.join(DTYPES)}"
        )
    return dtype


def read_rope(config: Config, max_position_embeddings: int, head_dim: int) -> RopeSpec:
    """Rotary embeddings from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    section = config.section("rope_parameters") or config.section("rope_scaling")
    partial = section if section and section.has("partial_rotary_factor") else config
    if partial.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{partial.where}: partial_rotary_factor is not supported")
    if section is None:
        return RopeSpec(theta=config.number("rope_theta", 10000.0))
    return rope_of(section, config, max_position_embeddings, head_dim)


def rope_of(
    section: Config, config: Config, max_position_embeddings: int, head_dim: int
) -> RopeSpec:
    """Rotary embeddings from the section of `config` that describes them."""
    # `type` is the spelling of before transformers 4.43.
    kind = section.string("rope_type", section.string("type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{section.where}: rope type {shown(kind)} is not supported; "
            f"supported: {', '.join(ROPE_TYPES)}"
        )
    theta = (section if section.has("rope_theta") else config).number("rope_theta", 10000.0)
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "longrope":
        return _longrope(section, config, theta, max_position_embeddings, head_dim)
    factor = section.number("factor")
    if kind == "linear":
        return RopeSpec(type=kind, theta=theta, factor=factor)
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if low >= high:
        raise section.error("high_freq_factor", f"above low_freq_factor ({low:g})")
    return RopeSpec(
        type=kind,
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=section.integer(
            "original_max_position_embeddings", max_position_embeddings
        ),
    )


def _longrope(
    section: Config, config: Config, theta: float, max_position_embeddings: int, head_dim: int
) -> RopeSpec:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): a factor for each pair.

    There are two lists, for sequences up to the original length and for longer ones. A model with
    a longer context takes the second for all: keys that are in the cache cannot change.
    """
    name = "original_max_position_embeddings"
    original = (section if section.has(name) else config).integer(name, max_position_embeddings)
    extended = max_position_embeddings > original
    field = "long_factor" if extended else "short_factor"
    factors = section.values.get(field)
    pairs = head_dim // 2
    if (
        not isinstance(factors, list)
        or len(factors) != pairs
        or any(isinstance(f, bool) or not isinstance(f, int | float) for f in factors)
        or any(not 0 < f < 1e9 for f in factors)
    ):
        raise section.error(field, f"a list of {pairs} positive numbers")
    stretch = section.number("factor", max_position_embeddings / original)
    default = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return RopeSpec(
        type="longrope",
        theta=theta,
        factors=tuple(float(factor) for factor in factors),
        attention_factor=section.number("attention_factor", default),
    )
