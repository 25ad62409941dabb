"""The commands of contributors and of CI: `make`, `.ci/run` and the workflows."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
CHECKS = {
    "lint": ["lint"],
    "tests": ["test-all"],
    "kubernetes": [".venv/.kubernetes", "test-kubernetes"],
    "site": ["site"],
    "browser": [".venv-browser/.driver", "test-browser"],
    "cuda-compile": [".venv-aot/.aot", "test-cuda-compile ARGS=--quick"],
}


@pytest.fixture
def run_ci(tmp_path):
    """Run `.ci/run` with a `make` that records its arguments and fails for some targets.

    `before` is shell code that each target runs before it ends.
    """

    def run(
        *checks: str, failing: str = "-", before: str = ""
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        log = tmp_path / "log"
        log.write_text("")
        make = tmp_path / "make"
        make.write_text(
            f'#!/bin/sh\necho "$*" >> {log}\necho "output of $1"\n'
            f'case " {failing} " in *" $1 "*) echo "ERROR: no network"; exit 1;; esac\n{before}\n'
        )
        make.chmod(0o755)
        env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        command = ["bash", str(ROOT / ".ci" / "run"), *checks]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        return done, log.read_text().splitlines()

    return run


def targets_of(*checks):
    return [target for check in checks for target in CHECKS[check]]


def test_ci_runs_every_check_by_default(run_ci):
    done, targets = run_ci()
    assert done.returncode == 0
    assert targets[:2] == ["lint", "test-all"]
    # `cuda-compile` runs at the same time as the other three, which keep their order.
    compiled = [target for target in targets if target in CHECKS["cuda-compile"]]
    assert compiled == CHECKS["cuda-compile"]
    others = [target for target in targets[2:] if target not in compiled]
    assert others == targets_of("kubernetes", "site", "browser")


def test_ci_compiles_for_gpus_during_other_checks(run_ci, tmp_path):
    # Each of the two ends only once the other one has begun.
    both = (
        f'touch {tmp_path}/began-"$1"; case "$1" in site) other=test-cuda-compile;; '
        "test-cuda-compile) other=site;; *) exit 0;; esac\n"
        f"for i in $(seq 200); do [ ! -e {tmp_path}/began-$other ] || exit 0; sleep 0.1; done\n"
        "exit 1"
    )
    done, targets = run_ci("cuda-compile", "site", before=both)
    assert done.returncode == 0, done.stderr
    assert sorted(targets) == sorted(targets_of("cuda-compile", "site"))
    # Its output is in one piece.
    assert done.stdout.splitlines() == ["output of site", "output of test-cuda-compile"]


@pytest.mark.parametrize("failing", ["site", "test-cuda-compile", "site test-cuda-compile"])
def test_ci_reports_checks_that_run_during_a_failed_one(run_ci, failing):
    done, targets = run_ci("cuda-compile", "site", "browser", failing=failing)
    assert done.returncode == 1
    assert sorted(targets) == sorted(targets_of("cuda-compile", "site", "browser"))
    assert all(f"output of {name}" in done.stdout for name in ("site", "test-cuda-compile"))
    assert done.stderr == f"failed: {failing.replace('test-', '')}\n"


@pytest.mark.parametrize("check", CHECKS)
def test_ci_runs_a_check_by_name(run_ci, check):
    done, targets = run_ci(check)
    assert (done.returncode, targets) == (0, CHECKS[check])


def test_ci_stops_at_the_first_check_that_fails(run_ci):
    done, targets = run_ci(failing="test-all")
    assert done.returncode == 1 and targets == ["lint", "test-all"]


def test_ci_names_what_it_leaves_out_and_why(run_ci):
    done, targets = run_ci("browser", "lint", failing=".venv-browser/.driver")
    assert (done.returncode, targets) == (0, [".venv-browser/.driver", "lint"])
    assert "skipped: test-browser" in done.stdout and "ERROR: no network" in done.stdout


def test_ci_rejects_an_unknown_check_before_it_runs_anything(run_ci):
    done, targets = run_ci("lint", "linting")
    assert (done.returncode, targets) == (2, [])
    assert "no such check: linting; choose from: lint tests kubernetes site" in done.stderr


def test_workflow_runs_every_check_on_the_pinned_python():
    job = WORKFLOW["jobs"]["check"]
    assert job["strategy"]["matrix"]["check"] == list(CHECKS)
    *actions, run = job["steps"]
    assert run["run"] == "bash .ci/run ${{ matrix.check }}"
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action["uses"]) for action in actions)
    (python,) = (action["with"] for action in actions if "setup-python" in action["uses"])
    assert (ROOT / python["python-version-file"]).is_file() and python["cache"] == "pip"
    assert all((ROOT / file).is_file() for file in python["cache-dependency-path"].split())


@pytest.mark.parametrize("form", ["bug.yml", "model.yml"])
def test_issue_form_requests_the_output_of_doctor(form):
    body = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / form).read_text())["body"]
    asked = [item for item in body if "forge-jax doctor" in str(item["attributes"].get("label"))]
    assert asked and asked[0]["validations"]["required"]


def test_bare_make_lists_every_target():
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = re.findall(r"^make ([\w-]+) +\S", done.stdout, re.MULTILINE)
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed and sorted(listed) == sorted(phony.split())
