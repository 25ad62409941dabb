"""Descriptions of GPUs, for which XLA compiles without the GPU.

Each is a `GpuTargetConfigProto` as text, with the limits that NVIDIA publishes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from forge_jax.errors import ConfigError

if TYPE_CHECKING:
    from forge_kernels.devices import Gpu

FOLDER = Path(__file__).parent
SUFFIX = ".txtpb"
TARGETS = ("h200", "a100", "l4", "b200", "rtx5090")


@dataclass(frozen=True)
class Target:
    """A GPU's description, as XLA's compiler takes it.

    Attributes:
      key: one of TARGETS, or the name of a file.
      config: a GpuTargetConfigProto as text.
      name: NVIDIA's name of the GPU.
      cores: number of multiprocessors.
      shared_limit: bytes of shared memory that one block can use.
      compute_capability: such as "9.0".
      memory_bytes: size of the device's memory.
      bandwidth: bytes per second of the memory.
      clock_hz: clock of the multiprocessors.
      lanes: float32 operations per cycle and multiprocessor.
    """

    key: str
    config: str
    name: str
    cores: int
    shared_limit: int
    compute_capability: str
    memory_bytes: int
    bandwidth: float
    clock_hz: float
    lanes: int
    platform: ClassVar[str] = "gpu"  # as of a `jax.Device`

    @property
    def gpu(self) -> Gpu:
        from forge_kernels.devices import Gpu  # it imports JAX, which the command line does without

        major, minor = self.compute_capability.split(".")
        return Gpu((int(major), int(minor)), self.cores)

    @classmethod
    def read(cls, key: str) -> Target:
        """Return the description of one of TARGETS, or the one in a file with the suffix .txtpb.

        Raises:
          ConfigError: there is no such description, or it lacks a field.
        """
        path = Path(key) if key.endswith(SUFFIX) else FOLDER / f"{key}{SUFFIX}"
        if key not in TARGETS and not (key.endswith(SUFFIX) and path.is_file()):
            raise ConfigError(
                f"no description of the GPU {key!r}: use one of {', '.join(TARGETS)}, or the path "
                f"of a GpuTargetConfigProto as text, with the suffix {SUFFIX}"
            )
        config = path.read_text()

        def field(pattern: str, text: str = config) -> str:
            found = re.search(pattern, text)
            if found is None:
                name = re.split(r"[ :(]", pattern)[0]
                raise ConfigError(f"{path}: the description of the GPU has no field {name}")
            return found[1]

        capability = field(r"cuda_compute_capability \{(.*)\}")
        minor = re.search(r"minor: (\d+)", capability)
        return cls(
            key=path.stem,
            config=config,
            name=field(r'name: "(.*)"'),
            cores=int(field(r"core_count: (\d+)")),
            shared_limit=int(field(r"shared_memory_per_block_optin: (\d+)")),
            compute_capability=f"{field(r'major: (\d+)', capability)}.{minor[1] if minor else 0}",
            memory_bytes=int(field(r"device_memory_size: (\d+)")),
            bandwidth=float(field(r"memory_bandwidth: (\d+)")),
            clock_hz=1e9 * float(field(r"clock_rate_ghz: ([\d.]+)")),
            lanes=int(field(r"fpus_per_core: (\d+)")),
        )
