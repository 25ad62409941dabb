"""Reads a checkpoint into a model's leaves: one tensor at a time, all headers checked first.

A converted folder has the leaves as they are; any other has tensors, of which they are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np
from tqdm import tqdm

from forge_jax.checkpoint import orbax
from forge_jax.checkpoint.converted import FILE, WEIGHTS, Record, read_record
from forge_jax.checkpoint.folder import open_checkpoint
from forge_jax.checkpoint.gguf.weights import GGUFWeight, read_blocks
from forge_jax.checkpoint.matrix import StoredMatrix
from forge_jax.checkpoint.stored import FLOATS, StoredTensor, TensorSource
from forge_jax.checkpoint.weight_map import Tensor, WeightMap
from forge_jax.errors import CheckpointError
from forge_jax.files import shown
from forge_jax.models.decoder import Leaves, Model
from forge_jax.models.registry import build_model, decoded, find_architecture
from forge_jax.parallel.rules import cut_of
from forge_jax.quant.blocks import KEY, BlockForm, by_piece, forms_by_piece
from forge_jax.quant.forms import QuantizedForm, module_of
from forge_jax.quant.rounding import round_matrix
from forge_jax.quant.tensors import MIDDLE, Matrix, check_matrix, read_matrices
from forge_kernels.linear import (
    BlockPacking,
    Packing,
    arrange_blocks,
    pack,
    pack_blocks,
    pack_experts,
    pack_int4,
    pack_values,
)
from forge_kernels.linear.packed import GROUP as INT4_GROUP
from forge_kernels.linear.quantized import ARRAYS

if TYPE_CHECKING:
    from forge_jax.parallel.mesh import TensorMesh


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
    parts, blocks = by_piece(architecture.weights(model.spec), model.blocks), _blocks(model)
    beside = {
        leaf.removesuffix("weight") + each
        for leaf in (*model.packings, *model.quantized, *blocks)
        for each in ("order", *ARRAYS[1:])
    }
    unmapped = (set(parts) ^ set(model.names)) - beside
    assert not unmapped, f"no map: {unmapped}"
    stored = open_checkpoint(folder)
    if architecture.other_weights is not None:
        other = by_piece(architecture.other_weights(model.spec), model.blocks)
        parts = min(parts, other, key=lambda parts: _num_missing(parts, stored))
    faults = [
        fault
        for leaf, group in parts.items()
        for part in group
        for fault in _check(part, stored, blocks.get(leaf) or _as_stored(model.quantized.get(leaf)))
    ]
    if model.spec.tie_word_embeddings:
        faults += _undescribed("lm_head", stored)
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
        a GGUF file; or a converted folder, whose leaves are read as they are.
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
            assert isinstance(checked, CheckedTensors), "a converted folder, for one device"
            for name, leaf in _sharded_leaves(model, mesh, checked):
                leaves[name] = leaf
                bar.update(leaf.addressable_shards[0].data.nbytes)
            return tuple(leaves[name] for name in model.names)
        for name, host in _whole_leaves(model, checked):
            leaves[name] = _put(host, device)
            bar.update(host.nbytes)
    return tuple(leaves[name] for name in model.names)


def _whole_leaves(
    model: Model, checked: CheckedTensors | CheckedLeaves
) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(checked, CheckedTensors):
        for name, parts in checked.parts.items():
            yield from _host_leaves(model, name, parts, checked.stored)
        return
    for name, stored in checked.stored.items():  # as they are
        whole = StoredMatrix((Tensor(name, stored.shape),), checked.stored)
        yield name, whole.read(stored.shape, stored.dtype)


def _put(host: np.ndarray, device: Any) -> jax.Array:
    """Waits for the transfer, so that there is at most one leaf on the host."""
    return jax.block_until_ready(jax.device_put(host, device, may_alias=True))


def _sharded_leaves(
    model: Model, mesh: TensorMesh, checked: CheckedTensors
) -> Iterator[tuple[str, jax.Array]]:
    """The leaves of a model that is cut: each is read whole, and its shards go to their devices."""
    uncut = build_model(decoded(model.spec), str(model.dtype))
    shapes = dict(zip(uncut.names, uncut.leaves, strict=True))
    for name, parts in checked.parts.items():
        leaf = shapes[name]
        whole = StoredMatrix(parts, checked.stored).read(leaf.shape, leaf.dtype)
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
    assert not isinstance(packing, BlockPacking), "blocks that are cut"
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
    """The leaf `name`, and those beside it: scales and the like, where its form has them."""
    if name in model.quantized:
        yield from _quantized_leaves(model, name, parts, stored)
        return
    if name in _blocks(model):
        yield from _block_leaves(model, name, parts, stored)
        return
    packing = model.packings.get(name)
    assert not isinstance(packing, BlockPacking)
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


def _quantized_leaves(
    model: Model, name: str, parts: tuple[Tensor, ...], stored: Mapping[str, TensorSource]
) -> Iterator[tuple[str, np.ndarray]]:
    """The values of the checkpoint in the form of the leaf, and what goes with them."""
    form, prefix = model.quantized[name], name.removesuffix("weight")
    scheme = form.scheme
    modules = {module_of(part.name): (part.shape[0], part.shape[1]) for part in parts}
    if form.rounded:
        matrix = round_matrix(StoredMatrix(parts, stored), scheme)
    else:
        matrix = read_matrices(scheme, modules, stored)
        if f"{prefix}bias" not in model.names:
            _check_no_bias(modules, stored)
    if matrix.order is not None:
        yield f"{prefix}order", matrix.order
    packing = model.packings.get(name)
    if packing is not None:
        assert isinstance(packing, Packing)
        weight, scale = _pack_matrix(matrix, packing, name)
        yield name, weight
        yield _scale_name(name), scale
        return
    values = matrix.values
    if scheme.values == "int4":
        values = pack_int4(values, scheme.block[1] or values.shape[1])
    elif scheme.values == "fp8":
        values = values.view(np.uint8)
    yield name, np.ascontiguousarray(values)
    yield _scale_name(name), np.ascontiguousarray(matrix.scale)
    if matrix.zero is not None:
        yield f"{prefix}zero", np.ascontiguousarray(matrix.zero)
    if matrix.input_scale is not None:
        yield f"{prefix}input_scale", matrix.input_scale.reshape(1)


def _block_leaves(
    model: Model, name: str, parts: tuple[Tensor, ...], stored: Mapping[str, TensorSource]
) -> Iterator[tuple[str, np.ndarray]]:
    """A matrix of a GGUF file, its numbers and scales as they are there."""
    weights = [cast(GGUFWeight, stored[part.name]) for part in parts]
    read, packing = partial(read_blocks, weights), model.packings.get(name)
    if isinstance(packing, BlockPacking):
        yield name, pack_blocks(read, packing)
        return
    outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    arrays = arrange_blocks(read, _blocks(model)[name].quantization(outputs, inputs))
    for kind, array in arrays.items():
        yield name.removesuffix("weight") + kind, array


def _blocks(model: Model) -> dict[str, BlockForm]:
    return forms_by_piece(model.blocks)


def _check_no_bias(modules: Iterable[str], stored: Mapping[str, TensorSource]) -> None:
    """Some writers give each matrix a bias of zeros; others would be left out."""
    for name in (f"{module}.bias" for module in modules):
        found = stored.get(name)
        if found is None:
            continue
        values = StoredMatrix((Tensor(name, found.shape),), stored).read(found.shape, np.float32)
        if values.any():
            raise CheckpointError(f"tensor {name} is not 0, but the model has no bias there")


def _pack_matrix(matrix: Matrix, packing: Packing, name: str) -> tuple[np.ndarray, np.ndarray]:
    if packing.format == "int8":
        return pack_values(matrix.values, matrix.scale[:, 0], packing)
    columns = packing.inputs // matrix.scale.shape[1]
    scale = np.repeat(matrix.scale, columns // INT4_GROUP, axis=1)
    try:
        return pack_values(matrix.values.astype(np.int8) - MIDDLE, scale, packing)
    except ValueError as error:
        raise CheckpointError(
            f"the CPU kernels cannot hold {name}: {error}; serve it with --kernels xla"
        ) from error


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


def _as_stored(form: QuantizedForm | None) -> QuantizedForm | None:
    """What the checkpoint has of it; None: floats."""
    return None if form is None or form.rounded else form


def _check(
    part: Tensor, stored: Mapping[str, TensorSource], form: BlockForm | QuantizedForm | None
) -> list[str]:
    if isinstance(form, QuantizedForm):
        shape = part.shape[0], part.shape[1]
        return check_matrix(form.scheme, module_of(part.name), shape, stored)
    undescribed = _undescribed(module_of(part.name), stored)
    if undescribed:
        return undescribed
    found = stored.get(part.name)
    if found is None:
        return [f"tensor {part.name} is missing"]
    faults = []
    if found.shape != part.shape:
        faults.append(f"tensor {part.name} has shape {found.shape}, not {part.shape}")
    if found.dtype not in FLOATS:
        faults.append(f"tensor {part.name} is {found.dtype}, which is not supported")
    if form is not None and not (
        isinstance(found, GGUFWeight) and found.stored.format.blocks == form.blocks
    ):
        faults.append(f"tensor {part.name} is not of the type that {KEY} says")
    return faults


def _undescribed(module: str, stored: Mapping[str, TensorSource]) -> list[str]:
    """What is wrong with a module that its tensors, but not the config, say is quantised."""
    for name in ("qweight", "weight_packed", "weight_scale", "weight_scale_inv"):
        if f"{module}.{name}" in stored:
            return [
                f"{module} is quantised (there is a tensor {module}.{name}), but "
                "quantization_config does not say how"
            ]
    return []
