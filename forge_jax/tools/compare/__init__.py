"""Comparison of two models, or of two settings of one, token by token."""

from forge_jax.tools.compare.run import FORMAT, VERSION, Prompts, Report, Side, compare

__all__ = ["FORMAT", "VERSION", "Prompts", "Report", "Side", "compare"]
