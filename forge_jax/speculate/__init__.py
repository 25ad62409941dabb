"""Speculative decoding: drafters, the number of drafts to verify, and acceptance statistics."""

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
    """Return the configured speculator, or None if speculation is off.

    Raises:
      ConfigError: the configuration requires a draft model, but none is given.
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
            raise ConfigError("--speculation draft needs a draft model, but none is given")
        drafter = ModelDrafter(draft_model)
    else:
        from forge_jax.speculate.suffix import SuffixDrafter

        drafter = OneByOne(SuffixDrafter(most))
    return Speculator(drafter, max_draft_tokens=most, one_step_ahead=config.batch.one_step_ahead)
