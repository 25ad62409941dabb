"""What low-rank adapters add to a linear layer."""

from forge_kernels.lora.api import lora

__all__ = ["lora"]
