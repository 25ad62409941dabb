"""Compilation for a GPU that this machine does not have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from forge_jax.errors import ConfigError
from forge_jax.step.targets import Target
from forge_kernels.devices import described

# XLA's compiler for CUDA, and NVIDIA's assembler and libraries for it.
PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm")


@dataclass(frozen=True)
class _Described(AbstractDevice):
    """A device with the attribute that Pallas reads from a real one."""

    compute_capability: str = "9.0"


@dataclass(frozen=True)
class AbsentDevice:
    """A GPU that can be compiled for, but has no memory and runs nothing.

    Attributes:
      device: the device for the placement of arguments and results.
    """

    target: Target
    device: jax.Device

    @classmethod
    def of(cls, target: Target) -> AbsentDevice:
        """Return the GPU. This process then has no other GPU.

        Raises:
          ConfigError: if the packages of the compiler are not installed.
        """
        check_packages(target.key)
        jax.config.update("jax_platforms", "cpu")  # keeps the plugin from looking for a driver
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=target.config, topology="1x1x1"
        )
        [device] = topology.devices
        return cls(target, device)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace functions for this GPU, in the current thread."""
        device = _Described(
            self.target.name, self.target.cores, "cuda", self.target.compute_capability
        )
        mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh), described(self.target.gpu):
            yield


def check_packages(key: str) -> None:
    missing = [name for name in PACKAGES if not _installed(name)]
    if missing:
        raise ConfigError(
            f"--target {key}: XLA's compiler for NVIDIA GPUs needs {', '.join(missing)}: install "
            "the extra aot (pip install -c constraints.txt -e '.[aot]')"
        )


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
