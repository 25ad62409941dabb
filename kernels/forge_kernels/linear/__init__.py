"""Products with weight matrices: plain ones, that lie as in checkpoints, packed, and quantised."""

from forge_kernels.linear.api import Weight, linear
from forge_kernels.linear.packed import (
    FORMATS,
    Format,
    PackedWeight,
    Packing,
    pack,
    pack_experts,
    pack_values,
)
from forge_kernels.linear.quantized import (
    Quantization,
    QuantizedWeight,
    pack_int4,
    unpack_int4,
)

__all__ = [
    "FORMATS",
    "Format",
    "PackedWeight",
    "Packing",
    "Quantization",
    "QuantizedWeight",
    "Weight",
    "linear",
    "pack",
    "pack_experts",
    "pack_int4",
    "pack_values",
    "unpack_int4",
]
