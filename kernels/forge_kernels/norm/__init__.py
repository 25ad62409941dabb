"""Normalization layers."""

from forge_kernels.norm.api import rms_norm

__all__ = ["rms_norm"]
