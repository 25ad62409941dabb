"""Reads a checkpoint into a model's leaves: one tensor at a time, all headers checked first.

A converted folder has the leaves as they are; any other has tensors, of which they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from forge_jax.checkpoint.mapped import map_arrays
from forge_jax.checkpoint.matrix import StoredMatrix
from forge_jax.errors import CheckpointError
from forge_jax.host.files import short_repr
from forge_jax.models.decoder import Leaves, Model, WeightForms
from forge_jax.models.registry import build_model, find_architecture
from forge_jax.models.weight_map import Tensor, WeightMap
from forge_jax.weights.block_types import KEY
from forge_jax.weights.blocks import BlockForm, by_piece, forms_by_piece, piece_name
from forge_jax.weights.forms import QuantizedForm, module_of, num_experts
from forge_jax.weights.partition import Partition, axis_of, matrix_of, partition_of, whole_of
from forge_jax.weights.rounding import round_matrix
from forge_jax.weights.shards import shard_of
from forge_jax.weights.stored import FLOATS, StoredTensor, TensorSource, shorter
from forge_jax.weights.tensors import MIDDLE, Matrix, check_matrix, read_matrices, read_order
from forge_kernels import cpu
from forge_kernels.blocks import Blocks, BlockValues
from forge_kernels.linear import (
    BlockPacking,
    Packing,
    arrange_blocks,
    pack,
    pack_blocks,
    pack_experts,
    pack_int4,
    pack_values,
    unpack_int4,
)
from forge_kernels.linear.blocks import Read
from forge_kernels.linear.files import PackedInFiles, PlainInFiles, ShortFileError, read_files
from forge_kernels.linear.packed import GROUP as INT4_GROUP
from forge_kernels.linear.panels import aligned_empty
from forge_kernels.linear.quantized import ARRAYS
from forge_kernels.threads import for_each

if TYPE_CHECKING:
    from forge_jax.step.mesh import TensorMesh

_COMPARED_ROWS = 4096  # at once
_TOGETHER_BYTES = 256 * 2**20  # of leaves that are read by one call


@dataclass(frozen=True, eq=False)
class CheckedTensors:
    """A checkpoint whose headers have been found to hold all that a model needs."""

    parts: WeightMap  # leaf name -> stored tensors
    stored: Mapping[str, TensorSource]


@dataclass(frozen=True, eq=False)
class CheckedLeaves:
    """The same of a converted folder.

    `whole`: the model that it holds, where that is for one device, and the weights are for several.
    """

    stored: Mapping[str, StoredTensor]  # by the name of the leaf
    whole: Model | None = None


def check_weights(model: Model, folder: Path) -> CheckedTensors | CheckedLeaves:
    """Checks every name, shape and type from the files' headers; reads no data.

    Raises:
      CheckpointError: a file is missing or broken, or a tensor is missing or has the wrong shape or
        type; all that is wrong is listed.
    """
    record = read_record(folder)
    if record is not None:
        return _check_leaves(model, folder, record)
    architecture, types = find_architecture(model.spec.architecture), model.spec.block_types
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

    def of_file(part: Tensor) -> Blocks | None:
        return None if types is None else types.blocks_of(part.name)

    faults = [
        fault
        for leaf, group in parts.items()
        for part in group
        for fault in _check(part, stored, of_file(part) or _as_stored(model.quantized.get(leaf)))
    ]
    if model.spec.tie_word_embeddings:
        faults += _undescribed("lm_head", stored)
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise CheckpointError(f"{folder} does not fit its config: " + "; ".join(faults[:5]) + more)
    return CheckedTensors(parts, stored)


def _check_leaves(model: Model, folder: Path, record: Record) -> CheckedLeaves:
    record.check_shards(model.shards)
    held, whole = model, None
    if record.shards != model.shards and model.blocks:
        raise CheckpointError(
            f"--tensor-parallel {model.shards}: {folder} has matrices in blocks, for one device: "
            f"convert the original model again with --tensor-parallel {model.shards}"
        )
    if record.shards != model.shards:
        forms = WeightForms(rounded=record.rounded)
        held = whole = build_model(model.spec, str(model.dtype), forms)
    expected = dict(zip(held.names, held.leaves, strict=True))
    leaves = {
        name: (_described(record.leaves.get(name)), _described(expected.get(name)))
        for name in sorted(expected.keys() | record.leaves.keys())
    }
    faults = [
        f"leaf {short_repr(name)} is {found}, not {wanted}"
        for name, (found, wanted) in leaves.items()
        if found != wanted
    ]
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise CheckpointError(
            f"{folder / FILE} does not fit its config.json: " + "; ".join(faults[:5]) + more
        )
    stored = {
        name: jax.ShapeDtypeStruct(stored_shape(held, name), leaf.dtype)
        for name, leaf in expected.items()
    }
    return CheckedLeaves(orbax.open_arrays(folder / WEIGHTS, stored), whole)


def stored_shape(model: Model, name: str) -> tuple[int, ...]:
    """Of a leaf's array in a converted folder: shards lie one after the other."""
    shape = model.leaves[model.names.index(name)].shape
    return shape if axis_of(name, model.spec, model.shards) is None else (model.shards, *shape)


