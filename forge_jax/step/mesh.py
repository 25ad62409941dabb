"""The mesh: the devices that share one model, and the placement of arrays on them.

The whole step runs under `shard_map`. Each device computes its shard with the same code and kernels
as a model on one device, and the decoder places the sums and gathers. XLA has nothing to partition,
so it adds no collectives.

The devices are those of all JAX processes, one process per host. A process puts arrays on its own
devices only, and every process dispatches the same executables in the same order
(`forge_jax.step.mirror`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from forge_jax.models.kv import LayerLayout, PagedLayout, StateArray, StateLayout
from forge_jax.models.lora import LoraShape, lora_targets, set_adapter
from forge_jax.models.plugins import find_architecture
from forge_jax.weights.partition import (
    AXIS,
    Partition,
    adapter_partition,
    axis_of,
    matrix_of,
    shard_spec,
)

if TYPE_CHECKING:
    from forge_jax.models.decoder import Model
    from forge_jax.models.spec import ModelSpec
    from forge_jax.step.kv_cache import KVShape

_WHOLE = PartitionSpec()
_ROWS = PartitionSpec(AXIS)
_PAGED = PartitionSpec(None, None, AXIS)  # [N, 2, K, bs, D], and scales [N, 2, K, bs]


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
        """The indices and devices of this process's shards."""
        for index, device in enumerate(self.devices):
            if device.process_index == jax.process_index():
                yield index, device

    @property
    def whole(self) -> NamedSharding:
        """The sharding of an array that is replicated on every device."""
        return NamedSharding(self.mesh, _WHOLE)

    @property
    def by_shard(self) -> NamedSharding:
        """The sharding of an array with one row per device."""
        return NamedSharding(self.mesh, _ROWS)

    def shard_copies(self, model: Model, save: Any, load: Any) -> tuple[Any, Any]:
        """Return the functions of `forge_jax.step.host_blocks`, run by each device on its shard."""
        kv, shared = kv_specs(model), {"mesh": self.mesh, "check_vma": False}
        saves = jax.shard_map(save, in_specs=(kv, _WHOLE), out_specs=_ROWS, **shared)

        def loads(cache: Any, blocks: Any, *rows: Any) -> Any:
            specs = (kv, _WHOLE, *(_ROWS,) * len(rows))
            return jax.shard_map(load, in_specs=specs, out_specs=kv, **shared)(cache, blocks, *rows)

        return saves, loads

    def kv(self, model: Model) -> Any:
        """Return the cache's shardings, a prefix of its tree: by heads, or replicated."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), kv_specs(model))

    def leaf(self, model: Model, name: str) -> jax.ShapeDtypeStruct:
        """Return the shape of a leaf of all shards. Packed shards are concatenated on axis 0."""
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
        """Assemble a leaf from shards that are on their devices."""
        return _joined(self.leaf(model, name), shards)

    def kv_shape(self, shard: KVShape) -> KVShape:
        """Return the cache shape of all shards. Heads that several shards have count repeatedly.

        Empty arrays are omitted, because XLA crashes while it compiles a program with manual
        sharding that returns an empty array next to others (jaxlib 0.11.2).
        """
        layouts = tuple(_layout_of_all(layout, self.shards) for layout in shard.layouts)
        return dataclasses.replace(shard, layouts=layouts, without_empty=True)

    def stacks(self, model: Model, lora: LoraShape) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shapes of all adapters' arrays (see `LoraShape.stacks`), of all shards."""
        shards = lora.stacks(shard_spec(model.spec, self.shards), model.dtype)
        return tuple(map(self._of_all, shards, stack_specs(model)))

    def cut_adapter(self, model: Model, arrays: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
        """Shard an adapter (see `LoraShape.adapter`), and put each part on its device."""
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
        """Return the shapes of the arrays that `cut_adapter` returns."""
        shards = lora.adapter(shard_spec(model.spec, self.shards), model.dtype)
        return tuple(map(self._of_all, shards, _adapter_specs(model)))

    def set_adapter(self, model: Model) -> Callable[..., tuple[jax.Array, ...]]:
        """Return `forge_jax.models.lora.set_adapter`, run by each device on its shards."""
        stacks, adapter = stack_specs(model), _adapter_specs(model)
        return jax.shard_map(
            set_adapter, mesh=self.mesh, in_specs=(stacks, _WHOLE, adapter), out_specs=stacks
        )

    def shard_step(
        self,
        model: Model,
        step: Callable[..., Any],
        *,
        lora: bool = False,
        steering: bool = False,
    ) -> Callable[..., Any]:
        """Return `step(leaves, kv, *rest) -> (kv, *results)`, run by each device on its shards.

        `rest`, `results` and all of a model that is not sharded are replicated on every device. If
        `lora`, the adapters' arrays follow the weights in `leaves`. If `steering`, the last leaf is
        the stack of steering vectors, which is replicated.
        """
        leaves = tuple(leaf_spec(model, name) for name in model.names)
        leaves += stack_specs(model) if lora else ()
        leaves += (_WHOLE,) if steering else ()
        kv_spec, layouts = kv_specs(model), cache_layouts(model)

        def of_shard(leaves: Any, kv: Any, *rest: Any) -> Any:
            whole = tuple(map(_with_empty, layouts, kv))
            new, *results = step(leaves, whole, *rest)
            return tuple(map(_without_empty, new)), tuple(results)

        @functools.wraps(step)
        def on_all(*args: Any) -> Any:
            sharded = jax.shard_map(
                of_shard,
                mesh=self.mesh,
                in_specs=(leaves, kv_spec, *(_WHOLE,) * (len(args) - 2)),
                out_specs=(kv_spec, _WHOLE),
                check_vma=False,  # replicated results are equal by construction
            )
            kv, results = sharded(*args)
            return (kv, *results)

        return on_all


def placed(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Put an array that every process has on the devices of a sharding.

    `jax.device_put` would compare the processes' arrays, with an additional collective operation.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def kv_specs(model: Model) -> Any:
    """Return the partitions of a model's cache, a prefix of its tree."""
    if model.shards == 1:
        return _WHOLE
    return tuple(map(_layer_spec, cache_layouts(model)))


def cache_layouts(model: Model) -> tuple[LayerLayout, ...]:
    """Return the layouts of the caches of a model's own layers, on one shard."""
    spec, stage = shard_spec(model.spec, model.shards), model.stage
    layouts = find_architecture(spec.architecture).cache(spec)
    return layouts if stage is None else tuple(layouts[layer] for layer in stage.layers)


def _with_empty(layout: LayerLayout, layer: Any) -> Any:
    """Return a layer's cache on one shard with the empty arrays that its storage omits."""
    if not isinstance(layout, StateLayout):
        return layer
    slots = len(jax.tree.leaves(layer)[0])
    empty = {
        array.name: jnp.zeros((slots, 0, *array.shape), array.dtype)
        for array in layout.arrays
        if isinstance(layer[array.name], tuple)
    }
    return {**layer, **empty}


def _without_empty(layer: Any) -> Any:
    """Return a layer's cache as it is stored, see `TensorMesh.kv_shape`."""
    if not isinstance(layer, dict):
        return layer
    return {name: array if array.size else () for name, array in layer.items()}


def _layer_spec(layout: LayerLayout) -> Any:
    if isinstance(layout, StateLayout):
        return {array.name: _state_spec(array) for array in layout.arrays}
    return _PAGED if layout.shares is None else ()


def _state_spec(array: StateArray) -> PartitionSpec:
    if array.axis is None:
        return _WHOLE
    return PartitionSpec(*(None,) * (1 + array.pending + array.axis), AXIS)


def _layout_of_all(layout: LayerLayout, shards: int) -> LayerLayout:
    if isinstance(layout, PagedLayout):
        return dataclasses.replace(layout, heads=layout.heads * shards)
    arrays = tuple(
        dataclasses.replace(
            array,
            shape=tuple(
                size * shards if axis == array.axis else size
                for axis, size in enumerate(array.shape)
            ),
        )
        for array in layout.arrays
    )
    return StateLayout(arrays=arrays)


def _axes(spec: PartitionSpec, ndim: int) -> tuple[Any, ...]:
    return (*spec, *(None,) * (ndim - len(spec)))


def leaf_spec(model: Model, name: str) -> PartitionSpec:
    """Return the partition of a leaf: the axis that is sharded over the devices."""
    axis = axis_of(name, model.spec, model.shards)
    if axis is None:
        return _WHOLE
    if matrix_of(name) in model.packings and not name.endswith(".order"):
        return PartitionSpec(AXIS)
    ndim = model.leaves[model.names.index(name)].ndim
    return PartitionSpec(*(None,) * (axis % ndim), AXIS)


def stack_specs(model: Model) -> tuple[PartitionSpec, ...]:
    """Return the partitions of all adapters' arrays.

    a is `[L, P, r, inputs]`, sharded by inputs, and b is `[L, rows, P, r]`, sharded by rows.
    """
    partitions = _adapter_partitions(model.spec, model.shards)
    return tuple(
        _partition_at(partition, 1 if index % 2 else 3)
        for index, partition in enumerate(partitions)
    )


def _adapter_specs(model: Model) -> tuple[PartitionSpec, ...]:
    """Return the partitions of one adapter's arrays, `[L, r, inputs]` and `[L, rows, r]`."""
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
