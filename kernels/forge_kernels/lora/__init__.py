"""The contribution of low-rank adapters to a linear layer."""

from forge_kernels.lora.api import lora

__all__ = ["lora"]