def _described(leaf: jax.ShapeDtypeStruct | None) -> str:
    return "missing" if leaf is None else f"{leaf.dtype.name}{list(leaf.shape)}"


def load_weights(
    model: Model,
    folder: Path,
    *,
    device: Any = None,
    mesh: TensorMesh | None = None,
    mapped: bool = False,
    progress: bool = True,
) -> Leaves:
    """Reads the weights of `model` from the files in `folder`.

    Every name, shape and type is checked from the files' headers before the first byte of data is
    read. The host never holds more than the weights and one leaf; where the model is cut, the leaf
    as it is stored and a shard of it. Tensors that the model does not use are ignored.

    Args:
      model: says which leaves, shapes and types; stored tensors are cast to the leaf's type.
      folder: of `model.safetensors`, else of `pytorch_model.bin`, or of an index and its shards; or
        a GGUF file; or a converted folder, whose leaves are read as they are, of one that is for
        as many shards each shard by itself.
      device: a `jax.Device` or a `Sharding`; JAX's default if None.
      mesh: of a model with shards, and instead of `device`: where they go.
      mapped: `device` is a CPU, and leaves of a converted folder may stay in their files
        (`map_arrays`).
      progress: show a progress bar on a terminal.

    Returns:
      One array per leaf, in the order of `model.leaves`.

    Raises:
      CheckpointError: as `check_weights`; or the head is said to be the embedding and is not.
    """
    assert model.shards == (1 if mesh is None else mesh.shards)
    checked = check_weights(model, folder)
    _check_tied_head(model, folder, checked)
    leaves: dict[str, jax.Array] = {}
    with _bar(model, progress) as bar:
        if mesh is None:
            for some in _whole_leaves(model, checked, mapped=mapped):
                leaves |= _put(some, device)
                bar.update(sum(host.nbytes for host in some.values()))
            return tuple(leaves[name] for name in model.names)
        own = dict(mesh.own)
        parts: dict[str, list[jax.Array]] = {}
        for name, index, host in _host_shards(model, checked, list(own)):
            placed = parts.setdefault(name, [])
            placed.append(_put(host, own[index]))
            if len(placed) == len(own):
                leaves[name] = mesh.joined(model, name, parts.pop(name))
                bar.update(host.nbytes)
    return tuple(leaves[name] for name in model.names)


def read_shards(model: Model, folder: Path, *, progress: bool = True) -> dict[str, np.ndarray]:
    """The shards of every leaf of a model that is cut, on the host, as `stored_shape` says.

    Raises:
      CheckpointError: as `load_weights`.
    """
    checked = check_weights(model, folder)
    _check_tied_head(model, folder, checked)
    arrays = {
        name: np.empty(stored_shape(model, name), leaf.dtype)
        for name, leaf in zip(model.names, model.leaves, strict=True)
    }
    with _bar(model, progress) as bar:
        shards = _host_shards(model, checked, range(model.shards))
        for name, index, host in shards:
            is_cut = arrays[name].ndim > host.ndim
            if is_cut or index == 0:
                arrays[name][index if is_cut else ...] = host
            bar.update(host.nbytes / model.shards)
    return arrays


