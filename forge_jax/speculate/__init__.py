"""Speculative decoding: guesses, how many of them to verify, and what they came to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_jax.config import EngineConfig
from forge_jax.errors import ConfigError
from forge_jax.speculate.drafter import OneByOne
from forge_jax.speculate.speculator import SpeculationStats, Speculator

if TYPE_CHECKING:
    from forge_jax.speculate.draft_model import DraftModel

__all__ = ["SpeculationStats", "Speculator", "make_speculator"]


def make_speculator(
    config: EngineConfig, draft_model: DraftModel | None = None
) -> Speculator | None:
    """What the configuration asks for; None where speculation is off.

    Raises:
      ConfigError: it asks for a draft model where there is none.
    """
    kind, most = config.speculation.speculation, config.speculation.max_draft_tokens
    if kind == "off":
        return None
    if kind == "ngram":
        from forge_jax.speculate.ngram import NgramDrafter

        drafter = OneByOne(NgramDrafter(most))
    elif kind == "draft":
        from forge_jax.speculate.draft import ModelDrafter

        if draft_model is None:
            raise ConfigError("--speculation draft needs a model: there is none here")
        drafter = ModelDrafter(draft_model)
    else:
        from forge_jax.speculate.suffix import SuffixDrafter

        drafter = OneByOne(SuffixDrafter(most))
    return Speculator(drafter, max_draft_tokens=most, one_step_ahead=config.batch.one_step_ahead)
