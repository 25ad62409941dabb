"""Descriptions of GPUs, for which XLA compiles without the GPU.

Each is a `GpuTargetConfigProto` as text, with the limits that NVIDIA publishes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from forge_kernels.devices import Gpu

FOLDER = Path(__file__).parent
TARGETS = ("h200", "a100", "l4", "b200", "rtx5090")


@dataclass(frozen=True)
class Target:
    """A GPU's description, as XLA's compiler takes it.

    Attributes:
      key: one of TARGETS.
      config: a GpuTargetConfigProto as text.
      name: NVIDIA's name of the GPU.
      cores: number of multiprocessors.
      shared_limit: bytes of shared memory that one block can use.
      compute_capability: such as "9.0".
    """

    key: str
    config: str
    name: str
    cores: int
    shared_limit: int
    compute_capability: str
    platform: ClassVar[str] = "gpu"  # as of a `jax.Device`

    @property
    def gpu(self) -> Gpu:
        major, minor = self.compute_capability.split(".")
        return Gpu((int(major), int(minor)), self.cores)

    @classmethod
    def read(cls, key: str) -> Target:
        """Return the description of one of TARGETS."""
        config = (FOLDER / f"{key}.txtpb").read_text()
        capability = _field(r"cuda_compute_capability \{(.*)\}", config)
        minor = re.search(r"minor: (\d+)", capability)
        return cls(
            key=key,
            config=config,
            name=_field(r'name: "(.*)"', config),
            cores=int(_field(r"core_count: (\d+)", config)),
            shared_limit=int(_field(r"shared_memory_per_block_optin: (\d+)", config)),
            compute_capability=f"{_field(r'major: (\d+)', capability)}.{minor[1] if minor else 0}",
        )


def _field(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the description has nothing like {pattern!r}")
    return found[1]
