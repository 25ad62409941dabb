"""`system_fingerprint`: a short hash of everything that determines the bits of a request's logits.

In the deterministic tier, two engines with the same fingerprint compute the same bits for the same
request. This module handles files and versions. The caller supplies the settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import forge_jax
from forge_jax.checkpoint.converted import WEIGHTS
from forge_jax.checkpoint.gguf.split import part_files
from forge_jax.errors import CheckpointError
from forge_jax.host.files import file_size

MODEL_FILES = ("*.json", "*.safetensors", "pytorch_model*.bin", "*.jinja")
WHOLE_BYTES = 16 << 20  # limit for hashing a whole file; larger ones are sampled
NUM_SAMPLES, SAMPLE_BYTES = 256, 4096
ARRAY_BYTES, ARRAY_SAMPLES = 64 << 10, 16  # for converted folders, where each array is a file
CPU_INFO = Path("/proc/cpuinfo")


def system_fingerprint(folder: Path, device: jax.Device, settings: dict[str, Any]) -> str:
    """Return the fingerprint: "fp_" and 12 hexadecimal digits.

    Args:
      folder: the model's folder, its only file, or its first part. Files count by name, size and
        content; the content of large files is sampled.
      device: the device that the model runs on.
      settings: everything else that determines the bits, JSON-serializable.
    """
    identity = {
        "versions": [forge_jax.__version__, jax.__version__, version("jaxlib")],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "matmul_precision": jax.config.jax_default_matmul_precision,
        "device": [device.platform, device.device_kind, cpu_instructions(device)],
        "settings": settings,
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    for name, file in _model_files(folder):
        digest.update(name.encode() + _file_digest(file, WHOLE_BYTES, NUM_SAMPLES))
    for name, file in _array_files(folder):
        digest.update(name.encode() + _file_digest(file, ARRAY_BYTES, ARRAY_SAMPLES))
    return f"fp_{digest.hexdigest()[:12]}"


def _model_files(folder: Path) -> list[tuple[str, Path]]:
    if folder.is_file():
        return [(file.name, file) for file in part_files(folder) if file.exists()]
    files = {file for pattern in MODEL_FILES for file in folder.glob(pattern)}
    return sorted((file.name, file) for file in files if _counts(file, folder))


def _array_files(folder: Path) -> list[tuple[str, Path]]:
    """Return the arrays of a converted folder, with their paths in it."""
    files = (folder / WEIGHTS).rglob("*")
    found = (file for file in files if not file.is_dir() and _counts(file, folder))
    return sorted((file.relative_to(folder).as_posix(), file) for file in found)


def _counts(file: Path, folder: Path) -> bool:
    """Return False for files that readers ignore: pipes, devices, broken links, links out of it."""
    try:
        file_size(file, folder)
    except (CheckpointError, FileNotFoundError):
        return False
    return True


def _file_digest(file: Path, whole_bytes: int, num_samples: int) -> bytes:
    """Hash a file's size and content. A large file's head and evenly spaced samples are hashed.

    The headers of safetensors, GGUF (with its tokenizer) and .bin pickles are at the head. Changed
    names, shapes or types are therefore always detected.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(whole_bytes))
        if size > whole_bytes:
            for i in range(1, num_samples + 1):
                stream.seek(i * (size - SAMPLE_BYTES) // num_samples)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.digest()


def cpu_instructions(device: jax.Device) -> str:
    """Return the instruction set that XLA:CPU targets: it determines the order of sums."""
    if device.platform != "cpu":
        return ""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = ("model name", "flags", "Features")  # Features: on Arm
    return "\n".join(next((line for line in lines if line.startswith(name)), "") for name in names)
