"""Reads a checkpoint into a model's leaves: one tensor at a time, all headers checked first.

A converted folder has the leaves as they are; any other has tensors, of which they are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from forge_jax.checkpoint import orbax
from forge_jax.checkpoint.converted import FILE, WEIGHTS, Record, read_record
from forge_jax.checkpoint.folder import open_checkpoint
from forge_jax.checkpoint.matrix import StoredMatrix
from forge_jax.checkpoint.stored import FLOATS, StoredTensor, TensorSource
from forge_jax.checkpoint.weight_map import Tensor, WeightMap
from forge_jax.errors import CheckpointError
from forge_jax.files import shown
from forge_jax.models.decoder import Leaves, Model
from forge_jax.models.registry import find_architecture
from forge_kernels.linear import pack, pack_experts


@dataclass(frozen=True, eq=False)
class CheckedTensors:
    """A checkpoint whose headers have been found to hold all that a model needs."""

    parts: WeightMap  # leaf name -> stored tensors
    stored: Mapping[str, TensorSource]


@dataclass(frozen=True, eq=False)
class CheckedLeaves:
    """The same of a converted folder."""

    stored: Mapping[str, StoredTensor]  # by the name of the leaf


def check_weights(model: Model, folder: Path) -> CheckedTensors | CheckedLeaves:
    """Checks every name, shape and type from the files' headers; reads no data.

    Raises:
      CheckpointError: a file is missing or broken, or a tensor is missing or has the wrong shape or
        type; all that is wrong is listed.
    """
    record = read_record(folder)
    if record is not None:
        return _check_leaves(model, folder, record)
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
    return CheckedTensors(parts, stored)


def _check_leaves(model: Model, folder: Path, record: Record) -> CheckedLeaves:
    expected = dict(zip(model.names, model.leaves, strict=True))
    leaves = {
        name: (_described(record.leaves.get(name)), _described(expected.get(name)))
        for name in sorted(expected.keys() | record.leaves.keys())
    }
    faults = [
        f"leaf {shown(name)} is {found}, not {wanted}"
        for name, (found, wanted) in leaves.items()
        if found != wanted
    ]
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise CheckpointError(
            f"{folder / FILE} does not fit its config.json: " + "; ".join(faults[:5]) + more
        )
    return CheckedLeaves(orbax.open_arrays(folder / WEIGHTS, expected))


def _described(leaf: jax.ShapeDtypeStruct | None) -> str:
    return "missing" if leaf is None else f"{leaf.dtype.name}{list(leaf.shape)}"


def load_weights(
    model: Model, folder: Path, *, device: Any = None, progress: bool = True
) -> Leaves:
    """Reads the weights of `model` from the files in `folder`.

    Every name, shape and type is checked from the files' headers before the first byte of data is
    read. The host never holds more than the weights and one leaf. Tensors that the model does not
    use are ignored.

    Args:
      model: says which leaves, shapes and types; stored tensors are cast to the leaf's type.
      folder: of `model.safetensors`, else of `pytorch_model.bin`, or of an index and its shards; or
        a GGUF file; or a converted folder, whose leaves are read as they are.
      device: a `jax.Device` or a `Sharding`; JAX's default if None.
      progress: show a progress bar on a terminal.

    Returns:
      One array per leaf, in the order of `model.leaves`.

    Raises:
      CheckpointError: as `check_weights`.
    """
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
        for name, leaf in _leaves(model, checked, device):
            leaves[name] = leaf
            bar.update(leaf.nbytes)
    return tuple(leaves[name] for name in model.names)


def _leaves(
    model: Model, checked: CheckedTensors | CheckedLeaves, device: Any
) -> Iterator[tuple[str, jax.Array]]:
    if isinstance(checked, CheckedLeaves):
        hosts = _converted_leaves(checked)
    else:
        hosts = (
            leaf
            for name, parts in checked.parts.items()
            for leaf in _host_leaves(model, name, parts, checked.stored)
        )
    for name, host in hosts:
        # Waiting for each transfer keeps at most one leaf on the host.
        yield name, jax.block_until_ready(jax.device_put(host, device, may_alias=True))


def _converted_leaves(checked: CheckedLeaves) -> Iterator[tuple[str, np.ndarray]]:
    """As they are stored."""
    for name, stored in checked.stored.items():
        whole = StoredMatrix((Tensor(name, stored.shape),), checked.stored)
        yield name, whole.read(stored.shape, stored.dtype)


def _host_leaves(
    model: Model, name: str, parts: tuple[Tensor, ...], stored: Mapping[str, TensorSource]
) -> Iterator[tuple[str, np.ndarray]]:
    """The leaf `name`, and the scales beside it where it is packed into a format that has them."""
    packing = model.packings.get(name)
    if packing is None:
        leaf = model.leaves[model.names.index(name)]
        yield name, StoredMatrix(parts, stored).read(leaf.shape, leaf.dtype)
        return
    if packing.experts is None:
        weight, scale = pack(StoredMatrix(parts, stored), packing)
    else:
        each = _by_expert(parts, packing.experts)
        experts = [StoredMatrix(own, stored, expert) for expert, own in enumerate(each)]
        weight, scale = pack_experts(experts, packing)
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
