"""`Link`: transfers of arrays between the devices of two stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from forge_jax.weights.partition import AXIS

if TYPE_CHECKING:
    from forge_jax.step.executables import Executables
    from forge_jax.step.inputs import StepShape
    from forge_jax.step.placement import Placement

STAGE = "stage"  # the mesh axis of the two stages
_ENDS = PartitionSpec(STAGE)


class Link:
    """A connection between the devices of two stages, which are equally many.

    Each device sends its copy of a replicated array to the device of the other stage that has the
    same index. If both stages belong to one process, that is a copy between devices. Otherwise, it
    is a collective operation of the processes that have these devices.

    Args:
      name: the start of the executables' names.
      source, target: the stages' devices.
    """

    def __init__(self, name: str, source: Placement, target: Placement):
        self._name = name
        self._source, self._target = source, target
        both = source.devices + target.devices
        own = source.own_devices + target.own_devices
        self._is_local = len(own) == len(both)
        self._is_used = bool(own) and not self._is_local
        self._compiled: dict[str, jax.stages.Compiled] = {}
        self._blanks: dict[tuple[tuple[int, ...], np.dtype], list[jax.Array]] = {}

    def add(self, executables: Executables, shape: StepShape, arrays: Any) -> None:
        """Add the executable that sends arrays of a step.

        Args:
          executables: compiles it.
          shape: the step's shape.
          arrays: a tree of the arrays' shapes and dtypes, without scalars.
        """
        if not self._is_used:
            return
        ends = jax.tree.map(self._of_ends, arrays)
        executables.add(self._executable(shape), sender(self._mesh), ends)

    def prepare(self, shape: StepShape, executables: Executables) -> None:
        """Wait for the executable of a shape. `send` then accepts the shape."""
        if self._is_used:
            self._compiled[shape.name] = executables[self._executable(shape)]

    def send(self, shape: StepShape, arrays: Any) -> Any:
        """Send arrays, if a device of this process is part of the link.

        Args:
          shape: the shape of the arrays' step.
          arrays: a tree of arrays, which are replicated on the source. Ignored in a process that
            has none of its devices.

        Returns:
          The arrays on the target; None in a process that has none of its devices.
        """
        if self._is_local:
            return jax.device_put(arrays, self._target.sharding)
        if not self._is_used:
            return None
        compiled = self._compiled[shape.name]
        (ends,), _ = compiled.args_info
        sent = compiled(jax.tree.map(self._joined, ends, ends if arrays is None else arrays))
        return jax.tree.map(self._received, sent) if self._target.own_devices else None

    @cached_property
    def _mesh(self) -> Mesh:
        devices = np.array([self._source.devices, self._target.devices])
        return Mesh(devices, (STAGE, AXIS))

    def _executable(self, shape: StepShape) -> str:
        return f"{self._name}[{shape.name}]"

    def _of_ends(self, array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return the shape of the arrays of source and target, one after the other."""
        shape = 2 * array.shape[0], *array.shape[1:]
        sharding = NamedSharding(self._mesh, _ENDS)
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)

    def _joined(self, ends: Any, array: Any) -> jax.Array:
        """Return the array of source and target. Only that of the source has values."""
        parts = list(self._blank(ends.shape, ends.dtype))
        if self._source.own_devices:
            parts += [shard.data for shard in array.addressable_shards]
        sharding = NamedSharding(self._mesh, _ENDS)
        return jax.make_array_from_single_device_arrays(ends.shape, sharding, parts)

    def _blank(self, shape: tuple[int, ...], dtype: np.dtype) -> list[jax.Array]:
        """Return arrays for the target, whose values are ignored."""
        if (shape, dtype) not in self._blanks:
            zeros = np.zeros((shape[0] // 2, *shape[1:]), dtype)
            own = self._target.own_devices
            self._blanks[shape, dtype] = [jax.device_put(zeros, each) for each in own]
        return self._blanks[shape, dtype]

    def _received(self, ends: jax.Array) -> jax.Array:
        own = self._target.own_devices
        parts = [shard.data for shard in ends.addressable_shards if shard.device in own]
        shape = ends.shape[0] // 2, *ends.shape[1:]
        return jax.make_array_from_single_device_arrays(shape, self._target.sharding, parts)


def sender(mesh: Mesh) -> Callable[[Any], Any]:
    """Return the function that sends a tree of arrays from the first half of `STAGE` to the other.

    The arrays of both halves are concatenated on axis 0.
    """

    def send(arrays: Any) -> Any:
        return jax.tree.map(lambda array: jax.lax.ppermute(array, STAGE, [(0, 1)]), arrays)

    return jax.shard_map(send, mesh=mesh, in_specs=_ENDS, out_specs=_ENDS, check_vma=False)
