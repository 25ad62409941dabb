"""One model in several stages compared with the same in one, in processes with four CPU devices."""

import pytest
from test_tensor_parallel import run_child

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found():
    return run_child("engines", "split", "families", "files", child="pipeline_child.py")


def test_three_stages_give_the_bits_of_one(found):
    one, three = found["engines"]["1"], found["engines"]["3 stages"]
    assert three["outputs"] == one["outputs"]
    assert all(each["preemptions"] and each["accepted"] for each in (one, three))


def test_stages_of_two_devices_give_the_bits_of_two_devices(found):
    two, four = found["split"].values()
    assert four["outputs"] == two["outputs"]
    assert (two["devices"], four["devices"]) == ([0, 1], [0, 1, 2, 3])


def test_engine_with_stages_recovers_from_failed_steps(found):
    for each in (*found["engines"].values(), *found["split"].values()):
        assert each["recovered"] and each["recoveries"]


def test_each_stage_has_only_its_weights(found):
    three = found["engines"]["3 stages"]
    assert three["stages"] == [0, 1, 2]  # the model has three layers
    assert three["devices"] == [0, 1, 2]
    # The head is also the embedding, so that the first and the last stage have it.
    assert sum(three["bytes"]) > three["whole_bytes"] > 1.8 * max(three["bytes"])


def test_executables_name_their_stage(found):
    names = found["engines"]["3 stages"]["executables"]
    steps = [name for name in names if name.startswith("mixed")]
    assert [name.partition("@")[2] for name in steps] == ["0", "1", "2"]


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next", "qwen2"])
def test_stages_of_other_families_give_the_bits_of_one(found, name):
    assert found["families"][name]


def test_packed_matrices_and_converted_folders_have_stages(found):
    if found["files"] is None:
        pytest.skip("no CPU kernels on this machine")
    whole, stages, converted = found["files"].values()
    assert stages == whole and converted == whole