def _check_tied_head(model: Model, folder: Path, checked: CheckedTensors | CheckedLeaves) -> None:
    """Refuses a head that is not the embedding, though `tie_word_embeddings` says so.

    transformers compares the two, and computes with the head where they differ.
    """
    if not isinstance(checked, CheckedTensors) or not model.spec.tie_word_embeddings:
        return
    head = checked.stored.get("lm_head.weight")
    embedding = checked.stored["model.embed_tokens.weight"]
    if head is None or head == embedding or _same_values(head, embedding):
        return
    raise CheckpointError(
        f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from "
        "model.embed_tokens.weight: set tie_word_embeddings to false in config.json, "
        "or remove lm_head.weight"
    )


def _same_values(a: TensorSource, b: TensorSource) -> bool:
    if a.shape != b.shape or len(a.shape) != 2:
        return False
    rows, columns = a.shape
    for first in range(0, rows, _COMPARED_ROWS):
        size = min(_COMPARED_ROWS, rows - first), columns
        parts = [np.empty(size, each.dtype) for each in (a, b)]
        for each, part in zip((a, b), parts, strict=True):
            each.read_rows(part, first)
        if not np.array_equal(parts[0].astype(np.float32), parts[1].astype(np.float32)):
            return False
    return True


def _bar(model: Model, progress: bool) -> tqdm:
    return tqdm(
        total=model.param_bytes,
        desc="loading weights",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,  # None: only on a terminal
    )


def _whole_leaves(
    model: Model, checked: CheckedTensors | CheckedLeaves, *, mapped: bool
) -> Iterator[dict[str, np.ndarray]]:
    """All of them, some at a time."""
    views: dict[str, np.ndarray] = {}
    if mapped and isinstance(checked, CheckedLeaves):
        views = map_arrays(checked.stored)
        yield views
    names = [name for name in _own(checked) if name not in views]
    in_files: dict[str, PackedInFiles | PlainInFiles] = {}
    if cpu.identity() is not None:  # else there is no C++
        blocks = _blocks(model) if isinstance(checked, CheckedTensors) else ()
        found = {name: _in_files(model, name, checked) for name in names if name not in blocks}
        in_files = {name: leaf for name, leaf in found.items() if leaf is not None}
    yield from _read_together(in_files)
    for name in names:
        if name in in_files:
            continue
        if isinstance(checked, CheckedTensors):
            for leaf, host in _host_leaves(model, name, checked):
                yield {leaf: host}
        else:
            yield {name: _read_leaf(name, checked.stored)}  # as it is


def _own(checked: CheckedTensors | CheckedLeaves) -> Iterable[str]:
    return checked.parts if isinstance(checked, CheckedTensors) else checked.stored


def _in_files(
    model: Model, name: str, checked: CheckedTensors | CheckedLeaves
) -> PackedInFiles | PlainInFiles | None:
    """Where a leaf lies, if C++ can read it: as it is, or packed; None if not."""
    leaf = model.leaves[model.names.index(name)]
    if isinstance(checked, CheckedLeaves):
        parts: tuple[Tensor, ...] = (Tensor(name, checked.stored[name].shape),)
        packing = None
    elif name in model.quantized:
        return None
    else:
        parts, packing = checked.parts[name], model.packings.get(name)
    assert not isinstance(packing, BlockPacking)
    if packing is None:
        stretches = StoredMatrix(parts, checked.stored).stretches(np.dtype(leaf.dtype))
        return None if stretches is None else PlainInFiles(leaf.shape, leaf.dtype, stretches)
    each, experts = [parts], [None]
    if packing.experts is not None:
        each, experts = _by_expert(parts, packing.experts), range(packing.experts)
    matrices = [
        stretches
        for own, expert in zip(each, experts, strict=True)
        if (stretches := StoredMatrix(own, checked.stored, expert).stretches()) is not None
    ]
    return PackedInFiles(packing, matrices) if len(matrices) == len(each) else None


def _read_together(
    leaves: Mapping[str, PackedInFiles | PlainInFiles],
) -> Iterator[dict[str, np.ndarray]]:
    """Reads some leaves at a time: the memory that they are read into is what XLA:CPU adopts."""
    names = list(leaves)
    while names:
        some, total = [], 0
        while names and total < _TOGETHER_BYTES:
            some.append(names.pop(0))
            total += leaves[some[-1]].num_bytes
        try:
            found = read_files([leaves[name] for name in some])
        except ShortFileError as error:
            raise shorter(error.file) from None
        arrays: dict[str, np.ndarray] = {}
        for name, (weight, scale) in zip(some, found, strict=True):
            arrays[name] = weight
            if scale is not None:
                arrays[_scale_name(name)] = scale
        yield arrays


