"""The checks of the machine, the packages and JAX, and the findings."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import forge_jax
from forge_jax.telemetry.units import bytes_text
from forge_jax.tools.doctor import machine, packages
from forge_jax.tools.doctor.issue import Issue

LAST_LINES = 3  # last lines of a failed probe's stderr


@dataclass(frozen=True)
class Report:
    """Facts for a bug report, and issues to fix."""

    facts: dict[str, Any]
    issues: list[Issue]

    @property
    def ok(self) -> bool:
        return not any(issue.level == "problem" for issue in self.issues)

    def as_json(self) -> dict[str, Any]:
        return {
            **self.facts,
            "findings": [dataclasses.asdict(issue) for issue in self.issues],
        }


@dataclass(frozen=True)
class _Probed:
    """The output of a probe, and how it ended."""

    facts: dict[str, Any]
    fault: str | None = None
    said: str = ""  # the last lines on stderr


def examine(model: str | None = None, *, timeout_s: float = 60.0) -> Report:
    """Examine this installation, and optionally a model, without downloading anything.

    Args:
      timeout_s: the time limit in seconds of each part that runs in a separate process.
    """
    with ThreadPoolExecutor(3) as probes:
        asked = {
            "devices": probes.submit(
                _probe, timeout_s, "devices", XLA_PYTHON_CLIENT_PREALLOCATE="false"
            ),
            "kernels": probes.submit(_probe, timeout_s, "kernels", JAX_PLATFORMS="cpu"),
        }
        if model is not None:
            asked["model"] = probes.submit(
                _probe, timeout_s, "model", model, JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1"
            )
        versions, nvidia, caches = packages.installed(), machine.nvidia(), machine.caches()
        probed = {name: future.result() for name, future in asked.items()}
    host, limits = machine.host(), machine.limits()
    facts = {
        "forge-jax": forge_jax.__version__,
        **host,
        "packages": versions,
        "nvidia": dataclasses.asdict(nvidia),
        **probed["devices"].facts,
        "cpu_kernels": probed["kernels"].facts,
        "caches": [dataclasses.asdict(cache) for cache in caches],
        "limits": limits,
        "environment": machine.environment(),
    }
    issues = [
        *packages.faults(versions),
        *_device_faults(nvidia, versions, probed["devices"]),
        *_kernel_faults(probed["kernels"], nvidia),
        *machine.cache_faults(caches),
        *machine.limit_faults(limits),
    ]
    if model is not None:
        facts["model"] = {"name": model, **probed["model"].facts}
        issues += _model_faults(model, probed["model"], facts)
    return Report(facts, issues)


def _probe(timeout_s: float, *arguments: str, **variables: str) -> _Probed:
    """Run a part of `probe` in a process, and return its failure instead of raising."""
    command = [sys.executable, "-m", "forge_jax.tools.doctor.probe", *arguments]
    what = {"devices": "JAX", "kernels": "the CPU kernels", "model": "the model"}[arguments[0]]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **variables},
        start_new_session=True,  # so that a compiler it has started is also killed
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
            fault = f"the check of {what} ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            out, err = process.communicate()
            fault = f"the check of {what} did not finish in {timeout_s:g} s"
    facts: dict[str, Any] = {}
    for line in out.splitlines():
        try:
            facts |= json.loads(line)
        except (ValueError, TypeError):
            continue  # printed by other code
    said = " ".join(machine.tilde(line.strip()) for line in err.splitlines()[-LAST_LINES:])
    return _Probed(facts, fault if process.returncode else None, said)


def _device_faults(
    nvidia: machine.Nvidia, versions: dict[str, str], probed: _Probed
) -> Iterator[Issue]:
    plugins = packages.cuda_plugins(versions)
    if nvidia.smi_fault is not None:
        yield Issue(
            "problem", nvidia.smi_fault, "repair NVIDIA's driver, or reboot after an update"
        )
    if nvidia.present and not plugins:
        yield Issue(
            "problem",
            "there is an NVIDIA GPU, but JAX's plugin for it is not installed: CPU only",
            packages.INSTALL_CUDA,
        )
    driver_cuda = probed.facts.get("driver_cuda")
    for major in plugins:
        if driver_cuda is not None and int(driver_cuda.split(".")[0]) < major:
            yield Issue(
                "problem",
                f"NVIDIA's driver is for CUDA {driver_cuda}, but jax-cuda{major}-plugin needs "
                f"CUDA {major}",
                f"install a newer driver, or jax[cuda{driver_cuda.split('.')[0]}] instead",
            )
    if probed.fault is not None:
        yield Issue(
            "problem",
            f"{probed.fault}{_quoted(probed)}",
            "if a GPU hangs, reboot or repair the driver, or use --backend cpu"
            if nvidia.present
            else f"recreate the environment: {packages.INSTALL}",
        )
        return
    on_gpu = [device for device in probed.facts["devices"] if device["platform"] != "cpu"]
    if nvidia.present and plugins and not on_gpu:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is {hidden!r})"
        chosen = os.environ.get("JAX_PLATFORMS")
        why += "" if chosen is None else f" (JAX_PLATFORMS is {chosen!r})"
        yield Issue(
            "problem",
            f"there is an NVIDIA GPU, but JAX does not see it{why}{_quoted(probed)}",
            "check the versions above, CUDA_VISIBLE_DEVICES, JAX_PLATFORMS and LD_LIBRARY_PATH, "
            "which may select another CUDA",
        )
    if not nvidia.present and not on_gpu:
        yield Issue("note", "there is no NVIDIA GPU: models run on the CPU", "nothing to do")


def _kernel_faults(probed: _Probed, nvidia: machine.Nvidia) -> Iterator[Issue]:
    if probed.fault is not None:
        yield Issue("problem", f"{probed.fault}{_quoted(probed)}", packages.INSTALL)
    elif not probed.facts["built"]:
        loss = "plain XLA runs bfloat16 models about half as fast"
        yield Issue(
            "note",
            f"no C++ kernels for the CPU ({loss}): {probed.facts['fault']}",
            "install g++" if "compiler" not in probed.facts else "see the compiler's output",
        )


def _model_faults(name: str, probed: _Probed, facts: dict[str, Any]) -> Iterator[Issue]:
    if probed.fault is not None:
        yield Issue("problem", f"{probed.fault}{_quoted(probed)}", "run serve with --debug")
        return
    fault = probed.facts.get("fault")
    if fault is not None:
        if "is not in the cache and" in fault:
            what = f"{name} is not downloaded yet, so it cannot be checked"
            yield Issue("note", what, f"forge-jax serve {name} downloads it")
        else:
            yield Issue("problem", f"{name}: {fault}", "see above, or use another model")
        return
    weights = probed.facts["weights_bytes"]
    device = facts.get("devices", [{}])[0]
    room = device.get("memory_bytes")
    if room is None:
        room, where = facts["memory_available_bytes"], "this machine has free"
    else:
        room, where = room - device["memory_used_bytes"], f"{device['kind']} has free"
    if weights > room:
        yield Issue(
            "problem",
            f"the weights of {name} take {bytes_text(weights)}, but {where} {bytes_text(room)}",
            "quantize them (--quantization int8 or int4), free memory, or use a smaller model",
        )
    state = probed.facts["state_bytes"]
    if state:
        what = f"{name} keeps {bytes_text(state)} of state per sequence: prefix caching is off"
        yield Issue("note", what, "lower --max-num-seqs to allocate less")


def _quoted(probed: _Probed) -> str:
    return f": {probed.said}" if probed.said else ""
