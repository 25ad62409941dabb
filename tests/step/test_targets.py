"""Descriptions of GPUs for compilation without a GPU."""

import pytest

from forge_jax.step.targets import TARGETS, Target
from forge_jax.weights.formats import fused_values


@pytest.mark.parametrize("key", TARGETS)
def test_target_selects_weight_formats_like_a_device(key):
    target = Target.read(key)
    fp8 = {"fp8"} if key in ("h200", "b200", "rtx5090") else set()
    assert fused_values(target) == {"int8", "int4"} | fp8