def _put(host: Any, device: Any) -> Any:
    """One array or several. Waits for the transfer, so that no more are on the host."""
    return jax.block_until_ready(jax.device_put(host, device, may_alias=True))


def _host_shards(
    model: Model, checked: CheckedTensors | CheckedLeaves, indices: Sequence[int]
) -> Iterator[tuple[str, int, np.ndarray]]:
    """(leaf, shard, its part) of a model that is cut, for each of its leaves and of `indices`.

    Where shards are stored, each is read for itself. Else a matrix is read whole, with what goes
    with it, and a part is made when the one before has been taken.
    """
    if isinstance(checked, CheckedLeaves) and checked.whole is None:
        for name, stored in checked.stored.items():
            leaf = model.leaves[model.names.index(name)]
            if len(stored.shape) == leaf.ndim:  # every device has all of it
                whole = _read_leaf(name, checked.stored)
                yield from ((name, index, whole) for index in indices)
                continue
            for index in indices:
                offset = stored.offset + index * leaf.size * leaf.dtype.itemsize
                shard = replace(stored, shape=leaf.shape, offset=offset)
                yield name, index, _read_leaf(name, {name: shard})
        return
    if isinstance(checked, CheckedTensors):
        for name in _blocks(model).keys() & checked.parts.keys():
            for index in indices:
                shard = _block_leaves(model, name, checked, index)
                yield from ((leaf, index, host) for leaf, host in shard)
    for name, whole in _whole_matrices(model, checked):
        partition = _partition_of(model, name, checked)
        for index in indices:
            if isinstance(whole, list):
                form = model.quantized[name]
                parts = [shard_of(each, form, partition, index) for each in whole]
                leaves = _matrix_leaves(model, name, parts.__getitem__)
            else:
                leaves = _in_form(
                    model, name, whole if partition is None else partition.shard(whole, index)
                )
            for leaf_name, host in leaves:
                yield leaf_name, index, host
        del whole  # before the next is read


def _whole_matrices(
    model: Model, checked: CheckedTensors | CheckedLeaves
) -> Iterator[tuple[str, np.ndarray | list[Matrix]]]:
    """The leaves of the model before it is cut, quantised ones with what goes with them.

    A list is of one matrix, or of those of all experts.

    Without those in blocks, of which a shard has its rows or columns read from the file.
    """
    if isinstance(checked, CheckedTensors):
        blocks, uncut = _blocks(model), build_model(model.spec, str(model.dtype))
        shapes = dict(zip(uncut.names, uncut.leaves, strict=True))
        for name, parts in checked.parts.items():
            if name in blocks:
                continue
            if name in model.quantized:
                count = num_experts(name, model.spec) or 1
                yield name, [_read_quantized(model, name, checked, i) for i in range(count)]
            else:
                stored = StoredMatrix(parts, checked.stored)
                yield name, stored.read(shapes[name].shape, shapes[name].dtype)
        return
    assert checked.whole is not None
    for name in checked.stored:
        if name in model.quantized:
            yield name, list(_stored_quantized(checked.whole, name, checked.stored))
        elif matrix_of(name) not in model.quantized:
            yield name, _read_leaf(name, checked.stored)


def _partition_of(
    model: Model, name: str, checked: CheckedTensors | CheckedLeaves
) -> Partition | None:
    """How a leaf is cut that may be a piece of a matrix."""
    whole = whole_of(name)
    partition = partition_of(whole, model.spec, model.shards)
    if partition is None or whole == name:
        return partition
    assert isinstance(checked, CheckedTensors)
    begin, number = 0, 0
    while (piece := piece_name(whole, number)) != name:
        begin += sum(part.shape[0] for part in checked.parts[piece])
        number += 1
    return partition.within(begin, begin + sum(part.shape[0] for part in checked.parts[name]))


