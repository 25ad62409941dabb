"""`forge-jax doctor`: its report on a sound installation, and the faults that it detects."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge_jax.tools.doctor import checks as examination
from forge_jax.tools.doctor import machine, packages
from forge_jax.tools.doctor.checks import _device_faults, _Probed
from forge_jax.tools.doctor.issue import Issue
from forge_kernels.private_files import private_folder_fault
from forge_serve.cli import main as cli
from forge_serve.cli.commands.doctor import _kernels as kernels_line

FORGE = [sys.executable, "-W", "error", "-m", "forge_serve.cli.main", "doctor"]
JAX = importlib.metadata.version("jax")
PACKAGES = {"forge-jax": "0", "jax": JAX, "jaxlib": JAX}
GPU = machine.Nvidia(driver="580.65.06", gpus=[{"name": "NVIDIA H200"}])
DRIVER_LINE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (builder)\n"
    "GCC version:  gcc version 13.3.0\n"
)


def doctor(*arguments: str, **variables: str) -> tuple[int, dict[str, Any], str]:
    """Return exit status, report and stderr of a real process."""
    done = subprocess.run(
        [*FORGE, "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **variables},
    )
    return done.returncode, json.loads(done.stdout), done.stderr


def found(report: dict[str, Any], *parts: str) -> dict[str, str]:
    """Return the one finding that contains all of these parts."""
    [issue] = [f for f in report["findings"] if all(part in f["what"] for part in parts)]
    return issue


def planted(folder: Path, name: str, version: str) -> None:
    """Make a package appear installed to processes with the folder in their path."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def on_path(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.slow
