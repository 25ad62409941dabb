"""Every weight format on several devices compared with one, and the formats that cannot be cut."""

import pytest
from test_tensor_parallel import expected_collectives, run_child

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]

ROW_SCALE = ("fp8_matrix_dynamic", "fp8_rows", "int8_rows")  # devices share a row's scale
ORDERED = ("gptq_ordered", "gptq_ordered_symmetric", "w4a16_ordered")


@pytest.fixture(scope="module")
def found():
    return run_child("products", "kernels", "models", "blocks", child="forms_child.py")


@pytest.fixture(scope="module")
def loaded():
    return run_child("experts", "converted", "peaks", "rejection", child="forms_child.py")


FAULT = "int8_rows with a fault"


def test_mlp_in_every_format_matches_one_device(found, figure):
    for shards, count in (("2", 21), ("4", 20)):
        forms = {n: f for n, f in found["products"][shards]["forms"].items() if n != FAULT}
        assert len(forms) == count
        for name, each in forms.items():
            assert each["scale"] > 1.0 and each["difference"] < 1e-5, (shards, name, each)
            if shards == "4" and not name.startswith(("rounded", "fp8_small")):
                figure("forms", name, "devices", each["difference"])


def test_row_scale_is_the_maximum_over_devices(found):
    fault = found["products"]["4"]["forms"][FAULT]
    assert fault["collectives"] == ["all-reduce down"] and fault["difference"] > 1e-3


def test_formats_use_the_expected_collectives(found):
    for each in found["products"].values():
        for name, form in each["forms"].items():
            expected = ["all-reduce down"]
            if name in ROW_SCALE:
                expected.insert(0, "all-reduce down/product/row_scale")
            if name in ORDERED:
                expected.insert(0, "all-gather down/gather")
            if name != FAULT:
                assert form["collectives"] == expected, name


def test_experts_of_every_kind_match_one_device(loaded):
    forms = dict(loaded["experts"]["forms"])
    fault = forms.pop(FAULT)
    assert fault["collectives"] == ["all-reduce experts"] and fault["difference"] > 1e-3
    assert len(forms) == 8
    for name, each in forms.items():
        assert each["scale"] > 1.0 and each["difference"] < 1e-5, (name, each)
        # Formats rounded by row exchange the largest values of every tile of rows.
        first = [] if name not in ROW_SCALE else each["collectives"][:1]
        assert all(scope.endswith("row_scale") for scope in first), name
        assert each["collectives"] == [*first, "all-reduce experts"], name
    ((name, refused),) = loaded["experts"]["refused"].items()
    assert name == "fp8_blocks"
    assert "48 columns of model.layers.0.block_sparse_moe.experts.0.w2.weight, but" in refused
    blocks = loaded["experts"]["blocks"]
    assert blocks["difference"] < 2e-4 and blocks["same_choice"] == 1.0
    assert blocks["collectives"] == expected_collectives(1, ends="experts")


def test_uncuttable_groups_error_names_valid_device_counts(found):
    matrix = "columns of model.layers.0.mlp.down_proj.weight, but each"
    assert found["products"]["4"]["refused"] == {
        "fp8_blocks": f"--tensor-parallel 4 leaves a device 48 {matrix} 128 are multiplied with "
        "activations that are rounded together: use --tensor-parallel 1",
        "rounded int4": f"--tensor-parallel 4 leaves a device 44 {matrix} 16 share a scale: use "
        "--tensor-parallel 1 or 2",
    }
    assert set(found["products"]["2"]["refused"]) == {"fp8_blocks"}


def test_int4_packed_per_shard_is_as_accurate_as_packed_whole(found):
    if found["kernels"] is None:
        pytest.skip("no CPU kernels on this machine")
    far_on_one, far_on_several, scale = found["kernels"]
    assert 0.0 < far_on_one < 0.1 * scale and far_on_several < 1.15 * far_on_one


def test_quantized_logits_match_one_device(found):
    for name, each in found["models"].items():
        assert each["difference"] < 2e-4 and each["scale"] > 1.0, (name, each)
        assert each["same_choice"] == 1.0, name


def test_block_format_logits_match_one_device(found):
    for name in ("float32 on 2", "float32 on 4"):
        each = found["blocks"][name]
        assert each["difference"] < 2e-4 and each["scale"] > 1.0, (name, each)
        assert each["same_choice"] == 1.0, name
        assert each["collectives"] == expected_collectives(3), name
    whole, cut = found["blocks"]["bytes"]
    # Keys and values of two heads are on four devices, and factors are repeated; no floats.
    assert whole / 4 < cut < 1.3 * whole / 4


def test_matrices_in_blocks_are_packed_per_shard(found):
    if "packed" not in found["blocks"]:
        pytest.skip("no CPU kernels on this machine")
    on_one, *on_several, scale = found["blocks"]["packed"]
    for far in on_several:
        assert 0.0 < on_one < 0.1 * scale and far < 1.15 * on_one


def test_quantized_step_has_the_expected_collectives(found):
    for name, kind, scope in (
        ("int8_rows", "all-reduce", "product/row_scale"),
        ("gptq_ordered", "all-gather", "gather"),
    ):
        embed, out, down, logits = expected_collectives(1)
        first, second = (f"{kind} {each.split(' ')[1]}/{scope}" for each in (out, down))
        expected = [embed, first, out, second, down, logits]
        assert found["models"][name]["collectives"] == expected


def test_converted_folders_have_the_models_bits_on_each_device(loaded):
    folders = dict(loaded["converted"])
    assert folders.pop("on 1") == (
        "--tensor-parallel 1: OUT was converted for 4 devices: use --tensor-parallel 4, or convert "
        "the original model again with --tensor-parallel 1"
    )
    assert folders.pop("on 2").startswith("--tensor-parallel 2: OUT was converted for 4 devices")
    packed = folders.pop("packed of 1", None)
    if packed is not None:
        assert packed.startswith(
            "--tensor-parallel 4: OUT was converted for the CPU kernels of one"
        )
    assert folders.pop("blocks of 1").endswith(
        "convert the original model again with --tensor-parallel 4"
    )
    assert len(folders) == 17 + (packed is not None)
    assert folders == dict.fromkeys(folders, True)


def test_host_holds_one_matrix_more_than_the_weights(loaded):
    rounded, converted = loaded["peaks"]["rounded"], loaded["peaks"]["converted"]
    # A rounded matrix exists whole in 8 bits, and as one shard.
    assert rounded["total"] <= rounded["peak"] < rounded["total"] + 1.3 * rounded["largest"]
    assert 1.3 * rounded["largest"] < 0.2 * converted["total"]  # share of all floats
    assert converted["total"] <= converted["peak"] < converted["total"] + converted["largest"] / 4


def test_each_byte_of_a_sharded_folder_is_read_once(loaded):
    assert loaded["peaks"]["converted"]["read"] == loaded["peaks"]["stored"]


def test_rejection_verifies_drafts_equally_on_all_devices(loaded):
    one, four = loaded["rejection"]["1"], loaded["rejection"]["4"]
    assert four["greedy"] == one["greedy"]
    # The draft model is the target, so its drafts are always accepted.
    assert four["greedy, drafts"] >= 20 and four["drawn, drafts"] >= 12
    assert one["greedy, drafts"] == 0 and len({tuple(ids) for ids in four["drawn"]}) == 2
