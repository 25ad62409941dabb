"""Products with weight matrices: plain, packed, quantized, and in blocks."""

from forge_kernels.linear.api import Weight, linear
from forge_kernels.linear.blocks import BlockPacking, pack_blocks
from forge_kernels.linear.composed import MixedMatrix, OrderedWeight
from forge_kernels.linear.cpu_ffi import PackedWeight
from forge_kernels.linear.operands import MatmulOptions, MatrixWeight
from forge_kernels.linear.packed import (
    FORMATS,
    Format,
    Packing,
    pack,
    pack_experts,
    pack_values,
)
from forge_kernels.linear.plain import PlainWeight
from forge_kernels.linear.quantized import (
    Quantization,
    QuantizedWeight,
    arrange_blocks,
    native_int4,
    pack_int4,
    unpack_int4,
)

__all__ = [
    "FORMATS",
    "BlockPacking",
    "Format",
    "MatmulOptions",
    "MatrixWeight",
    "MixedMatrix",
    "OrderedWeight",
    "PackedWeight",
    "Packing",
    "PlainWeight",
    "Quantization",
    "QuantizedWeight",
    "Weight",
    "arrange_blocks",
    "linear",
    "native_int4",
    "pack",
    "pack_blocks",
    "pack_experts",
    "pack_int4",
    "pack_values",
    "unpack_int4",
]
