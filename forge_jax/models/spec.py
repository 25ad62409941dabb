"""ModelSpec: what a model is, read from `config.json` and checked.

Knows both spellings of Hugging Face's files: `rope_theta`, `rope_scaling` and `torch_dtype`
(transformers 4), `rope_parameters` and `dtype` (transformers 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forge_jax.errors import ModelError, UnsupportedModelError
from forge_jax.files import shown

ROPE_TYPES = ("default", "linear", "llama3")
DTYPES = ("bfloat16", "float16", "float32")

# Far above any model that exists. What is made per layer or token is bounded by them.
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_WIDTH = 2**20  # of hidden, intermediate and head sizes
MAX_VOCAB = 2**22
MAX_POSITIONS = 2**27
MAX_TOKEN_LIST = 1024


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embeddings: their base, and how they are stretched."""

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer; the names are those of `config.json`."""

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
    dtype: str  # of the checkpoint: what "auto" means
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def sm_scale(self) -> float:
        """The factor on attention scores."""
        return self.head_dim**-0.5


class Config:
    """`config.json` with checks: each getter names the field that is wrong."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json"):
        self.values, self.where = values, where

    def error(self, name: str, want: str) -> ModelError:
        return ModelError(
            f"{self.where}: {name} must be {want}, not {shown(self.values.get(name))}"
        )

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(
        self, name: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1
    ) -> int:
        value = self.values.get(name) if self.has(name) else default
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, f"an integer from {low} to {high}")
        return value

    def number(
        self,
        name: str,
        default: float | None = None,
        *,
        low: float = 0.0,
        high: float = 1e30,
    ) -> float:
        """A finite number above `low`; float32 holds all up to `high`."""
        value = self.values.get(name) if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "a number")
        if not low < value <= high:  # NaN is neither
            raise self.error(name, f"a finite number above {low:g}, at most {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name) if self.has(name) else default
        if type(value) is not bool:
            raise self.error(name, "true or false")
        return value

    def string(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name) if self.has(name) else default
        if type(value) is not str:
            raise self.error(name, "a string")
        return value

    def section(self, name: str) -> Config | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Config(value, f"{self.where}: {name}")

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A token id, a list of them, or none: they index the model's logits."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if len(ids) > MAX_TOKEN_LIST or any(
            type(i) is not int or not 0 <= i < vocab_size for i in ids
        ):
            raise self.error(name, f"a token id below {vocab_size} or a list of such token ids")
        return tuple(ids)


def llama_spec(config: Config, generation: Config) -> ModelSpec:
    """The spec of a LlamaForCausalLM from its `config.json` and `generation_config.json`.

    Raises:
      UnsupportedModelError: an option that is not implemented, by name.
      ModelError: a field is missing, or has the wrong type or range.
    """
    refuse_quantization(config)
    for name in ("attention_bias", "mlp_bias"):
        if config.boolean(name, False):
            raise UnsupportedModelError(f"{config.where}: {name} is not supported for Llama")
    activation = config.string("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"{config.where}: hidden_act {shown(activation)} is not supported; supported: silu"
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
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
        num_hidden_layers=config.integer("num_hidden_layers", high=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config, max_positions),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        dtype=read_dtype(config),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=tuple(eos_token_ids),
    )


def refuse_quantization(config: Config) -> None:
    section = config.section("quantization_config")
    if section is not None:
        method = section.values.get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"{config.where}: the checkpoint is quantized (quantization_config, method "
            f"{shown(method)}), which is not supported; use the unquantized checkpoint"
        )


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


def read_rope(config: Config, max_position_embeddings: int) -> RopeSpec:
    """Rotary embeddings from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    section = config.section("rope_parameters") or config.section("rope_scaling")
    partial = section if section and section.has("partial_rotary_factor") else config
    if partial.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{partial.where}: partial_rotary_factor is not supported")
    if section is None:
        return RopeSpec(theta=config.number("rope_theta", 10000.0))
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
