"""Speculative decoding: guesses, how many of them to verify, and what they came to."""

from forge_jax.config import EngineConfig
from forge_jax.speculate.drafter import OneByOne
from forge_jax.speculate.speculator import SpeculationStats, Speculator

__all__ = ["SpeculationStats", "Speculator", "make_speculator"]


def make_speculator(config: EngineConfig) -> Speculator | None:
    """What the configuration asks for; None where speculation is off."""
    kind, most = config.speculation.speculation, config.speculation.max_draft_tokens
    if kind == "off":
        return None
    if kind == "ngram":
        from forge_jax.speculate.ngram import NgramDrafter

        drafter = OneByOne(NgramDrafter(most))
    else:
        from forge_jax.speculate.suffix import SuffixDrafter

        drafter = OneByOne(SuffixDrafter(most))
    return Speculator(drafter, max_draft_tokens=most, one_step_ahead=config.batch.one_step_ahead)
