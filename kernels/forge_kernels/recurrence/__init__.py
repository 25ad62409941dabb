"""Layers with a linear recurrence over ragged rows, and a state for each sequence."""

from forge_kernels.recurrence.api import (
    DELTA_RULE,
    STATE_SPACE,
    Form,
    RecurrentState,
    RecurrentWeights,
    gated_rms_norm,
    ragged_recurrence,
)
from forge_kernels.recurrence.rule import Heads, Rule

__all__ = [
    "DELTA_RULE",
    "STATE_SPACE",
    "Form",
    "Heads",
    "RecurrentState",
    "RecurrentWeights",
    "Rule",
    "gated_rms_norm",
    "ragged_recurrence",
]