def _stored_quantized(
    whole: Model, name: str, stored: Mapping[str, StoredTensor]
) -> Iterator[Matrix]:
    """The matrices of a converted folder as they were read from their checkpoint."""
    prefix, scheme = name.removesuffix("weight"), whole.quantized[name].scheme
    arrays = {
        part: _read_leaf(f"{prefix}{part}", stored)
        for part in ("weight", "scale", "zero", "order", "input_scale")
        if f"{prefix}{part}" in stored
    }
    for expert in range(num_experts(name, whole.spec) or 1):
        own = arrays
        if num_experts(name, whole.spec) is not None:
            own = {part: array[expert] for part, array in arrays.items()}
        values, scale = own["weight"], own["scale"]
        if scheme.values == "int4":
            values = unpack_int4(values, 2 * values.shape[1] // scale.shape[1])
        input_scale = own["input_scale"][0] if "input_scale" in own else None
        yield Matrix(values, scale, own.get("zero"), own.get("order"), input_scale)


def _read_leaf(name: str, stored: Mapping[str, StoredTensor]) -> np.ndarray:
    shape, dtype = stored[name].shape, stored[name].dtype
    return StoredMatrix((Tensor(name, shape),), stored).read(shape, dtype)


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
    model: Model, name: str, checked: CheckedTensors
) -> Iterator[tuple[str, np.ndarray]]:
    """The leaf `name`, and those beside it: scales and the like, where its form has them."""
    parts, stored = checked.parts[name], checked.stored
    if name in model.quantized:
        yield from _matrix_leaves(model, name, partial(_read_quantized, model, name, checked))
        return
    if name in _blocks(model):
        yield from _block_leaves(model, name, checked)
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


def _read_quantized(model: Model, name: str, checked: CheckedTensors, expert: int) -> Matrix:
    """The values of the checkpoint, or its floats as they are rounded; of one expert, if any."""
    form, stored, parts = model.quantized[name], checked.stored, checked.parts[name]
    count = num_experts(name, model.spec)
    if count is not None:
        parts = _by_expert(parts, count)[expert]
    if form.rounded:
        return round_matrix(StoredMatrix(parts, stored, expert), form.scheme)
    modules = {module_of(part.name): (part.shape[0], part.shape[1]) for part in parts}
    matrix = read_matrices(form.scheme, modules, stored)
    if f"{name.removesuffix('weight')}bias" not in model.names:
        _check_no_bias(modules, stored)
    down = name.replace(".gate_up.", ".down.")
    following = model.quantized.get(down)
    if count is None or down == name or following is None or not following.follows:
        return matrix
    (part,) = _by_expert(checked.parts[down], count)[expert]
    scheme, shape = following.scheme, (part.shape[0], part.shape[1])
    order = read_order(scheme, module_of(part.name), shape, stored)
    return matrix if order is None else matrix.rows(np.concatenate([order, order + len(order)]))


def _matrix_leaves(
    model: Model, name: str, read: Callable[[int], Matrix]
) -> Iterator[tuple[str, np.ndarray]]:
    """The leaf `name`, and what goes with it, of one matrix or of those of experts."""
    count, form = num_experts(name, model.spec), model.quantized[name]
    if count is None:
        yield from _leaves_of(model, name, read(0))
        return
    arrays = _empty_leaves(model, name)

    def place(expert: int) -> None:
        for leaf, host in _leaves_of(model, name, read(expert)):
            arrays[leaf][expert] = host

    if form.rounded:  # by threads of its own
        for expert in range(count):
            place(expert)
    else:
        for_each(place, range(count))
    yield from arrays.items()


def _leaves_of(model: Model, name: str, matrix: Matrix) -> Iterator[tuple[str, np.ndarray]]:
    """The values of one matrix in the form of the leaf, and what goes with them."""
    form, prefix = model.quantized[name], name.removesuffix("weight")
    scheme = form.scheme
    if form.is_ordered:
        assert matrix.order is not None
        yield f"{prefix}order", matrix.order
    packing = model.packings.get(name)
    if packing is not None:
        assert isinstance(packing, Packing)
        weight, scale = _pack_matrix(matrix, replace(packing, experts=None), name)
        yield name, weight
        yield _scale_name(name), scale
        return
    values = matrix.values
    if scheme.values == "int4":
        values = pack_int4(values, form.group(values.shape[1]))
    elif scheme.values == "fp8":
        values = values.view(np.uint8)
    yield name, np.ascontiguousarray(values)
    yield _scale_name(name), np.ascontiguousarray(matrix.scale)
    if matrix.zero is not None:
        yield f"{prefix}zero", np.ascontiguousarray(matrix.zero)
    if matrix.input_scale is not None:
        yield f"{prefix}input_scale", matrix.input_scale.reshape(1)


