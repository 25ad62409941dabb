"""Placement of one model's arrays: on one device, or on the devices of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from forge_jax.errors import ConfigError
from forge_jax.models.kv import KV
from forge_jax.step.mesh import TensorMesh

if TYPE_CHECKING:
    from forge_jax.config import EngineConfig
    from forge_jax.models.decoder import Model
    from forge_jax.step.kv_cache import KVShape


@dataclass(frozen=True)
class Placement:
    """The device of a model, or the mesh that shares it, of which `device` is one."""

    device: jax.Device
    mesh: TensorMesh | None = None

    @classmethod
    def of(cls, devices: Sequence[jax.Device]) -> Placement:
        """Return the placement on a device, or on a mesh of several."""
        return cls(devices[0], TensorMesh.of(devices) if len(devices) > 1 else None)

    @property
    def devices(self) -> list[jax.Device]:
        return [self.device] if self.mesh is None else self.mesh.devices

    @cached_property
    def own_devices(self) -> list[jax.Device]:
        """The devices of this process."""
        return [each for each in self.devices if each.process_index == jax.process_index()]

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


def choose_placements(config: EngineConfig, device: jax.Device) -> tuple[Placement, ...]:
    """Return the placement of each stage of `--pipeline-parallel`; one without stages.

    A stage has `--tensor-parallel` devices. A host's devices start at `device`, and come after
    those of all hosts with a lower rank.

    Raises:
      ConfigError: if there are too few devices, or the other hosts are not connected.
    """
    parallel = config.parallel
    hosts, size = parallel.num_hosts, parallel.tensor_parallel
    if parallel.num_devices == 1:
        return (Placement(device),)
    if hosts > 1 and jax.process_count() == 1:
        raise ConfigError(
            "--num-hosts works with forge-jax serve only, whose engine process can be replaced if "
            "a host is lost"
        )
    devices = jax.local_devices(backend=device.platform)
    first, count = devices.index(device), parallel.num_devices // hosts
    if first + count > len(devices):
        raise ConfigError(_too_few(config, device.platform, first, len(devices), count))
    of_hosts = [
        [each for each in jax.devices(device.platform) if each.process_index == host]
        for host in range(hosts)
    ]
    chosen = [each for own in of_hosts for each in own[first : first + count]]
    return tuple(Placement.of(chosen[at : at + size]) for at in range(0, len(chosen), size))


def _too_few(config: EngineConfig, platform: str, first: int, found: int, count: int) -> str:
    """Return the error if `count` devices from `first` on are needed, but a host has `found`."""
    hosts, stages = config.parallel.num_hosts, config.parallel.pipeline_parallel
    options = f"--tensor-parallel {config.parallel.tensor_parallel}"
    if stages > 1:
        options += f" and --pipeline-parallel {stages}"
    most = hosts * (found - first) // stages
    if platform == "cpu":
        remedy = (
            f"XLA_FLAGS=--xla_force_host_platform_device_count={first + count} makes that many of "
            "a CPU, for tests"
        )
    elif most:
        remedy = f"use at most --tensor-parallel {most}, or a lower --device"
    else:
        remedy = "use fewer stages, or a lower --device"
    host = "" if hosts == 1 else f" on this host, which needs {count}"
    return f"{options}: from device {first} on there are {found - first}{host}: {remedy}"
