"""Mixtures of experts: routing, and the weighted sum of the experts' outputs."""

from forge_kernels.experts.activations import ClampedSwiGLU, geglu, swiglu
from forge_kernels.experts.api import Implementation, choose_experts, mix_experts

__all__ = [
    "ClampedSwiGLU",
    "Implementation",
    "choose_experts",
    "geglu",
    "mix_experts",
    "swiglu",
]
