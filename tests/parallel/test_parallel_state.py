"""Models with gated DeltaNet on several devices, compared with one and with transformers."""

import pytest
from test_tensor_parallel import expected_collectives, run_child

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found():
    parts = ("logits", "packed", "plain", "adapted", "drafted", "converted", "gguf")
    return run_child(*parts, child="state_child.py")


def test_logits_match_one_device(found, figure):
    assert len(found["logits"]) == 5
    for name, one in found["logits"].items():
        if name in ("qwen3_5_text", "qwen3_5_moe_text"):  # on four devices
            figure("families", name, "devices", one["difference"])
        assert one["difference"] < 2e-4, (name, one)
        assert one["scale"] > 1.0 and one["same_choice"] == 1.0, (name, one)


def test_step_reduces_twice_per_layer_and_gathers_once(found):
    ends = {
        "qwen3_next": ("down", "experts"),
        "qwen3_5_text": ("down", "down"),
        "qwen3_5_moe_text": ("experts", "experts"),
    }
    for name, one in found["logits"].items():
        expected = expected_collectives(2, ends=ends[name.split(" ")[0]])
        expected[1] = "all-reduce layer_0/delta_out"  # the other layer has attention
        assert one["collectives"] == expected, name


def test_matrices_packed_per_shard_are_as_accurate_as_packed_whole(found):
    if found["packed"] is None:
        pytest.skip("no CPU kernels on this machine")
    far_on_one, far_on_several, scale = found["packed"]
    assert 0.0 < far_on_one < 0.3 * scale and far_on_several < 1.15 * far_on_one


def test_engine_without_drafts_preempts_and_recovers(found):
    plain = found["plain"]
    assert plain["same"] and plain["preemptions"] and plain["recoveries"] > 2
    assert plain["steps"] == ["decode[3]", "mixed[32]"]


def test_adapters_change_the_same_tokens_on_all_devices(found):
    one, four = found["adapted"]["1"], found["adapted"]["4"]
    assert one == four and one[0] != one[1]


def test_drafts_and_preemption_change_no_bit_of_deterministic_engines(found):
    assert set(found["drafted"]) == {"qwen3_next", "qwen3_5_text"}
    for name, one in found["drafted"].items():
        assert one["same"] and one["same bits"] and one["preemptions"], name
        assert 0.2 < one["accepted"] < 1.0, name
    assert found["drafted"]["qwen3_next"]["collectives"] == {"mixed[32]": 10}


def test_converted_folders_have_the_models_bits_on_each_device(found):
    assert found["converted"] == {"split": 30, "of 1": True, "of 2": True}


def test_gguf_file_with_reordered_heads_gives_the_same_tokens(found):
    tokens, want = found["gguf"]
    assert tokens == want


def test_gguf_blocks_with_reordered_heads_are_split_and_converted():
    found = run_child("blocks", child="state_child.py")["blocks"]
    compared = found.pop("logits")
    assert compared["difference"] < 1e-4 * compared["scale"] and compared["same_choice"] == 1
    assert found == {
        "None of 1": "convert the original model again with --tensor-parallel 2",
        "None of 2": True,
        "int8 of 1": True,
        "int8 of 2": True,
    }
