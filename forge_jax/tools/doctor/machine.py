"""Facts about the machine from files and small commands, without jax."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_jax.engine.compile_cache import default_cache_folder, is_url
from forge_jax.telemetry.memory import host_bytes
from forge_jax.tools.doctor.issue import Issue
from forge_kernels.private_files import private_folder_fault

CPU_INFO = Path("/proc/cpuinfo")
PROC_DRIVER = Path("/proc/driver/nvidia")
MAX_FILES_COUNTED = 100_000
LITTLE_DISK_BYTES = 1 << 30
FEW_FILES = 4096  # each connection is an open file
SMI_S = 10.0
SMI_FIELDS = ("name", "driver_version", "memory.total", "memory.used", "compute_cap")
# Variables that affect JAX, XLA, CUDA and Hugging Face. The values of secrets are not shown.
VARIABLES = re.compile(
    r"(JAX|XLA|TF_XLA|CUDA|NVIDIA|NCCL|HF|OMP)_.*|LD_LIBRARY_PATH|LD_PRELOAD|TF_CPP_MIN_LOG_LEVEL"
    r"|XDG_CACHE_HOME|CXX|(HTTPS?|NO|https?|no)_(PROXY|proxy)"
)
INSTRUCTION_SETS = (
    "avx2 fma f16c avx_vnni avx_vnni_int8 avx512f avx512_vnni avx512_bf16 avx512_fp16 "
    "amx_tile amx_int8 amx_bf16 amx_fp16 asimd asimdhp asimddp bf16 i8mm sve sve2 sme"
).split()
SECRETS = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PROXY", re.IGNORECASE)


def host() -> dict[str, Any]:
    available, total = host_bytes()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": total,
        "memory_available_bytes": available,
    }


def environment() -> dict[str, str]:
    """Return the relevant environment variables, with "(set)" for secrets."""
    return {
        name: "(set)" if SECRETS.search(name) else tilde(value)
        for name, value in sorted(os.environ.items())
        if VARIABLES.fullmatch(name)
    }


def limits() -> dict[str, int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"open_files": soft, "open_files_at_most": hard}


def limit_faults(found: dict[str, int]) -> Iterator[Issue]:
    most = found["open_files_at_most"]
    if most != resource.RLIM_INFINITY and most < FEW_FILES:
        yield Issue(
            "note",
            f"a process may have only {most} open files, and each connection is one",
            f"set ulimit -Hn {FEW_FILES * 16}, or LimitNOFILE= of the service",
        )


@dataclass(frozen=True)
class Nvidia:
    """NVIDIA GPUs according to the driver and nvidia-smi, without JAX."""

    driver: str | None = None  # version of the kernel module
    gpus: list[dict[str, str]] = field(default_factory=list)  # from nvidia-smi
    smi_fault: str | None = None

    @property
    def present(self) -> bool:
        return self.driver is not None or bool(self.gpus)


def nvidia(proc_driver: Path = PROC_DRIVER) -> Nvidia:
    driver = None
    try:
        text = (proc_driver / "version").read_text(errors="replace")
    except OSError:
        pass  # no such driver
    else:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)*)\s", text)
        driver = found[1] if found else "of an unknown version"
    gpus, fault = _smi()
    return Nvidia(driver, gpus, fault)


def _smi() -> tuple[list[dict[str, str]], str | None]:
    """Return the GPUs, and the error of nvidia-smi if it fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return [], None
    asked = [command, f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            asked, capture_output=True, text=True, errors="replace", timeout=SMI_S
        )
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not answer in {SMI_S:.0f} s"
    except OSError as error:
        return [], f"nvidia-smi cannot be run: {error.strerror}"
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())
        return [], f"nvidia-smi failed: {said[:200]}"
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(SMI_FIELDS, row, strict=False)) for row in rows], None


@dataclass(frozen=True)
class Cache:
    """A cache folder, which must be writable."""

    name: str
    path: str
    num_bytes: int | None = None  # None if there are too many files to count
    free_bytes: int | None = None
    fault: str | None = None  # why it cannot be used


def caches() -> list[Cache]:
    from huggingface_hub import constants

    from_jax = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    compiled = None if is_url(from_jax) else Path(from_jax or default_cache_folder())
    kernels = default_cache_folder().parent / "kernels"
    return [
        *([_cache("compiled executables", compiled, private=True)] if compiled else []),
        _cache("CPU kernels", kernels, private=True),
        _cache("Hugging Face models", Path(constants.HF_HUB_CACHE), private=False),
    ]


def cache_faults(found: list[Cache]) -> Iterator[Issue]:
    for cache in found:
        if cache.fault is not None:
            what = f"the cache of {cache.name}, {cache.path}, cannot be used: {cache.fault}"
            named = {
                "compiled executables": "repair it, or set --compile-cache to another folder",
                "Hugging Face models": "repair it, or set HF_HOME to another folder",
            }
            remedy = named.get(cache.name, "repair it, or set XDG_CACHE_HOME to another folder")
            yield Issue("problem", what, remedy)
        elif cache.free_bytes is not None and cache.free_bytes < LITTLE_DISK_BYTES:
            mib = cache.free_bytes >> 20
            yield Issue("note", f"{cache.path} has only {mib} MiB free", "free disk space there")


def _cache(name: str, folder: Path, *, private: bool) -> Cache:
    fault = private_folder_fault(folder) if private else None
    try:
        if fault is None:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x")
                file.flush()
    except OSError as error:
        fault = error.strerror or str(error)
    if fault is not None:
        return Cache(name, tilde(str(folder)), fault=fault)
    return Cache(name, tilde(str(folder)), _size(folder), shutil.disk_usage(folder).free)


def _size(folder: Path) -> int | None:
    total = 0
    for count, (base, _, files) in enumerate(os.walk(folder)):
        if count + len(files) > MAX_FILES_COUNTED:
            return None
        for file in files:
            try:
                status = os.lstat(os.path.join(base, file))
            except OSError:
                continue  # removed in the meantime
            total += status.st_size
    return total


def tilde(text: str) -> str:
    """Return the text with "~" for the home folder, which contains the user's name."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


def cpu_model() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """Return the CPU's instruction sets for fast matrix products, by Linux's names.

    x86 lists them as "flags", Arm as "Features". The result is empty on other systems.
    """
    found = f"{_cpu_info('flags')} {_cpu_info('Features')}".split()
    return [name for name in INSTRUCTION_SETS if name in found]


def _cpu_info(name: str) -> str:
    """Return the first value of this name in /proc/cpuinfo, or "" if there is none."""
    try:
        for line in CPU_INFO.read_text().splitlines():
            if line.partition(":")[0].strip() == name:
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return ""
