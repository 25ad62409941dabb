"""Gated DeltaNet over ragged rows, with a state for each sequence."""

from forge_kernels.delta_rule.api import DeltaState, Heads, gated_rms_norm, ragged_delta_net

__all__ = ["DeltaState", "Heads", "gated_rms_norm", "ragged_delta_net"]