def test_sound_installation_and_fitting_model_pass(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.setenv("CXX", "no-such-compiler")  # so that none is built, which is no problem
    report = examination.examine("forge-tiny")
    problems = [f for f in report.issues if f.level == "problem"]
    if packages.cuda_plugins(packages.installed()) or machine.nvidia().present:
        pytest.skip("there is something about GPUs here, whose faults are not ours")
    assert problems == [] and report.ok
    facts = report.as_json()
    assert facts["packages"]["jax"] == JAX and facts["packages"]["forge-jax"]
    assert facts["devices"][0]["platform"] == "cpu"
    assert facts["model"]["architecture"] == "LlamaForCausalLM"
    assert 0 < facts["model"]["weights_bytes"] < 50e6
    assert facts["environment"]["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"
    assert facts["environment"]["HF_TOKEN"] == "(set)"
    assert "hf_secret" not in json.dumps(facts)

    # The same facts as text, and a machine that is too small for the model.
    monkeypatch.setattr("forge_jax.tools.doctor.examine", lambda *_, **__: report)
    assert cli.main(["doctor", "forge-tiny"]) == 0
    text = capsys.readouterr().out
    assert "model: forge-tiny, LlamaForCausalLM, bfloat16" in text
    assert text.endswith("no problem found\n")
    little = {**facts, "memory_available_bytes": 1_000_000}
    [fault] = examination._model_faults("forge-tiny", _Probed(facts["model"]), little)
    assert fault.level == "problem" and "this machine has free 1.0 MB" in fault.what


@pytest.mark.slow
def test_planted_faults_are_found_in_a_real_process(tmp_path):
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    commands = tmp_path / "bin"
    commands.mkdir()
    smi = commands / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.65.06, 143771 MiB, 4 MiB, 9.0'\n")
    smi.chmod(0o755)
    planted(tmp_path, "jax-cuda13-plugin", "0.11.1")
    planted(tmp_path, "jax-cuda12-plugin", JAX)
    planted(tmp_path, "jax-cuda12-pjrt", "0.10.0")
    planted(tmp_path, "aiohttp", "3.1.0")
    status, report, _ = doctor(
        "nowhere/at-all",
        PYTHONPATH=on_path(tmp_path),
        PATH=os.pathsep.join([str(commands), os.environ["PATH"]]),
        XDG_CACHE_HOME=str(blocked),
        HF_HOME=str(blocked / "hub"),
        CXX="no-such-compiler",
        CUDA_VISIBLE_DEVICES="",
    )
    assert status == 1
    assert report["nvidia"]["gpus"][0]["name"] == "NVIDIA H200"
    for parts in (
        ("jax-cuda13-plugin is 0.11.1 and jaxlib", "versions must match"),
        ("jax-cuda13-pjrt not installed",),
        ("jax-cuda12-pjrt 0.10.0",),
        ("plugins for CUDA 12 and 13 are both installed",),
        ("aiohttp is 3.1.0, but forge-jax needs >=3.14.1",),
        ("there is an NVIDIA GPU, but JAX does not see it", "CUDA_VISIBLE_DEVICES is ''"),
        ("the cache of compiled executables", "Not a directory"),
        ("the cache of CPU kernels", "Not a directory"),
        ("the cache of Hugging Face models", "Not a directory"),
    ):
        issue = found(report, *parts)
        assert issue["level"] == "problem" and issue["remedy"]
    assert found(report, "no C++ kernels", "no C++ compiler")["level"] == "note"
    assert found(report, "nowhere/at-all: ", "could not be downloaded")["level"] == "problem"


@pytest.mark.slow
def test_uncached_model_is_not_downloaded():
    probed = examination._probe(60.0, "model", "nowhere/at-all", HF_HUB_OFFLINE="1")
    [note] = examination._model_faults("nowhere/at-all", probed, {})
    assert note.level == "note" and "is not downloaded yet" in note.what


@pytest.mark.slow
def test_hanging_check_times_out(tmp_path):
    """A plugin hangs while JAX looks for devices; earlier output is kept."""
    plugin = tmp_path / "jax_plugins" / "hangs"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(
        'import time\ndef initialize():\n    print(\'{"driver_cuda": "13.0"}\', flush=True)\n'
        "    time.sleep(1000)\n"
    )
    probed = examination._probe(5.0, "devices", PYTHONPATH=on_path(tmp_path))
    assert probed.fault == "the check of JAX did not finish in 5 s"
    assert probed.facts == {"driver_cuda": "13.0"}
    [fault] = _device_faults(machine.Nvidia(), PACKAGES, probed)
    assert fault.level == "problem" and fault.what.startswith(probed.fault)


def test_unimportable_jax_is_quoted(tmp_path):
    (tmp_path / "jaxlib").mkdir()
    (tmp_path / "jaxlib" / "__init__.py").write_text("raise ImportError('GLIBC_2.99 not found')")
    status, report, _ = doctor(PYTHONPATH=on_path(tmp_path))
    assert status == 1
    issue = found(report, "the check of JAX ended with status 1", "GLIBC_2.99 not found")
    assert issue["level"] == "problem"


def test_gpu_without_plugin_or_recent_driver_is_reported(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cpu = _Probed({"devices": [{"platform": "cpu"}]})
    [fault] = _device_faults(GPU, PACKAGES, cpu)
    assert "plugin for it is not installed" in fault.what and "cuda13" in fault.remedy

    cuda = {**PACKAGES, "jax-cuda13-plugin": JAX, "jax-cuda13-pjrt": JAX}
    assert list(packages.faults({**packages.installed(), **cuda})) == []
    old = _Probed({"driver_cuda": "12.4", "devices": [{"platform": "cpu"}]})
    too_old, unseen = _device_faults(GPU, cuda, old)
    assert "driver is for CUDA 12.4, but jax-cuda13-plugin needs CUDA 13" in too_old.what
    assert "JAX does not see it" in unseen.what
    seen = _Probed({"driver_cuda": "13.0", "devices": [{"platform": "gpu"}]})
    assert list(_device_faults(GPU, cuda, seen)) == []


def test_missing_or_mismatched_packages_are_reported():
    versions = packages.installed()
    assert list(packages.faults(versions)) == []
    without = {name: v for name, v in versions.items() if name != "msgspec"}
    assert [f.what for f in packages.faults(without)] == ["msgspec is not installed"]
    other = [f.what for f in packages.faults({**versions, "jaxlib": "0.11.99"})]
    assert other == [f"jax is {versions['jax']} and jaxlib 0.11.99: versions must match"]


def test_driver_version_is_read_from_the_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.nvidia(tmp_path / "none") == machine.Nvidia()
    (tmp_path / "version").write_text(DRIVER_LINE)
    assert machine.nvidia(tmp_path) == machine.Nvidia(driver="580.65.06")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'Driver/library version mismatch'\nexit 18\n")
    smi.chmod(0o755)
    failed = machine.nvidia(tmp_path)
    assert failed.smi_fault == "nvidia-smi failed: Driver/library version mismatch"
    [fault, *_] = _device_faults(failed, PACKAGES, _Probed({"devices": []}))
    assert fault.what == failed.smi_fault


def test_cache_folder_writable_by_others_is_reported(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    assert "others can write to it" in str(private_folder_fault(folder))
    cache = machine._cache("compiled executables", folder, private=True)
    [fault] = machine.cache_faults([cache])
    assert fault.level == "problem" and "--compile-cache" in fault.remedy
    folder.chmod(0o700)
    (folder / "one").write_bytes(b"x" * 1000)
    ok = machine._cache("compiled executables", folder, private=True)
    assert ok.fault is None and ok.num_bytes == 1000
    assert list(folder.iterdir()) == [folder / "one"], "nothing is left behind"
    assert not [f for f in machine.cache_faults([ok]) if f.level == "problem"]


def test_low_open_file_limit_is_reported():
    few = {"open_files": 256, "open_files_at_most": 1024}
    [note] = machine.limit_faults(few)
    assert isinstance(note, Issue) and note.level == "note" and "only 1024 open files" in note.what


def test_invalid_timeout_fails_with_one_line(capsys):
    assert cli.main(["doctor", "--timeout", "0"]) == 1
    assert capsys.readouterr().err == (
        "forge-jax: error: --timeout must be greater than 0, not 0.0\n"
    )


def test_instruction_set_is_shown_with_its_measurement():
    chosen = "avx512_bf16 (bfloat16 products, GFLOP/s of a core: avx512_bf16 232, avx512_vnni 115)"
    facts = {"built": True, "instruction_set": "avx512_bf16", "chosen": chosen, "compiler": "c++"}
    assert kernels_line(facts) == f"built, {chosen}, c++"
    assert kernels_line({"built": False, "compiler": "c++"}) == "not built, c++"
