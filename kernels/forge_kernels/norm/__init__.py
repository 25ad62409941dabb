"""Normalization layers."""

from forge_kernels.norm.api import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
