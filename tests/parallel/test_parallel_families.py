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


# One family of each kind of layer, of each division of matrices, and of each wrapper of a text
# model. The others differ from these in sizes, factors, or names of weights.
KINDS = [
    "cohere2",  # attention and MLP in parallel; layers with a window
    "deepseek_v3",  # latent attention; expert groups
    "ernie4_5_moe",  # a bias of the router; shared experts
    "exaone4_full",  # norms of outputs, and of each head's queries and keys
    "falcon_sequential",  # fused queries, keys and values
    "gemma3_vision",  # a text model in a model of images
    "glm4",  # four norms per layer; half of each head is rotated, in pairs
    "gpt_oss_mxfp4",  # attention sinks; quantized experts with biases
    "gpt_neox_sequential",  # fused by head; an MLP after attention
    "granitemoehybrid",  # Mamba-2, and experts
    "llama4_vision",  # chunked attention; experts whose inputs are scaled
    "minicpm",  # factors of embeddings, residuals and logits
    "olmoe",  # norms over all heads; experts
    "qwen2_5_vl",  # rotations by three positions
    "qwen2_moe",  # a shared expert with a gate
    "qwen3_vl_moe",  # experts of a model of images
    "smollm3",  # layers without rotation
    "starcoder2",  # biases of an MLP without a gate
]
OTHERS = [name for name in (*FAMILIES.values(), *ALSO) if name not in KINDS]


@pytest.fixture(scope="module", params=["kinds", pytest.param("others", marks=pytest.mark.soak)])
def found(request):
    names = KINDS if request.param == "kinds" else OTHERS
    return run_child(*names, child="families_child.py")


def test_logits_match_transformers(found, figure):
    assert len(FAMILIES) > 25 and {*KINDS} <= {*FAMILIES.values(), *ALSO}
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
