"""Products with weight matrices: plain ones, that lie as in checkpoints, and packed ones."""

from forge_kernels.linear.api import Weight, linear
from forge_kernels.linear.packed import FORMATS, Format, PackedWeight, Packing, pack, pack_experts

__all__ = [
    "FORMATS",
    "Format",
    "PackedWeight",
    "Packing",
    "Weight",
    "linear",
    "pack",
    "pack_experts",
]
