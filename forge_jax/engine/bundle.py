"""The identity of an engine's executables, and the choice of stored ones by it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import forge_jax
import forge_kernels
from forge_jax.engine.compile_cache import is_url
from forge_jax.engine.fingerprint import cpu_instructions
from forge_jax.errors import ConfigError
from forge_jax.models.plugins import code_digest
from forge_jax.step.bundle import Bundle, BundleError, is_bundle
from forge_jax.step.saved import SavedExecutables
from forge_kernels import cpu

if TYPE_CHECKING:
    from forge_jax.config import EngineConfig
    from forge_jax.engine.builder import Design
    from forge_jax.models.decoder import Model
    from forge_jax.step.options import RunnerOptions

PLUGINS = ("jax-cuda13-pjrt", "jax-cuda12-pjrt")  # XLA's compiler for GPUs
SAVED = "saved"  # folder in the compile cache
JAX_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision")
DIGITS = 32  # length of a folder's name
FAST_COMPILES = "jax_disable_most_optimizations"

log = logging.getLogger(__name__)


def bundle_folder(config: EngineConfig) -> Path | None:
    """Return the folder of `--compile-cache` if it is a bundle."""
    named = config.parallel.compile_cache_dir
    return Path(named) if named is not None and is_bundle(Path(named)) else None


def with_blocks(config: EngineConfig, num_blocks: int) -> EngineConfig:
    """Return the configuration with so many blocks, unless a bundle determines their number."""
    if config.cache.num_blocks is not None or bundle_folder(config) is not None:
        return config
    cache = dataclasses.replace(config.cache, num_blocks=num_blocks)
    return dataclasses.replace(config, cache=cache)


def open_bundle(config: EngineConfig, device: jax.Device) -> Bundle | None:
    """Open the bundle of `--compile-cache`. None without one, or after a warning.

    Raises:
      ConfigError: if another user can write to the bundle.
    """
    folder = bundle_folder(config)
    if folder is None:
        return None
    try:
        return Bundle(folder, device)
    except PermissionError as error:
        raise ConfigError(f"--compile-cache {folder}: {error}") from error
    except BundleError as error:
        log.warning("bundle %s: not used, so this start compiles: %s", folder, error)
        return None


def open_saved(design: Design, options: RunnerOptions) -> SavedExecutables | None:
    """Return the executables that earlier starts of the same engine saved.

    None if the configuration does not select them, if the engine has several devices, or if JAX's
    compilation cache is not a folder.
    """
    parallel, folder = design.config.parallel, jax.config.jax_compilation_cache_dir
    if (
        not parallel.saved_executables
        or parallel.num_devices > 1
        or not jax.config.jax_enable_compilation_cache
        or folder is None
        or is_url(folder)
    ):
        return None
    # A bundle is also loaded where these differ, such as JAX_PLATFORMS.
    variables = {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
    known = {**identity(design, options), "--num-blocks": design.sizes.kv.num_blocks}
    digest = _digest([known, variables], DIGITS)
    return SavedExecutables(Path(folder) / SAVED / digest, design.device)


def identity(design: Design, options: RunnerOptions) -> dict[str, Any]:
    """Return everything that determines the executables, by name. JSON-serializable.

    Options have the names of their flags, because messages show a name and its values.
    """
    config, sizes, model = design.config, design.sizes, design.model
    library = cpu.identity() if design.device.platform == "cpu" else None
    return {
        **_environment(design.device),
        "--tensor-parallel": design.shards,
        "--pipeline-parallel": config.parallel.pipeline_parallel,
        "--expert-parallel": config.parallel.expert_parallel,
        "--dtype": model.dtype.name,
        "--kv-dtype": str(sizes.kv.storage),
        "--kernels": [options.implementation, options.sampler, library],
        "--max-num-seqs": config.batch.max_num_seqs,
        "--max-num-batched-tokens": sizes.max_num_batched_tokens,
        "--max-model-len": sizes.max_model_len,
        "--block-size": sizes.kv.block_size,
        "--num-blocks": config.cache.num_blocks or f"the default, {sizes.kv.num_blocks}",
        "--deterministic": options.deterministic,
        "--no-command-buffers": not options.command_buffers,
        "--max-loras": None if options.lora is None else options.lora.places,
        "--max-lora-rank": None if options.lora is None else options.lora.rank,
        "--steering-vectors": None if options.steering is None else len(options.steering.names),
        "--activations": list(options.activations),
        "model": _digest([_described(model), config.model.gguf_weights]),
        "--draft-model": None if design.draft is None else _digest(_described(design.draft.model)),
        "--draft-verification": options.verification,
        "--max-draft-tokens": config.speculation.max_draft_tokens,
        "shapes of steps": [shape.name for shape in options.shapes],
        "shapes of steps in detail": _digest([dataclasses.asdict(each) for each in options.shapes]),
        "compiler options": options.compiler_options,
    }


def _environment(device: jax.Device) -> dict[str, Any]:
    """Return versions, settings and the device."""
    plugins = [found for name in PLUGINS if (found := _version(name)) is not None]
    on_cpu = device.platform == "cpu"
    return {
        "forge-jax": forge_jax.__version__,
        "forge-jax's source code": _source_digest(),
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "XLA's CUDA plugin": None if on_cpu or not plugins else plugins[0],
        "device": _device(device),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS") or None,
        **{name: getattr(jax.config, name) for name in JAX_SETTINGS},
        FAST_COMPILES: jax.config.read(FAST_COMPILES),
    }


def _device(device: Any) -> str:
    """Return what executables require of a device.

    On a CPU, XLA uses its instructions, and divides work by its cores. GPUs with the same figures
    run the same programs.
    """
    if device.platform != "cpu":
        return (
            f"{device.platform}, compute capability {device.compute_capability}, "
            f"{device.core_count} multiprocessors"
        )
    name = cpu_instructions(device).splitlines()[0].partition(":")[2].strip()
    return f"{name}, {os.cpu_count()} cores, instructions {_digest(cpu_instructions(device))}"


def _described(model: Model) -> dict[str, Any]:
    leaves = zip(model.names, model.leaves, strict=True)
    return {
        "spec": dataclasses.asdict(model.spec),
        "leaves": [[name, leaf.shape, leaf.dtype] for name, leaf in leaves],
        "formats": model.formats,
        "code": code_digest(model.spec.architecture),
    }


def _source_digest() -> str:
    """Hash the code of both packages, which may change without a new version."""
    digest = hashlib.sha256()
    for package in (forge_jax, forge_kernels):
        folder = Path(package.__path__[0])
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.relative_to(folder).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _digest(value: Any, digits: int = 12) -> str:
    text = json.dumps(value, sort_keys=True, default=_canonical)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def _canonical(value: Any) -> Any:
    """Return an equal value for JSON that is the same in every process."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, np.dtype):
        return value.name
    raise TypeError(f"{type(value).__name__} has no canonical form")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
