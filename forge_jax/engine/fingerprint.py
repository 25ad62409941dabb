"""`system_fingerprint`: a short name for everything that decides the bits of a request's logits.

Two engines with the same fingerprint, in the deterministic tier, give the same bits for the same
request. Knows files and versions; what the settings mean is the caller's matter.
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
from forge_jax.errors import CheckpointError
from forge_jax.host.files import file_size

MODEL_FILES = ("*.json", "*.safetensors", "pytorch_model*.bin", "*.jinja")
WHOLE_BYTES = 16 << 20  # of a file that is read whole; of a larger one, samples
NUM_SAMPLES, SAMPLE_BYTES = 256, 4096
ARRAY_BYTES, ARRAY_SAMPLES = 64 << 10, 16  # of a converted folder, where each array is a file
CPU_INFO = Path("/proc/cpuinfo")


def system_fingerprint(folder: Path, device: jax.Device, settings: dict[str, Any]) -> str:
    """ "fp_" and 12 hexadecimal digits.

    Args:
      folder: of the model, or its one file: files count by name, size and content, the content of
        large ones by samples.
      device: what it runs on.
      settings: everything else that decides the bits, as JSON.
    """
    identity = {
        "versions": [forge_jax.__version__, jax.__version__, version("jaxlib")],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "matmul_precision": jax.config.jax_default_matmul_precision,
        "device": [device.platform, device.device_kind, _instructions(device)],
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
        return [(folder.name, folder)]
    files = {file for pattern in MODEL_FILES for file in folder.glob(pattern)}
    return sorted((file.name, file) for file in files if _counts(file, folder))


def _array_files(folder: Path) -> list[tuple[str, Path]]:
    """Of a converted folder, by their paths in it."""
    files = (folder / WEIGHTS).rglob("*")
    found = (file for file in files if not file.is_dir() and _counts(file, folder))
    return sorted((file.relative_to(folder).as_posix(), file) for file in found)


def _counts(file: Path, folder: Path) -> bool:
    """False for what no reader takes: pipes, devices, broken links and files of others."""
    try:
        file_size(file, folder)
    except (CheckpointError, FileNotFoundError):
        return False
    return True


def _file_digest(file: Path, whole_bytes: int, num_samples: int) -> bytes:
    """Of the size and all of a small file; of a large one its head and samples at even distances.

    The header of safetensors and the pickle of a .bin file are at the head, so a changed name,
    shape or type is always seen; so are the header and tokenizer of GGUF.
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


def _instructions(device: jax.Device) -> str:
    """What XLA:CPU compiles for: another set of instructions sums in another order."""
    if device.platform != "cpu":
        return ""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = ("model name", "flags", "Features")  # Features: on Arm
    return "\n".join(next((line for line in lines if line.startswith(name)), "") for name in names)
