"""FP8 with a scale per matrix (AutoFP8) or per block (DeepSeek-V3, arXiv:2412.19437)."""

from __future__ import annotations

from forge_jax.config.hf_config import HFConfig
from forge_jax.weights.quantization import (
    EVERY_LAYER,
    MAX_GROUP_SIZE,
    ModuleNames,
    QuantSpec,
    choose,
    note_kv_cache,
    read_names,
    refuse,
    refuse_unknown,
)
from forge_jax.weights.tensors import PLAIN, Scheme


def read(section: HFConfig) -> QuantSpec:
    """Return the scheme of the section."""
    refuse_unknown(
        section,
        "quant_method activation_scheme fmt weight_block_size modules_to_not_convert "
        "ignored_layers kv_cache_scheme",
    )
    choose(section, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    static = choose(section, "activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    block: tuple[int | None, int | None] = (None, None)
    if section.has("weight_block_size"):
        size = section.values["weight_block_size"]
        if not isinstance(size, list) or len(size) != 2 or any(
            type(n) is not int or not 1 <= n <= MAX_GROUP_SIZE for n in size
        ):  # fmt: skip
            raise section.error("weight_block_size", "a list of two sizes")
        if static:
            raise refuse(section, "activation_scheme", "dynamic with weight_block_size")
        block = size[0], size[1]
    note_kv_cache(section)
    both = [
        read_names(section, name, "parts") for name in ("modules_to_not_convert", "ignored_layers")
    ]
    scheme = Scheme(
        layout=PLAIN,
        values="fp8",
        block=block,
        activations="fp8",
        static=static,
        scale_name="weight_scale" if block == (None, None) else "weight_scale_inv",
    )
    return QuantSpec(
        method="fp8",
        schemes=((EVERY_LAYER, scheme),),
        ignored=ModuleNames(both[0].names + both[1].names, "parts"),
        where=section.where,
    )
