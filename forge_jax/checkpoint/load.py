"""Reads a checkpoint into a model's leaves: one tensor at a time, all headers checked first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from tqdm import tqdm

from forge_jax.checkpoint.folder import open_checkpoint
from forge_jax.checkpoint.stored import FLOATS, TensorSource
from forge_jax.checkpoint.weight_map import Tensor, WeightMap
from forge_jax.errors import CheckpointError
from forge_jax.models.decoder import Leaves, Model
from forge_jax.models.registry import build_model, find_architecture
from forge_jax.parallel.rules import cut_of
from forge_kernels.linear import pack, pack_experts
from forge_kernels.linear.packed import aligned_empty

if TYPE_CHECKING:
    from forge_jax.parallel.mesh import TensorMesh


@dataclass(frozen=True, eq=False)
class CheckedWeights:
    """A checkpoint whose headers have been found to hold all that a model needs."""

    parts: WeightMap  # leaf name -> stored tensors
    stored: Mapping[str, TensorSource]


def check_weights(model: Model, folder: Path) -> CheckedWeights:
    """Checks every name, shape and type from the files' headers; reads no data.

    Raises:
      CheckpointError: a file is missing or broken, or a tensor is missing or has the wrong shape or
        type; all that is wrong is listed.
    """
    architecture = find_architecture(model.spec.architecture)
    parts = architecture.weights(model.spec)
    scales = {_scale_name(name) for name, packing in model.packings.items() if packing.scale}
    assert set(parts) | scales == set(model.names), f"no map: {set(parts) ^ set(model.names)}"
    stored = open_checkpoint(folder)
    if architecture.other_weights is not None:
        other = architecture.other_weights(model.spec)
        parts = min(parts, other, key=lambda parts: _num_missing(parts, stored))
    faults = [fault for group in parts.values() for part in group for fault in _check(part, stored)]
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise CheckpointError(f"{folder} does not fit its config: " + "; ".join(faults[:5]) + more)
    return CheckedWeights(parts, stored)


def load_weights(
    model: Model,
    folder: Path,
    *,
    device: Any = None,
    mesh: TensorMesh | None = None,
    progress: bool = True,
) -> Leaves:
    """Reads the weights of `model` from the files in `folder`.

    Every name, shape and type is checked from the files' headers before the first byte of data is
    read. The host never holds more than the weights and one leaf; where the model is cut, the leaf
    as it is stored and a shard of it. Tensors that the model does not use are ignored.

    Args:
      model: says which leaves, shapes and types; stored tensors are cast to the leaf's type.
      folder: of `model.safetensors`, else of `pytorch_model.bin`, or of an index and its shards; or
        a GGUF file.
      device: a `jax.Device` or a `Sharding`; JAX's default if None.
      mesh: of a model with shards, and instead of `device`: where they go.
      progress: show a progress bar on a terminal.

    Returns:
      One array per leaf, in the order of `model.leaves`.

    Raises:
      CheckpointError: as `check_weights`.
    """
    assert model.shards == (1 if mesh is None else mesh.shards)
    checked = check_weights(model, folder)
    leaves: dict[str, jax.Array] = {}
    bar = tqdm(
        total=model.param_bytes,
        desc="loading weights",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,  # None: only on a terminal
    )
    with bar:
        if mesh is not None:
            for leaf_name, leaf in _sharded_leaves(model, mesh, checked):
                leaves[leaf_name] = leaf
                bar.update(leaf.addressable_shards[0].data.nbytes)
            return tuple(leaves[name] for name in model.names)
        for name, parts in checked.parts.items():
            for leaf_name, host in _host_leaves(model, name, parts, checked.stored):
                leaves[leaf_name] = _put(host, device)
                bar.update(host.nbytes)
    return tuple(leaves[name] for name in model.names)


def _put(host: np.ndarray, device: Any) -> jax.Array:
    """Waits for the transfer, so that there is at most one leaf on the host."""
    return jax.block_until_ready(jax.device_put(host, device, may_alias=True))


def _sharded_leaves(
    model: Model, mesh: TensorMesh, checked: CheckedWeights
) -> Iterator[tuple[str, jax.Array]]:
    """The leaves of a model that is cut: each is read whole, and its shards go to their devices."""
    uncut = build_model(model.spec, str(model.dtype))
    shapes = dict(zip(uncut.names, uncut.leaves, strict=True))
    for name, parts in checked.parts.items():
        leaf = shapes[name]
        whole = _read_matrix(parts, checked.stored, leaf.shape, leaf.dtype)
        cut = cut_of(name, model.spec, model.shards)
        shards: dict[str, list[jax.Array]] = {}
        for index, device in mesh.own:
            part = whole if cut is None else cut.shard(whole, index)
            for leaf_name, host in _in_form(model, name, part):
                shards.setdefault(leaf_name, []).append(_put(host, device))
        for leaf_name, arrays in shards.items():
            described = mesh.leaf(model, leaf_name)
            yield (
                leaf_name,
                jax.make_array_from_single_device_arrays(
                    described.shape, described.sharding, arrays
                ),
            )


def _in_form(model: Model, name: str, plain: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The leaf `name`, packed if the model has it so, and then its scales."""
    packing = model.packings.get(name)
    if packing is None:
        yield name, plain
        return
    weight, scale = (pack if packing.experts is None else pack_experts)(plain, packing)
    yield name, weight
    if scale is not None:
        yield _scale_name(name), scale


