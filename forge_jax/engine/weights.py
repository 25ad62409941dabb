"""The weights of a running engine, for a trainer: read them, and score tokens with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_jax.scoring import ScoreOptions

if TYPE_CHECKING:
    from forge_jax.models import Leaves, Model
    from forge_jax.step.runner import Runner


class EngineWeights:
    """The weights of one engine."""

    def __init__(self, runner: Runner):
        self._runner = runner

    @property
    def model(self) -> Model:
        return self._runner.model

    @property
    def leaves(self) -> Leaves:
        """The current weights, in the order of `model.names`."""
        return self._runner.leaves

    @property
    def score_options(self) -> ScoreOptions:
        """The options with which `score` returns the bits of this engine.

        Raises:
          ModelError: if the engine is not deterministic.
        """
        return ScoreOptions.of_engine(self._runner.options)
