"""Loads a checkpoint as a model's leaves, one tensor at a time, after checking all headers.

A converted folder stores the leaves themselves. Any other checkpoint stores tensors, from which the
readers of each weight format create the leaves (`forge_jax.checkpoint.readers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.dtypes import itemsize_bits
from tqdm import tqdm

from forge_jax.checkpoint.converted import read_record
from forge_jax.checkpoint.decoded import with_decoded
from forge_jax.checkpoint.folder import open_checkpoint
from forge_jax.checkpoint.mapped import map_arrays
from forge_jax.checkpoint.readers import (
    ConvertedReader,
    FloatReader,
    LeafReader,
    Shard,
    Tensors,
    leaf_readers,
    undescribed_module,
)
from forge_jax.checkpoint.readers.converted import stored_shape
from forge_jax.checkpoint.readers.floats import QUANTIZED_TENSORS
from forge_jax.checkpoint.readers.leaf import beside
from forge_jax.checkpoint.text_side import text_tensors
from forge_jax.errors import CheckpointError
from forge_jax.host.progress import progress_bar
from forge_jax.models.decoder import Leaves, Model
from forge_jax.models.families.multimodal import TextSide
from forge_jax.models.plugins import find_architecture
from forge_jax.models.weight_map import Tensor, WeightMap
from forge_jax.weights.formats import tensors_by_piece
from forge_jax.weights.partition import BESIDE
from forge_jax.weights.quantized import module_of
from forge_jax.weights.stored import ArrayTensor, TensorSource, shorter
from forge_kernels import cpu
from forge_kernels.linear.files import PackedInFiles, PlainInFiles, ShortFileError, read_files

if TYPE_CHECKING:
    from forge_jax.step.mesh import TensorMesh

_COMPARED_ROWS = 4096  # rows compared at once
_TOGETHER_BYTES = 256 * 2**20  # bytes of leaves read by one call


@dataclass(frozen=True, eq=False)
class TensorReader:
    """A checkpoint whose headers have everything that a model needs."""

    tensors: Tensors
    leaves: Mapping[str, LeafReader]

    def shards(self, indices: Sequence[int]) -> Iterator[Shard]:
        """Yield the parts of all leaves that belong to the devices `indices`."""
        for reader in self.leaves.values():
            yield from reader.shards(indices)


Checked = TensorReader | ConvertedReader


def check_weights(model: Model, folder: Path) -> Checked:
    """Check every name, shape and type in the files' headers, without reading data.

    Raises:
      CheckpointError: a file is missing or broken, or a tensor is missing or has the wrong shape or
        type. The message lists the first five faults.
    """
    record = read_record(folder)
    if record is not None:
        return ConvertedReader.open(model, folder, record)
    return _check_tensors(
        model, open_checkpoint(folder), folder, f"{folder} does not match its config.json"
    )


def _check_tensors(
    model: Model, stored: Mapping[str, TensorSource], where: Path, complaint: str
) -> TensorReader:
    if isinstance(find_architecture(model.spec.architecture), TextSide):
        stored = text_tensors(stored, where)
    return _check_parts(model, _weight_map(model, stored), stored, complaint)


def _check_parts(
    model: Model, parts: WeightMap, stored: Mapping[str, TensorSource], complaint: str
) -> TensorReader:
    with_floats, faults = with_decoded(model, parts, stored)
    tensors = Tensors(parts, with_floats)
    readers = leaf_readers(model, tensors)
    faults += [fault for reader in readers.values() for fault in reader.faults()]
    if model.spec.tie_word_embeddings:
        faults += undescribed_module("lm_head", stored)
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise CheckpointError(f"{complaint}: " + "; ".join(faults[:5]) + more)
    return TensorReader(tensors, readers)


def _weight_map(model: Model, stored: Mapping[str, TensorSource]) -> WeightMap:
    """Return the tensors of each leaf, in the layout with the fewest missing tensors."""
    architecture = find_architecture(model.spec.architecture)
    layouts = [
        tensors_by_piece(layout(model.spec), model.matrices)
        for layout in architecture.layouts(model.spec)
    ]
    if model.stage is not None:
        layouts = [
            {leaf: parts for leaf, parts in layout.items() if model.stage.owns(leaf)}
            for layout in layouts
        ]
    others = {beside(leaf, each) for leaf in model.pieces for each in BESIDE}
    unmapped = (set(layouts[0]) ^ set(model.names)) - others
    assert not unmapped, f"no map: {unmapped}"
    return min(layouts, key=lambda parts: _num_missing(parts, stored))


def _num_missing(parts: WeightMap, stored: Mapping[str, TensorSource]) -> int:
    def has(part: Tensor) -> bool:
        module = module_of(part.name)
        if part.name in stored:
            return stored[part.name].shape == part.shape
        return any(f"{module}.{n}" in stored for n in QUANTIZED_TENSORS)

    return sum(not has(part) for group in parts.values() for part in group)


def load_weights(
    model: Model,
    folder: Path,
    *,
    device: Any = None,
    mesh: TensorMesh | None = None,
    mapped: bool = False,
    progress: bool = True,
) -> Leaves:
    """Read the weights of `model` from the files in `folder`.

    Every name, shape and type in the files' headers is checked before any data is read. The host
    never holds more than the weights and one leaf; if the model is split, one stored leaf and one
    shard of it. Tensors that the model does not use are ignored.

    Args:
      model: the leaves, shapes and types; stored tensors are cast to the leaf's type.
      folder: a GGUF file, or a folder with `model.safetensors`, `pytorch_model.bin`, or an index
        and its shards. The leaves of a converted folder are read unchanged, each shard separately
        if it was converted for the same number of shards.
      device: a `jax.Device` or a `Sharding`; None is JAX's default.
      mesh: the placement of a split model's shards; replaces `device`.
      mapped: True if `device` is a CPU and leaves of a converted folder may stay in their files
        (`map_arrays`).
      progress: show a progress bar on a terminal.

    Returns:
      One array per leaf, in the order of `model.leaves`.

    Raises:
      CheckpointError: as in `check_weights`, or the head differs from the embedding although
        `tie_word_embeddings` is true.
    """
    assert model.shards == (1 if mesh is None else mesh.shards)
    checked = check_weights(model, folder)
    _check_tied_head(model, folder, checked)
    return _read(model, checked, device=device, mesh=mesh, mapped=mapped, progress=progress)


IN_MEMORY = Path("the new weights")


def load_tensors(
    model: Model, tensors: Mapping[str, np.ndarray], *, device: Any, mesh: TensorMesh | None
) -> Leaves:
    """Create the leaves of `model` from tensors in memory, as `load_weights` does from files.

    Args:
      tensors: arrays by checkpoint names. Floats are cast to the leaf's type, and packed.
      device, mesh: as in `load_weights`.

    Raises:
      CheckpointError: a tensor is missing, or has the wrong shape or type.
    """
    stored = {name: ArrayTensor(array) for name, array in tensors.items()}
    checked = _check_tensors(model, stored, IN_MEMORY, f"{IN_MEMORY} do not match the model")
    _check_tied_head(model, IN_MEMORY, checked)
    return _read(model, checked, device=device, mesh=mesh, mapped=False, progress=False)


def load_floats(
    model: Model, floats: Mapping[str, np.ndarray], *, device: Any, mesh: TensorMesh | None
) -> Leaves:
    """Create the leaves of `model` from whole leaves in the plain layout, by the model's names.

    Args:
      floats: one array for each leaf of an unpacked model on one device, cast and packed as needed.
      device, mesh: as in `load_weights`.

    Raises:
      CheckpointError: an array does not contain floats.
    """
    stored = {name: ArrayTensor(array) for name, array in floats.items()}
    parts = {name: (Tensor(name, array.shape),) for name, array in floats.items()}
    checked = _check_parts(model, parts, stored, f"{IN_MEMORY} do not match the model")
    return _read(model, checked, device=device, mesh=mesh, mapped=False, progress=False)


def _read(
    model: Model,
    checked: Checked,
    *,
    device: Any,
    mesh: TensorMesh | None,
    mapped: bool,
    progress: bool,
) -> Leaves:
    leaves: dict[str, jax.Array] = {}
    with _bar(model, progress) as bar:
        if mesh is None:
            for some in _whole_leaves(model, checked, mapped=mapped):
                leaves |= _put(some, device)
                bar.update(sum(map(_num_bytes, some.values())))
            return tuple(leaves[name] for name in model.names)
        own = dict(mesh.own)
        parts: dict[str, list[jax.Array]] = {}
        for name, index, host in checked.shards(list(own)):
            placed = parts.setdefault(name, [])
            placed.append(_put(host, own[index]))
            if len(placed) == len(own):
                leaves[name] = mesh.joined(model, name, parts.pop(name))
                bar.update(_num_bytes(host))
    return tuple(leaves[name] for name in model.names)


def read_shards(model: Model, folder: Path, *, progress: bool = True) -> dict[str, np.ndarray]:
    """Read the shards of every leaf of a split model on the host, in `stored_shape`.

    Raises:
      CheckpointError: as in `load_weights`.
    """
    checked = check_weights(model, folder)
    _check_tied_head(model, folder, checked)
    arrays = {
        name: np.empty(stored_shape(model, name), leaf.dtype)
        for name, leaf in zip(model.names, model.leaves, strict=True)
    }
    with _bar(model, progress) as bar:
        for name, index, host in checked.shards(range(model.shards)):
            is_cut = arrays[name].ndim > host.ndim
            if is_cut or index == 0:
                arrays[name][index if is_cut else ...] = host
            bar.update(_num_bytes(host) / model.shards)
    return arrays


def _check_tied_head(model: Model, folder: Path, checked: Checked) -> None:
    """Reject a head that differs from the embedding if `tie_word_embeddings` is true.

    transformers compares the two, and uses the head if they differ.
    """
    if not isinstance(checked, TensorReader) or not model.spec.tie_word_embeddings:
        return
    if "head.weight" not in checked.tensors.parts:  # another stage checks it
        return
    stored = checked.tensors.stored
    (part,) = checked.tensors.parts["head.weight"]
    head, embedding = stored.get("lm_head.weight"), stored[part.name]
    if head is None or head == embedding or _same_values(head, embedding):
        return
    raise CheckpointError(
        f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from "
        f"{part.name}: set tie_word_embeddings to false in config.json, "
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
    return progress_bar(
        total=model.param_bytes,
        desc="loading weights",
        unit="B",
        show=progress,
    )


def _num_bytes(array: np.ndarray) -> int:
    """Return the bytes of an array on a device; on the host, a 4-bit value takes a whole byte."""
    return array.size * itemsize_bits(array.dtype) // 8


def _whole_leaves(
    model: Model, checked: Checked, *, mapped: bool
) -> Iterator[dict[str, np.ndarray]]:
    """Yield all leaves of a model on one device, several at a time."""
    if isinstance(checked, TensorReader):
        in_files = _in_files(
            {n: r.in_files for n, r in checked.leaves.items() if isinstance(r, FloatReader)}
        )
        yield from _read_together(in_files)
        for name, reader in checked.leaves.items():
            if name not in in_files:
                for leaf, host in reader.whole():
                    yield {leaf: host}
        return
    views = map_arrays(checked.stored) if mapped else {}
    yield views
    names = [name for name in checked.names if name not in views]
    in_files = _in_files({name: partial(checked.in_files, name) for name in names})
    yield from _read_together(in_files)
    for name in names:
        if name not in in_files:
            yield {name: checked.read(name)}


InFiles = PackedInFiles | PlainInFiles


def _in_files(leaves: Mapping[str, Callable[[], InFiles | None]]) -> dict[str, InFiles]:
    """Return the leaves that C++ can read, and their positions in files."""
    if cpu.identity() is None:  # the C++ library is not available
        return {}
    found = {name: leaf() for name, leaf in leaves.items()}
    return {name: leaf for name, leaf in found.items() if leaf is not None}


def _read_together(
    leaves: Mapping[str, InFiles],
) -> Iterator[dict[str, np.ndarray]]:
    """Read several leaves per call, into memory that XLA:CPU adopts without a copy."""
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
                arrays[beside(name, "scale")] = scale
        yield arrays


def _put(host: Any, device: Any) -> Any:
    """Place one array or several, and wait, so that the host holds no more than these."""
    return jax.block_until_ready(jax.device_put(host, device, may_alias=True))
