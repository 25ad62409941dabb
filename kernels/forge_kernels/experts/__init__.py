"""Mixtures of experts: which compute a token, and what they make of it."""

from forge_kernels.experts.api import Implementation, choose_experts, mix_experts

__all__ = ["Implementation", "choose_experts", "mix_experts"]
