"""`forge-jax compile MODEL --output FOLDER`: writes a bundle of compiled executables.

A start with the same options loads them (`forge_jax.step.bundle`). Weights are not read. With a
target, the executables are for a GPU that this machine need not have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from forge_jax.config import EngineConfig
from forge_jax.engine.builder import Design, draft_options, make_design, runner_options
from forge_jax.engine.bundle import identity
from forge_jax.errors import ConfigError
from forge_jax.host.progress import progress_bar
from forge_jax.speculate.draft_model import DraftModel
from forge_jax.step.bundle import BundleError, write_bundle
from forge_jax.step.executables import Executables
from forge_jax.step.kv_cache import GIB
from forge_jax.step.options import RunnerOptions
from forge_jax.step.step_builder import StepBuilder
from forge_jax.step.step_shapes import pool_shapes
from forge_jax.step.targets import TARGETS, Target
from forge_jax.step.targets.topology import AbsentDevice
from forge_jax.telemetry.memory import described_memory, reserve_device_memory
from forge_jax.telemetry.startup import StartupTimes
from forge_jax.telemetry.units import bytes_text

CPU = "cpu"

log = logging.getLogger(__name__)

type Tracing = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class CompiledBundle:
    folder: Path
    device: str
    names: tuple[str, ...]
    num_bytes: int
    num_blocks: int
    seconds: float


def compile_bundle(
    config: EngineConfig, out: str | Path, target: str | None = None
) -> CompiledBundle:
    """Compile everything that a start with `config` compiles, and write it to the folder `out`.

    Args:
      config: the options of the start. Options of the host, such as `seed`, have no effect.
      out: the folder, which must be empty or not exist.
      target: one of TARGETS, or "cpu". Default: the device that the configuration selects.

    Raises:
      ModelError: the model cannot be served.
      ConfigError: `out` is not empty or not writable, the options do not fit the model or device,
        or the target's compiler is missing.
    """
    begin_s = time.perf_counter()
    folder = Path(out).expanduser().resolve()
    _check_output(folder)
    _check_devices(config)
    with _without_cache(config) as config, _device(config, target) as (config, device, tracing):
        design, options, executables = _compile(config, device, tracing)
        try:
            names = list(executables)
            with progress_bar(iterable=names, desc="compiling", unit="executables") as bar:
                compiled = {name: executables[name] for name in bar}
            size = write_bundle(
                folder, identity(design, options), design.sizes.kv.num_blocks, compiled
            )
        except BundleError as error:
            raise ConfigError(str(error)) from error
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
    return CompiledBundle(
        folder=folder,
        device=design.device.device_kind,
        names=tuple(compiled),
        num_bytes=size,
        num_blocks=design.sizes.kv.num_blocks,
        seconds=time.perf_counter() - begin_s,
    )


def summary(bundle: CompiledBundle) -> str:
    return (
        f"{bundle.folder}: {len(bundle.names)} executables for {bundle.device}, "
        f"{bytes_text(bundle.num_bytes)}, with a KV cache of {bundle.num_blocks} blocks "
        f"({bundle.seconds:.0f} s). To load them, run serve with the same options and "
        f"--compile-cache {bundle.folder}"
    )


def _check_output(folder: Path) -> None:
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"--output {folder} is not empty: choose another folder")
    except OSError as error:
        raise ConfigError(f"--output {folder}: {error.strerror or error}") from error


def _check_devices(config: EngineConfig) -> None:
    parallel = config.parallel
    for flag, count in (
        ("--tensor-parallel", parallel.tensor_parallel),
        ("--pipeline-parallel", parallel.pipeline_parallel),
    ):
        if count > 1:
            raise ConfigError(
                f"{flag} {count}: a bundle holds executables for one device. For several, use a "
                "compile cache on a persistent disk"
            )


@contextlib.contextmanager
def _without_cache(config: EngineConfig) -> Iterator[EngineConfig]:
    """Yield the configuration without a compilation cache, on disk or in this process.

    XLA:CPU does not serialize all of an executable that was itself loaded. A bundle made from a
    cache would load, but its calls would fail.
    """
    jax.clear_caches()
    parallel = dataclasses.replace(config.parallel, compile_cache_dir=None, compile_cache=False)
    enabled = jax.config.jax_enable_compilation_cache
    try:
        yield dataclasses.replace(config, parallel=parallel)
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def _device(
    config: EngineConfig, target: str | None
) -> Iterator[tuple[EngineConfig, jax.Device | None, Tracing]]:
    """Yield the configuration for the target, its device if it is absent, and how to trace."""
    if target is None:
        yield config, None, nullcontext
    elif target == CPU:
        parallel = dataclasses.replace(config.parallel, backend="cpu")
        yield dataclasses.replace(config, parallel=parallel), None, nullcontext
    elif target in TARGETS:
        absent = AbsentDevice.of(Target.read(target))
        reserve_device_memory(config.cache.memory_fraction)
        with described_memory(absent.target.memory_bytes):
            yield config, absent.device, absent.tracing
    else:
        raise ConfigError(f"--target must be one of {', '.join((*TARGETS, CPU))}, not {target}")


def _compile(
    config: EngineConfig, device: jax.Device | None, tracing: Tracing
) -> tuple[Design, RunnerOptions, Executables]:
    """Compile everything for a KV cache that fits, as a start would choose it."""
    design = make_design(config, StartupTimes(), device=device)
    options, executables = _start(design, tracing)
    missing = design.missing_bytes(_first_bytes(options, executables))
    if missing > 0:
        executables.cancel()
        design = dataclasses.replace(design, sizes=design.sizes.smaller(config, missing))
        options, executables = _start(design, tracing)
        missing = design.missing_bytes(_first_bytes(options, executables))
    if missing > 0:
        executables.cancel()
        raise ConfigError(
            f"the steps need {missing / GIB:.2f} GiB more than the device has: lower --num-blocks"
        )
    return design, options, executables


def _first_bytes(options: RunnerOptions, executables: Executables) -> int:
    return max(executables.memory_bytes(shape.name) for shape in options.first_shapes)


def _start(design: Design, tracing: Tracing) -> tuple[RunnerOptions, Executables]:
    """Start to compile everything in threads, the first shapes first."""
    options = runner_options(design)
    executables = Executables(options.compiler_options, within=tracing)
    steps = StepBuilder(design.model, options)
    shapes = [*options.first_shapes, *options.late_shapes, *pool_shapes(list(options.shapes))]
    for shape in shapes:
        steps.add_step(executables, shape)
    steps.add_new_state(executables)
    steps.add_slot_updates(executables)
    if options.host_copies:
        steps.add_block_copies(executables)
    if design.draft is not None:
        of_draft = draft_options(design, design.draft, options, steps.resident_bytes)
        draft_model = DraftModel(design.draft.model, of_draft)
        draft_model.add_new_kv(executables)
        draft_model.add_passes(executables)
    executables.close()
    return options, executables
