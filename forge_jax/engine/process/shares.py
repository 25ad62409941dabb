"""`Share`: the part of the host's devices that one of several engine processes uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forge_jax.config.options import ParallelConfig
from forge_jax.errors import ConfigError

_DEV = Path("/dev")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Share:
    """The CPUs and GPUs of one engine process.

    Attributes:
      cpus: CPUs that its threads may use; empty: all.
      environment: variables to set in the process.
      device: the value of `--device` in the process; None: unchanged.
    """

    cpus: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    device: int | None = None


def share_of(engine: int, num_engines: int, parallel: ParallelConfig) -> Share:
    """Return the share of an engine.

    If each engine needs n GPUs, engine i gets the GPUs [i * n, (i + 1) * n) after `--device`. On a
    CPU, it gets an equal part of the CPUs. If there are too few CPUs, the engines share all.

    Args:
      engine: the engine's index.
      num_engines: number of engines on this host.

    Raises:
      ConfigError: if the host has too few GPUs.
    """
    if num_engines == 1:
        return Share()
    gpus = _gpus(parallel)
    if not gpus:
        cpus = sorted(os.sched_getaffinity(0))
        if len(cpus) < num_engines:
            return Share()
        begin, end = (len(cpus) * each // num_engines for each in (engine, engine + 1))
        return Share(cpus=tuple(cpus[begin:end]))
    size = parallel.num_devices
    needed = parallel.device + num_engines * size
    if needed > len(gpus):
        raise ConfigError(
            f"--data-parallel {num_engines} with {size} GPUs each (--tensor-parallel times "
            f"--pipeline-parallel) and --device {parallel.device} needs {needed} GPUs, but there "
            f"are {len(gpus)}: lower one of them"
        )
    first = parallel.device + engine * size
    return Share(environment={_VISIBLE: ",".join(gpus[first : first + size])}, device=0)


def _gpus(parallel: ParallelConfig) -> list[str]:
    """Return the GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if parallel.backend == "cpu" or (platforms and "cuda" not in platforms.split(",")):
        return []
    visible = os.environ.get(_VISIBLE)
    if visible is not None:
        return [each for each in visible.split(",") if each.strip()]
    found = [each.name.removeprefix("nvidia") for each in _DEV.glob("nvidia[0-9]*")]
    return [str(number) for number in sorted(int(each) for each in found if each.isdecimal())]
