"""One model on four devices against the same on one, in a process that has four."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).parent / "child.py"


@pytest.fixture(scope="module")
def found():
    """What the child process found, by part."""
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, CHILD], env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_logits_of_every_kind_of_layer_are_those_of_one_device(found):
    for name, one in found["families"].items():
        assert one["difference"] < 2e-4, (name, one)
        assert one["scale"] > 0.1 and one["same_choice"] == 1.0, (name, one)


def test_two_devices_and_a_cache_in_8_bits(found):
    assert found["narrower"]["two"] < 2e-4
    # A row of the cache is rounded by itself, but what it holds has been added up differently.
    assert found["narrower"]["int8_kv"]["difference"] < 2e-2


def test_packed_matrices_are_packed_shard_by_shard(found):
    packed = found["packed"]
    if packed is None:
        pytest.skip("no CPU kernels on this machine")
    for name, one in packed.items():
        assert one["difference"] < 0.05 * one["scale"], (name, one)


def test_an_engine_writes_the_same_texts(found):
    one, several = (found["engine"][shards] for shards in ("1", "4"))
    assert one["tokens"] == several["tokens"]
    assert len(one["tokens"]["0.0"]) == 3 and one["tokens"]["0.0"] != one["tokens"]["1.0"]
    assert several["pooled"] == [pytest.approx(vector, abs=1e-4) for vector in one["pooled"]]
    assert (one["settings"], several["settings"]) == (None, 4)


def test_a_step_adds_up_twice_a_layer_and_gathers_once(found):
    one, several = (found["engine"][shards] for shards in ("1", "4"))
    assert all(not counts for counts in one["collectives"].values())
    expected = {"all-reduce": 2 * several["layers"] + 1, "all-gather": 1}
    assert several["collectives"]
    for name, counts in several["collectives"].items():
        assert counts == expected, name


def test_each_device_is_given_its_shards_and_the_host_holds_one_leaf_more(found):
    peak = found["peak"]
    assert peak["of_a_device"] == [peak["param_bytes"]]
    assert peak["total"] <= peak["peak"] < peak["total"] + 1.3 * peak["largest"]
