"""Steering vectors and returned activations of a model on two devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import virtual_devices

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = f"{virtual_devices(2)} --xla_backend_optimization_level=0"


def test_steering_and_activations_match_one_device():
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "research_child.py"],
        env=os.environ | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["differences"]) == 3 * 5
    assert max(found["differences"].values()) < 2e-4, found["differences"]
    assert "layers.0.attn.q, which tensor parallelism divides" in found["rejected"]
