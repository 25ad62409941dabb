"""One model on several devices compared with one, in processes with four CPU devices."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import virtual_devices

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
TESTS = HERE.parent
FLAGS = f"{virtual_devices(4)} --xla_backend_optimization_level=0"


def run_child(*parts, child="child.py"):
    """Return the child process's results by part. The second flag makes the compiler quick."""
    path = os.pathsep.join([str(TESTS), str(TESTS / "models"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, HERE / child, *parts],
        env=os.environ | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def models():
    return run_child("families", "two_devices", "packed", "peak")


@pytest.fixture(scope="module")
def engine():
    return run_child("engine")["engine"]


def test_blocks_come_back_from_host_memory_to_their_devices():
    without, kept = run_child("host_kv")["host_kv"].values()
    assert kept["outputs"] == without["outputs"]
    assert kept["loaded"] > 12 and kept["collectives"] == [[], []]


def expected_collectives(layers, *, ends="down", in_qkv=False):
    """Return the collectives of one step, in order; `ends` is of all layers, or of each."""
    found = ["all-reduce embed"]
    for layer, end in enumerate((ends,) * layers if isinstance(ends, str) else ends):
        inside = [f"layer_{layer}/qkv/norm"] if in_qkv else []
        inside += [f"layer_{layer}/attention_out", f"layer_{layer}/{end}"]
        found += [f"all-reduce {scope}" for scope in inside]
    return [*found, "all-gather logits"]


def test_logits_of_every_kind_of_layer_match_one_device(models, figure):
    assert len(models["families"]) == 16
    for name, one in models["families"].items():
        figure("families", name, "devices", one["difference"])
        assert one["difference"] < 2e-4, (name, one)
        assert one["scale"] > 1.0 and one["same_choice"] == 1.0, (name, one)


def test_step_reduces_twice_per_layer_and_gathers_once(models):
    dense_first = dict.fromkeys(("glm4_moe", "deepseek_v2"), ("down", "experts"))
    for name, one in models["families"].items():
        if name in ("gpt_neox", "phi", "cohere"):  # XLA combines the two sums of a parallel block
            expected = ["all-reduce embed", "all-reduce ", "all-gather logits"]
            assert one["collectives"] == expected, name
            continue
        expected = expected_collectives(
            {"gemma2": 2, "gemma4_moe": 2, "gemma4_shared": 5, **dict.fromkeys(dense_first, 2)}.get(
                name, 1
            ),
            ends={"mixtral": "experts", "gemma4_moe": "experts", **dense_first}.get(name, "down"),
            in_qkv=name == "olmo2",  # its norms of queries and keys are summed together
        )
        assert one["collectives"] == expected, name


def test_two_devices_work_with_an_8_bit_cache(models):
    # A row of the cache is rounded independently, but its values were summed in another order.
    assert models["two_devices"]["difference"] < 2e-3
    assert models["two_devices"]["collectives"] == expected_collectives(1)


def test_matrices_packed_per_shard_are_as_accurate_as_packed_whole(models):
    if models["packed"] is None:
        pytest.skip("no CPU kernels on this machine")
    assert set(models["packed"]) == {"bf16", "int8", "int4"}
    for form, (far_on_one, far_on_several, scale) in models["packed"].items():
        assert 0.0 < far_on_one < 0.3 * scale, form
        assert far_on_several < 1.15 * far_on_one, form


def test_devices_receive_their_shards_and_the_host_holds_one_leaf_more(models):
    peak = models["peak"]
    assert peak["of_a_device"] == [peak["param_bytes"]]
    assert peak["total"] <= peak["peak"] < peak["total"] + 1.3 * peak["largest"]
    assert 1.3 * peak["largest"] < 0.2 * peak["total"]


def test_engine_writes_the_same_tokens_for_all_parameters(engine):
    one, two, four = (engine[shards] for shards in ("1", "2", "4"))
    assert one["tokens"] == two["tokens"] == four["tokens"]
    texts = one["tokens"]
    assert set(texts) == {"greedy", "drawn", "penalized", "structured", "adapted"}
    assert texts["adapted"][0] == texts["greedy"][0] and texts["adapted"][1] != texts["greedy"][1]
    assert len({json.dumps([text[:16] for text in each]) for each in texts.values()}) == len(texts)


def test_prefix_hits_drafts_and_recovery_work(engine):
    assert len({each["cached"] for each in engine.values()}) == 1 and engine["1"]["cached"]
    assert engine["1"]["accepted"] == 0
    assert all(engine[shards]["accepted"] for shards in ("2", "4"))
    assert all(each["recoveries"] for each in engine.values())


def test_engine_pools_the_same_vectors(engine):
    for one, several in zip(engine["1"]["pooled"], engine["4"]["pooled"], strict=True):
        assert several == pytest.approx(one, abs=1e-5)
        assert math.hypot(*several) == pytest.approx(1.0, abs=1e-5)


def test_engine_steps_have_the_expected_collectives(engine):
    for shards, each in engine.items():
        expected = [] if shards == "1" else expected_collectives(each["layers"])
        assert set(each["collectives"]) == {"mixed[64]"}
        assert each["collectives"]["mixed[64]"] == expected, shards


def test_separate_draft_model_uses_one_device(engine):
    assert engine["1"]["drafting"] is None
    assert engine["2"]["drafting"] == {"extend": [], "draft": []}


def test_self_draft_model_is_sharded_like_its_layers(engine):
    drafting, of_pass = engine["4"]["drafting"], expected_collectives(2)
    assert drafting["extend"] == of_pass[:-3], "to the keys and values of the last layer"
    assert drafting["draft"] == 2 * of_pass, "a pass for each of --max-draft-tokens"


def test_fingerprint_depends_on_the_device_count(engine):
    assert [each["settings"] for each in engine.values()] == [None, 2, 4]
    assert len({each["fingerprint"] for each in engine.values()}) == 3
