"""The families that no other test compares: several devices against transformers."""

import child
import pytest
from test_tensor_parallel import run_child

from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.models.families import ARCHITECTURES

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]

GOLDENS = child.GOLDENS


def architecture_of(name):
    return read_spec(GOLDENS / name).architecture


NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.safetensors"))
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # tested in `test_parallel_state.py`
ELSEWHERE = {architecture_of(name) for name in (*child.LAYERS, *HYBRID)}
FAMILIES = {
    architecture: name
    for name in NAMES
    if (architecture := architecture_of(name)) not in ELSEWHERE
    and ARCHITECTURES[architecture].tensor_parallel
}
# Other layers of families with several kinds.
ALSO = ["deepseek_v2_lite", "gpt_neox_sequential", "gpt_oss", "granitemoehybrid"]


@pytest.fixture(scope="module")
def found():
    return run_child(*FAMILIES.values(), *ALSO, child="families_child.py")


def test_logits_match_transformers(found, figure):
    assert len(FAMILIES) > 25
    for name, one in found.items():
        if one["shards"] == 4:
            figure("families", name, "devices", one["difference"])
        assert one["difference"] < 2e-4, (name, one)


def test_step_reduces_twice_per_layer_and_gathers_once(found):
    for name, one in found.items():
        expected = 2 + 2 * one["layers"]
        if name in ("cohere2", "stablelm_parallel"):  # XLA combines the sums of a parallel block
            expected -= one["layers"]
        if name in ("olmo3", "olmoe"):  # norms over all heads
            expected += one["layers"]
        if name == "granitemoehybrid":  # norms over all heads of three layers with Mamba-2
            expected += 3
        assert one["collectives"] == expected, name