def _block_leaves(
    model: Model, name: str, checked: CheckedTensors, index: int = 0
) -> Iterator[tuple[str, np.ndarray]]:
    """A matrix of a GGUF file, or shard `index` of it: numbers and scales as they are there."""
    count = num_experts(name, model.spec)
    if count is None:
        yield from _in_blocks(model, name, checked.parts[name], checked, index)
        return
    arrays = _empty_leaves(model, name)
    for expert, parts in enumerate(_by_expert(checked.parts[name], count)):
        for leaf, host in _in_blocks(model, name, parts, checked, index):
            arrays[leaf][expert] = host
    yield from arrays.items()


def _in_blocks(
    model: Model, name: str, parts: tuple[Tensor, ...], checked: CheckedTensors, index: int
) -> Iterator[tuple[str, np.ndarray]]:
    """One matrix of these parts."""
    form = _blocks(model)[name]
    weights = [cast(GGUFWeight, checked.stored[part.name]) for part in parts]
    outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    read, partition = partial(read_blocks, weights), _partition_of(model, name, checked)
    if partition is not None and partition.axis == -2:
        read, outputs = partial(_rows_of_shard, read, partition, index), partition.size
    elif partition is not None:
        [(begin, end)] = partition.parts[index]
        whole, inputs = read, partition.size

        def read(rows: np.ndarray) -> BlockValues:
            return whole(rows).columns(begin, end, form.blocks)

    packing = model.packings.get(name)
    if isinstance(packing, BlockPacking):
        yield name, pack_blocks(read, replace(packing, experts=None))
        return
    arrays = arrange_blocks(read, form.quantization(outputs, inputs))
    for kind, array in arrays.items():
        yield name.removesuffix("weight") + kind, array


def _empty_leaves(model: Model, name: str) -> dict[str, np.ndarray]:
    """The leaf `name` and those beside it, to be filled expert by expert."""
    shapes = zip(model.names, model.leaves, strict=True)
    return {
        leaf: aligned_empty(shape.shape, shape.dtype)
        for leaf, shape in shapes
        if matrix_of(leaf) == name
    }


def _rows_of_shard(read: Read, partition: Partition, index: int, rows: np.ndarray) -> BlockValues:
    """Those that shard `index` knows by these numbers; zeros, where it has more than there are."""
    theirs = np.concatenate([np.arange(begin, end) for begin, end in partition.parts[index]])
    exists = rows < len(theirs)
    found = read(theirs[np.where(exists, rows, 0)])
    return found if exists.all() else found.only(exists)


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
    def has(part: Tensor) -> bool:
        module = module_of(part.name)
        return part.name in stored or any(f"{module}.{name}" in stored for name in _QUANTISED)

    return sum(not has(part) for group in parts.values() for part in group)


def _scale_name(weight: str) -> str:
    return weight.removesuffix("weight") + "scale"


def _as_stored(form: QuantizedForm | None) -> QuantizedForm | None:
    """What the checkpoint has of it; None: floats."""
    return None if form is None or form.rounded else form


def _check(
    part: Tensor, stored: Mapping[str, TensorSource], form: Blocks | QuantizedForm | None
) -> list[str]:
    if isinstance(form, QuantizedForm):
        if len(part.shape) != 2:
            return [
                f"{part.name} has the quantised matrices of all experts of a layer, which is "
                "supported where each has tensors of its own"
            ]
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
        isinstance(found, GGUFWeight) and found.stored.format.blocks == form
    ):
        faults.append(f"tensor {part.name} is not of the type that {KEY} says")
    return faults


# Tensors that only quantised modules have.
_QUANTISED = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")


def _undescribed(module: str, stored: Mapping[str, TensorSource]) -> list[str]:
    """What is wrong with a module that its tensors, but not the config, say is quantised."""
    for name in _QUANTISED:
        if f"{module}.{name}" in stored:
            return [
                f"{module} is quantised (there is a tensor {module}.{name}), but "
                "quantization_config does not say how"
            ]
    return []
