"""Ray Data with the bundled model, and the tests of Ray Serve in forge-jax's environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, environment

ROWS = [
    {"id": 1, "prompt": "Once upon a time"},
    {"id": 2, "prompt": "The capital of France is"},
    {"id": 3, "prompt": "A cat"},
]


@pytest.mark.timeout(300)
def test_ray_data_set_runs_through_an_engine_actor(request, tmp_path):
    python = request.config.getoption("--server-python")
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = [python, str(ROOT / "examples/ray_batch.py"), str(source), str(out), "forge-tiny"]
    # Ray starts the processes of its actors with the same path.
    env = {**environment(python), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for file in Path(out).iterdir() for line in file.read_text().splitlines()]
    found = {row["id"]: row for row in map(json.loads, lines)}
    assert {i: row["prompt"] for i, row in found.items()} == {r["id"]: r["prompt"] for r in ROWS}
    for row in found.values():
        assert row["output"].strip() and row["finish_reason"] in ("stop", "length")


@pytest.mark.timeout(600)
def test_ray_serve_runs_on_a_local_cluster(request):
    python = request.config.getoption("--server-python")
    file = "tests/clients/in_process/test_ray_serve.py"
    command = [python, "-m", "pytest", "--noconftest", "-c", "tests/clients/pytest.ini", file]
    env = {**environment(python), "RAY_USAGE_STATS_ENABLED": "0"}
    path = os.pathsep.join([*(str(ROOT / part) for part in ("kernels", "serve")), str(ROOT)])
    env["PYTHONPATH"] = os.pathsep.join([path, env["PYTHONPATH"]])
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout
