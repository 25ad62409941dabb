"""Placement of one model's arrays: on one device, or on the devices of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from forge_jax.models.kv import KV

if TYPE_CHECKING:
    from forge_jax.models.decoder import Model
    from forge_jax.step.kv_cache import KVShape
    from forge_jax.step.mesh import TensorMesh


@dataclass(frozen=True)
class Placement:
    """The device of a model, or the mesh that shares it, of which `device` is one."""

    device: jax.Device
    mesh: TensorMesh | None = None

    @cached_property
    def sharding(self) -> jax.sharding.Sharding:
        """The sharding of every array except weights and KV cache, which a mesh divides."""
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(self.device)
        return self.mesh.whole

    def i32(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=self.sharding)

    def put(self, tree: Any) -> Any:
        """Return the shapes of `tree`, placed here."""
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self.sharding), tree
        )

    def leaves(self, model: Model) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shapes of a model's weights, of all shards together."""
        return self.put(model.leaves) if self.mesh is None else self.mesh.leaves(model)

    def whole_kv(self, model: Model, shard: KVShape) -> KVShape:
        """Return the shape of the KV cache of all shards of a model."""
        if self.mesh is None or model.shards == 1:
            return shard
        return self.mesh.kv_shape(shard)

    def kv_sharding(self, model: Model) -> Any:
        """Return the cache's shardings, a prefix of its tree."""
        return self.sharding if self.mesh is None else self.mesh.kv(model)

    def kv(self, model: Model, shard: KVShape) -> KV:
        """Return the shapes of the KV cache, of all shards together, one per layer."""
        layers = self.whole_kv(model, shard).layers
        shardings = jax.tree.broadcast(self.kv_sharding(model), layers)
        return jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            layers,
            shardings,
        )

    def block_rows(self, block_bytes: int) -> jax.ShapeDtypeStruct:
        """Return u8[shards, block_bytes], the bytes of one block on each shard."""
        shards, sharding = 1, self.sharding
        if self.mesh is not None:
            shards, sharding = self.mesh.shards, self.mesh.by_shard
        return jax.ShapeDtypeStruct((shards, block_bytes), np.uint8, sharding=sharding)

    def shard_step(
        self,
        model: Model,
        step: Callable[..., Any],
        *,
        lora: bool = False,
        steering: bool = False,
    ) -> Callable[..., Any]:
        """Return `step` as each device runs it on its shards; see `TensorMesh.shard_step`."""
        if self.mesh is None:
            return step
        return self.mesh.shard_step(model, step, lora=lora, steering=steering)
