"""Quantised checkpoints: what their config says, and how their tensors are read."""

from forge_jax.quant.spec import QuantSpec, Scheme, read_quantization

__all__ = ["QuantSpec", "Scheme", "read_quantization"]