def _host_leaves(
    model: Model, name: str, parts: tuple[Tensor, ...], stored: Mapping[str, TensorSource]
) -> Iterator[tuple[str, np.ndarray]]:
    """The leaf `name`, and the scales beside it where it is packed into a format that has them."""
    packing = model.packings.get(name)
    if packing is None:
        leaf = model.leaves[model.names.index(name)]
        yield name, _read_matrix(parts, stored, leaf.shape, leaf.dtype)
        return
    shape = packing.outputs, packing.inputs
    if packing.experts is None:
        weight, scale = pack(_read_matrix(parts, stored, shape, model.dtype), packing)
    else:
        # One expert at a time is in both forms.
        plain = (
            _read_matrix(each, stored, shape, model.dtype, expert)
            for expert, each in enumerate(_by_expert(parts, packing.experts))
        )
        weight, scale = pack_experts(plain, packing)
    yield name, weight
    if scale is not None:
        yield _scale_name(name), scale


def _by_expert(parts: tuple[Tensor, ...], experts: int) -> list[tuple[Tensor, ...]]:
    """The tensors that have something of each expert."""
    if len(parts) == 1:
        return [parts] * experts
    size = len(parts) // experts
    return [parts[size * i : size * (i + 1)] for i in range(experts)]


def _num_missing(parts: WeightMap, stored: Mapping[str, TensorSource]) -> int:
    return sum(part.name not in stored for group in parts.values() for part in group)


def _scale_name(weight: str) -> str:
    return weight.removesuffix("weight") + "scale"


def _check(part: Tensor, stored: Mapping[str, TensorSource]) -> list[str]:
    found = stored.get(part.name)
    if found is None:
        return [f"tensor {part.name} is missing"]
    faults = []
    if found.shape != part.shape:
        faults.append(f"tensor {part.name} has shape {found.shape}, not {part.shape}")
    if found.dtype not in FLOATS:
        faults.append(f"tensor {part.name} is {found.dtype}, which is not supported")
    return faults


def _read_matrix(
    parts: tuple[Tensor, ...],
    stored: Mapping[str, TensorSource],
    shape: tuple[int, ...],
    dtype: np.dtype,
    expert: int | None = None,
) -> np.ndarray:
    """The tensors one below the other; of those with an axis of experts all, or this one alone."""
    host = aligned_empty(shape, dtype)
    rows = host.reshape(-1, shape[-1]) if host.ndim == 3 else host
    row = 0
    for part in parts:
        wanted = part.shape[::-1] if part.transpose else part.shape
        if len(wanted) == 3 and expert is not None:
            wanted = wanted[1:]
        end = row + (wanted[0] * wanted[1] if len(wanted) == 3 else wanted[0])
        view = rows[row:end].reshape(wanted)
        stored[part.name].read_into(view.T if part.transpose else view, expert=expert)
        row = end
    assert row == len(rows), (row, shape)
    return host
