"""The mesh: the devices that share one model, and where arrays lie on them.

The whole step runs under `shard_map`: each device computes its shard with the same code that
computes a model alone, kernels included, and the decoder says where they add up or gather. Nothing
is left for XLA to partition, so no collective comes from anywhere else.

Of one process today. The devices are those that JAX names in all processes, and only those of this
one are handed arrays, as `jax.distributed` wants it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from forge_jax.errors import ConfigError
from forge_jax.parallel.rules import AXIS, cut_of

if TYPE_CHECKING:
    from forge_jax.cache.kv import KVShape
    from forge_jax.config import EngineConfig
    from forge_jax.models.decoder import Model

_WHOLE = PartitionSpec()
_KV = PartitionSpec(None, None, AXIS)  # [N, 2, K, bs, D], and [N, 2, K, bs] of scales


@dataclass(frozen=True)
class TensorMesh:
    """The devices of tensor parallelism, in the order of the shards."""

    mesh: Mesh

    @classmethod
    def of(cls, devices: Sequence[jax.Device]) -> TensorMesh:
        return cls(Mesh(np.array(devices), (AXIS,)))

    @property
    def shards(self) -> int:
        return self.mesh.size

    @property
    def devices(self) -> list[jax.Device]:
        return list(self.mesh.devices.flat)

    @property
    def own(self) -> Iterator[tuple[int, jax.Device]]:
        """The shards that are this process's, and their devices."""
        for index, device in enumerate(self.devices):
            if device.process_index == jax.process_index():
                yield index, device

    @property
    def whole(self) -> NamedSharding:
        """Of an array that every device has all of."""
        return NamedSharding(self.mesh, _WHOLE)

    @property
    def kv(self) -> NamedSharding:
        """Of the KV cache: by key/value heads."""
        return NamedSharding(self.mesh, _KV)

    def leaf(self, model: Model, name: str) -> jax.ShapeDtypeStruct:
        """The array of all shards of a leaf. Packed ones lie one after the other on axis 0."""
        shard = model.leaves[model.names.index(name)]
        spec = leaf_spec(model, name)
        shape = tuple(
            size * self.shards if axis == AXIS else size
            for size, axis in zip(shard.shape, _axes(spec, shard.ndim), strict=True)
        )
        return jax.ShapeDtypeStruct(shape, shard.dtype, sharding=NamedSharding(self.mesh, spec))

    def leaves(self, model: Model) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(self.leaf(model, name) for name in model.names)

    def kv_shape(self, shard: KVShape) -> KVShape:
        """The cache of all shards: a head that several have is there as often."""
        return dataclasses.replace(shard, num_kv_heads=shard.num_kv_heads * self.shards)

    def shard_step(self, model: Model, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step(leaves, kv, *rest) -> (kv, *results)`, computed by each device on its shards.

        `rest` and `results` are whole, and the same, on every device.
        """
        leaves = tuple(leaf_spec(model, name) for name in model.names)

        def of_shard(*args: Any) -> Any:
            kv, *results = step(*args)
            return kv, tuple(results)

        @functools.wraps(step)
        def on_all(*args: Any) -> Any:
            sharded = jax.shard_map(
                of_shard,
                mesh=self.mesh,
                in_specs=(leaves, _KV, *(_WHOLE,) * (len(args) - 2)),
                out_specs=(_KV, _WHOLE),
                check_vma=False,  # what is the same on all is so by construction
            )
            kv, results = sharded(*args)
            return (kv, *results)

        return on_all


def _axes(spec: PartitionSpec, ndim: int) -> tuple[Any, ...]:
    return (*spec, *(None,) * (ndim - len(spec)))


def leaf_spec(model: Model, name: str) -> PartitionSpec:
    """Which axis of the leaf's array goes over the devices."""
    weight = name.removesuffix("scale") + "weight" if name.endswith("scale") else name
    cut = cut_of(weight, model.spec, model.shards)
    if cut is None:
        return _WHOLE
    if weight in model.packings:
        return PartitionSpec(AXIS)
    ndim = model.leaves[model.names.index(name)].ndim
    return PartitionSpec(*(None,) * (ndim + cut.axis), AXIS)


def choose_mesh(config: EngineConfig, device: jax.Device) -> TensorMesh | None:
    """As many devices as `--tensor-parallel` says, from `device` on; None for one alone.

    Raises:
      ConfigError: there are not as many, or something is asked for that is for one device only.
    """
    count = config.parallel.tensor_parallel
    if count == 1:
        return None
    devices = jax.devices(device.platform)
    first = devices.index(device)
    if first + count > len(devices):
        more = (
            f"XLA_FLAGS=--xla_force_host_platform_device_count={first + count} makes that many "
            "of a CPU, for tests"
            if device.platform == "cpu"
            else f"--tensor-parallel {len(devices) - first} is the most, or a lower --device"
        )
        raise ConfigError(
            f"--tensor-parallel {count}: from device {first} on there are {len(devices) - first}: "
            f"{more}"
        )
    return TensorMesh.of(devices[first : first + count])
