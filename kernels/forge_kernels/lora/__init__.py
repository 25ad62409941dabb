"""The contribution of low-rank adapters to a linear layer."""

from forge_kernels.lora.api import lora
from forge_kernels.lora.packed import pack_adapter, packed_lora, packings

__all__ = ["lora", "pack_adapter", "packed_lora", "packings"]
