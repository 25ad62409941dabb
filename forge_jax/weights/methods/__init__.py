"""The quantization methods of checkpoints, one file each: how to read the config and the tensors.

Supported methods:

- `fp8`, per tensor, or in blocks as in DeepSeek and Qwen
- `compressed-tensors`: int8 and FP8 with and without quantized activations, and packed 4 bits
- `gptq` and `awq`: 4 bits
- `mxfp4`: the experts of gpt-oss

A new method is a file with a function `read`, a `Layout` if its tensors need one, and a line in
`METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.host.files import short_repr
from forge_jax.weights.methods import awq, compressed, fp8, gptq, mxfp4
from forge_jax.weights.quantization import QuantSpec

METHODS: dict[str, Callable[[HFConfig], QuantSpec]] = {
    "fp8": fp8.read,
    "compressed-tensors": compressed.read,
    "gptq": gptq.read,
    "awq": awq.read,
    "mxfp4": mxfp4.read,
}


def read_quantization(config: HFConfig) -> QuantSpec | None:
    """Return the scheme of `quantization_config` or `compression_config`; None without either.

    Raises:
      UnsupportedModelError: a method, field or value is not supported; the message names it.
      ModelError: a field is missing, or has the wrong type or range.
    """
    sections = [name for name in ("quantization_config", "compression_config") if config.has(name)]
    if not sections:
        return None
    if len(sections) > 1:
        raise config.error("compression_config", "omitted if there is a quantization_config")
    section = config.section(sections[0])
    assert section is not None
    default = "compressed-tensors" if sections[0] == "compression_config" else None
    if default is None and not section.has("quant_method") and section.has("quant_algo"):
        raise UnsupportedModelError(  # as NVIDIA's Model Optimizer writes
            f"{section.where}: quant_algo {short_repr(section.values['quant_algo'])} without a "
            f"quant_method is not supported; supported methods: {', '.join(METHODS)} (or use the "
            "unquantized checkpoint)"
        )
    method = section.string("quant_method", default)
    if method not in METHODS:
        raise UnsupportedModelError(
            f"{section.where}: quant_method {short_repr(method)} is not supported; "
            f"supported: {', '.join(METHODS)} (or use the unquantized checkpoint)"
        )
    return METHODS[method](section)
