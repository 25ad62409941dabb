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
from forge_jax.models.lora import LoraShape, lora_targets, set_adapter
from forge_jax.weights.partition import (
    AXIS,
    Partition,
    adapter_partition,
    axis_of,
    matrix_of,
    shard_spec,
)

if TYPE_CHECKING:
    from forge_jax.config import EngineConfig
    from forge_jax.models.decoder import Model
    from forge_jax.models.spec import ModelSpec
    from forge_jax.step.kv_cache import KVShape

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

    def kv(self, model: Model) -> NamedSharding:
        """Of the model's KV cache: by key/value heads, or whole if the model is."""
        return NamedSharding(self.mesh, _WHOLE if model.shards == 1 else _KV)

    def leaf(self, model: Model, name: str) -> jax.ShapeDtypeStruct:
        """The array of all shards of a leaf. Packed ones lie one after the other on axis 0."""
        return self._of_all(model.leaves[model.names.index(name)], leaf_spec(model, name))

    def _of_all(self, shard: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        shape = tuple(
            size * self.shards if axis == AXIS else size
            for size, axis in zip(shard.shape, _axes(spec, shard.ndim), strict=True)
        )
        return jax.ShapeDtypeStruct(shape, shard.dtype, sharding=NamedSharding(self.mesh, spec))

    def leaves(self, model: Model) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(self.leaf(model, name) for name in model.names)

    def joined(self, model: Model, name: str, shards: Sequence[jax.Array]) -> jax.Array:
        """A leaf of shards that lie on their devices."""
        return _joined(self.leaf(model, name), shards)

    def kv_shape(self, shard: KVShape) -> KVShape:
        """The cache of all shards of a model: a head that several have is there as often."""
        return dataclasses.replace(shard, num_kv_heads=shard.num_kv_heads * self.shards)

    def stacks(self, model: Model, lora: LoraShape) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays of all adapters, see `LoraShape.stacks`, of all shards."""
        shards = lora.stacks(shard_spec(model.spec, self.shards), model.dtype)
        return tuple(map(self._of_all, shards, stack_specs(model)))

    def cut_adapter(self, model: Model, arrays: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
        """An adapter, see `LoraShape.adapter`, each part of it on its device."""
        partitions, specs = _adapter_partitions(model.spec, self.shards), _adapter_specs(model)
        placed = []
        for whole, partition, spec in zip(arrays, partitions, specs, strict=True):
            parts = [
                jax.device_put(
                    whole if partition is None else partition.shard(whole, index), device
                )
                for index, device in self.own
            ]
            shard = jax.ShapeDtypeStruct(parts[0].shape, parts[0].dtype)
            placed.append(_joined(self._of_all(shard, spec), parts))
        return tuple(placed)

    def adapter(self, model: Model, lora: LoraShape) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What `cut_adapter` gives."""
        shards = lora.adapter(shard_spec(model.spec, self.shards), model.dtype)
        return tuple(map(self._of_all, shards, _adapter_specs(model)))

    def set_adapter(self, model: Model) -> Callable[..., tuple[jax.Array, ...]]:
        """`forge_jax.models.lora.set_adapter`, by each device on its shards."""
        stacks, adapter = stack_specs(model), _adapter_specs(model)
        return jax.shard_map(
            set_adapter, mesh=self.mesh, in_specs=(stacks, _WHOLE, adapter), out_specs=stacks
        )

    def shard_step(
        self, model: Model, step: Callable[..., Any], *, lora: bool = False
    ) -> Callable[..., Any]:
        """`step(leaves, kv, *rest) -> (kv, *results)`, computed by each device on its shards.

        `rest` and `results` are whole, and the same, on every device; so is everything of a model
        that is not cut. With `lora` the adapters' arrays stand behind the weights in `leaves`.
        """
        leaves = tuple(leaf_spec(model, name) for name in model.names)
        leaves += stack_specs(model) if lora else ()
        kv_spec = self.kv(model).spec

        def of_shard(*args: Any) -> Any:
            kv, *results = step(*args)
            return kv, tuple(results)

        @functools.wraps(step)
        def on_all(*args: Any) -> Any:
            sharded = jax.shard_map(
                of_shard,
                mesh=self.mesh,
                in_specs=(leaves, kv_spec, *(_WHOLE,) * (len(args) - 2)),
                out_specs=(kv_spec, _WHOLE),
                check_vma=False,  # what is the same on all is so by construction
            )
            kv, results = sharded(*args)
            return (kv, *results)

        return on_all


def _axes(spec: PartitionSpec, ndim: int) -> tuple[Any, ...]:
    return (*spec, *(None,) * (ndim - len(spec)))


def leaf_spec(model: Model, name: str) -> PartitionSpec:
    """Which axis of the leaf's array goes over the devices."""
    axis = axis_of(name, model.spec, model.shards)
    if axis is None:
        return _WHOLE
    if matrix_of(name) in model.packings and not name.endswith(".order"):
        return PartitionSpec(AXIS)
    ndim = model.leaves[model.names.index(name)].ndim
    return PartitionSpec(*(None,) * (ndim + axis), AXIS)


def stack_specs(model: Model) -> tuple[PartitionSpec, ...]:
    """The same of the adapters' arrays: a `[L, P, r, inputs]` by inputs, b `[L, rows, P, r]`."""
    partitions = _adapter_partitions(model.spec, model.shards)
    return tuple(
        _partition_at(partition, 1 if index % 2 else 3)
        for index, partition in enumerate(partitions)
    )


def _adapter_specs(model: Model) -> tuple[PartitionSpec, ...]:
    """And of one adapter's, `[L, r, inputs]` and `[L, rows, r]`."""
    partitions = _adapter_partitions(model.spec, model.shards)
    return tuple(
        _partition_at(partition, 1 if index % 2 else 2)
        for index, partition in enumerate(partitions)
    )


def _partition_at(partition: Partition | None, axis: int) -> PartitionSpec:
    return _WHOLE if partition is None else PartitionSpec(*(None,) * axis, AXIS)


def _adapter_partitions(spec: ModelSpec, shards: int) -> list[Partition | None]:
    return [
        adapter_partition(name, part, spec, shards) for name in lora_targets(spec) for part in "ab"
    ]


def _joined(described: jax.ShapeDtypeStruct, shards: Sequence[jax.Array]) -> jax.Array:
    shape, sharding = described.shape, described.sharding
    assert sharding is not None
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))


def choose_mesh(config: EngineConfig, device: jax.Device) -> TensorMesh | None:
    """As many devices as `--tensor-parallel` says, from `device` on; None for one alone.

    Raises:
      ConfigError: there are not as many.
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
