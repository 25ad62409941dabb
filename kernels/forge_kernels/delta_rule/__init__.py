"""Gated DeltaNet over ragged rows, with a state for each sequence."""

from forge_kernels.delta_rule.api import DeltaState, Form, Heads, gated_rms_norm, ragged_delta_net

__all__ = ["DeltaState", "Form", "Heads", "gated_rms_norm", "ragged_delta_net"]
