"""Mixtures whose experts several devices divide compared with one device, with four CPU devices."""

import json
import sys
import urllib.request

import pytest
from server_process import serving
from test_tensor_parallel import FLAGS, expected_collectives, run_child

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def models():
    return run_child("families", "uneven", "packed", child="experts_child.py")


@pytest.fixture(
    scope="module", params=["forms", pytest.param("forms_on_two", marks=pytest.mark.soak)]
)
def forms(request):
    return run_child(request.param, child="experts_child.py")[request.param]


@pytest.fixture(scope="module")
def files():
    return run_child("reads", "converted", child="experts_child.py")


@pytest.fixture(scope="module")
def engines():
    return run_child("engine", child="experts_child.py")["engine"]


def test_logits_match_one_device(models):
    assert len(models["families"]) == 7
    for name, each in models["families"].items():
        assert each["difference"] < 2e-4, (name, each)
        assert each["scale"] > 1.0 and each["same_choice"] == 1.0, (name, each)


def test_step_has_the_collectives_of_tensor_parallelism(models):
    for name, each in models["families"].items():
        expected = expected_collectives(1, ends="experts")
        if name.startswith("qwen3_moe on"):  # a layer with experts, and one without
            expected[-1:-1] = ["all-reduce layer_1/attention_out", "all-reduce layer_1/down"]
        if name.startswith("glm4_moe"):  # a layer without experts, and one with shared experts
            expected = expected_collectives(2, ends=("down", "experts"))
        assert each["collectives"] == expected, name


def test_devices_without_rows_add_nothing(models):
    for each in models["uneven"]:
        assert each["difference"] < 2e-4 and each["scale"] > 1.0, each
        assert each["same_choice"] == 1.0


def test_experts_in_every_format_match_one_device(forms):
    assert forms["refused"] == {} and len(forms["forms"]) == 11
    for name, each in forms["forms"].items():
        assert each["scale"] > 1.0 and each["difference"] < 1e-5, (name, each)
        assert each["collectives"] == ["all-reduce experts"], name


def test_cpu_kernels_multiply_whole_experts_in_their_formats(models):
    found = models["packed"]
    if found is None:
        pytest.skip("no CPU kernels on this machine")
    formats, (on_one, *on_several, scale) = found.pop("formats"), found.pop("blocks")
    assert formats == {
        **{name: name for name in ("bf16", "int8", "int4")},
        **{"int8_rows": "int8", "w4a16": "int4", "blocks": "int6 blocks"},
    }
    for each in found.values():
        for name, form in each["forms"].items():  # sums of devices are rounded to bfloat16
            assert form["difference"] <= form["scale"] / 64, (name, form)
    for far in on_several:
        assert 0.0 < on_one < 0.1 * scale and far < 1.15 * on_one


def test_device_reads_its_own_experts_only(files):
    for name, read in files["reads"].items():
        others = read["experts"] * 3 // 4
        assert 0 < others < read["all"]
        assert read["each"] == [read["all"] - others] * 4, name


def test_converted_folders_have_the_experts_of_each_device(files):
    folders = dict(files["converted"])
    assert folders.pop("divided") == (
        "OUT was converted with --expert-parallel: use the option, or convert the original model "
        "again without it"
    )
    assert folders.pop("cut") == (
        "OUT was converted without --expert-parallel: omit the option, or convert the original "
        "model again with it"
    )
    packed = folders.pop("packed of 1", "for the CPU kernels of one device")
    assert "for the CPU kernels of one device" in packed
    assert len(folders) >= 8 and folders == dict.fromkeys(folders, True)


def test_engines_return_the_same_tokens(engines):
    one = engines["one"]
    for name, each in engines.items():
        assert each["tokens"] == one["tokens"] and each["drawn"] == one["drawn"], name
    assert len({tuple(ids) for ids in one["tokens"]}) == 4 and one["tokens"] != one["drawn"]


def test_deterministic_bits_are_independent_of_batch_and_recovery(engines):
    for name, each in engines.items():
        assert each["alone"] and each["recovered"], name


def test_engine_steps_have_the_collectives_of_tensor_parallelism(engines):
    for name in ("two", "four", "cut"):
        expected = expected_collectives(engines[name]["layers"], ends="experts")
        assert engines[name]["collectives"] == expected, name


def test_fingerprint_depends_on_the_division_of_experts(engines):
    assert len({each["fingerprint"] for each in engines.values()}) == 4


def test_server_divides_the_experts(engines, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", FLAGS)
    flags = ("--backend", "cpu", "--tensor-parallel", "4", "--expert-parallel")
    flags += ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--deterministic")
    model = engines["one"]["model"]
    with serving(sys.executable, model, *flags, "--max-model-len", "64") as (url, name, _):
        body = {"model": name, "prompt": engines["one"]["prompts"], "max_tokens": 12}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            choices = json.load(response)["choices"]
    assert [choice["token_ids"] for choice in choices] == engines["one"]["tokens"]
