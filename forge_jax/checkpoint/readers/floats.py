"""The reader of floats: vectors, plain matrices, and matrices packed for the CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from forge_jax.checkpoint.matrix import StoredMatrix
from forge_jax.checkpoint.readers.leaf import LeafReader, Shard, beside
from forge_jax.models.decoder import Model
from forge_jax.models.weight_map import Tensor
from forge_jax.weights.partition import Partition
from forge_jax.weights.quantized import module_of
from forge_jax.weights.stored import FLOATS, TensorSource
from forge_kernels.linear import Packing, pack, pack_experts
from forge_kernels.linear.files import PackedInFiles, PlainInFiles

# Tensors that only quantized modules have.
QUANTIZED_TENSORS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")


class FloatReader(LeafReader):
    """A leaf of floats, cast to the model's type or packed as it is read."""

    def faults(self) -> list[str]:
        return [fault for part in self.parts for fault in float_faults(part, self.tensors.stored)]

    def in_files(self) -> PackedInFiles | PlainInFiles | None:
        """Return the leaf's position in files, plain or to pack; None if C++ cannot read it."""
        packing = float_packing(self.model, self.name)
        if packing is None:
            leaf = self.model.leaf(self.name)
            stretches = self.stored_matrix().stretches(np.dtype(leaf.dtype))
            return None if stretches is None else PlainInFiles(leaf.shape, leaf.dtype, stretches)
        found = [matrix.stretches() for matrix in self._matrices(0)]
        matrices = [stretches for stretches in found if stretches is not None]
        return PackedInFiles(packing, matrices) if len(matrices) == len(found) else None

    def whole(self) -> Iterator[tuple[str, np.ndarray]]:
        return self._leaves(0)

    def _leaves(self, index: int) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the whole leaf, or the matrices of the experts of device `index`."""
        packing = float_packing(self.model, self.name)
        if packing is None:
            leaf = self.model.leaf(self.name)
            experts = None if self.experts is None else self.experts_of(index)
            yield self.name, self.stored_matrix(experts).read(leaf.shape, leaf.dtype)
            return
        matrices = self._matrices(index)
        if packing.experts is None:
            weight, scale = pack(matrices[0], packing)
        else:
            weight, scale = pack_experts(matrices, packing)
        yield from packed_leaves(self.name, weight, scale)

    def _matrices(self, index: int) -> list[StoredMatrix]:
        """Return the matrices to pack: one, or those of the experts of device `index`."""
        if self.experts is None:
            return [self.stored_matrix()]
        return [self.stored_matrix(range(e, e + 1)) for e in self.experts_of(index)]

    def shards(self, indices: Sequence[int]) -> Iterator[Shard]:
        if self.by_expert and self.experts is not None:
            for index in indices:
                for leaf, array in self._leaves(index):
                    yield Shard(leaf, index, array)
            return
        stored, experts = self.stored_matrix(), self.experts
        shape = stored.shape
        if experts is not None:
            shape = (experts, shape[0] // experts, *shape[1:])
        leaf, dtype = self.model.leaf(self.name), self.model.dtype
        if float_packing(self.model, self.name) is None:
            dtype = leaf.dtype
            if self.partition is None:
                shape = leaf.shape  # the tensor may have an axis of one element more
        whole = stored.read(shape, dtype)
        yield from float_shards(self.model, self.name, whole, self.partition, indices)


def float_shards(
    model: Model,
    name: str,
    whole: np.ndarray,
    partition: Partition | None,
    indices: Sequence[int],
) -> Iterator[Shard]:
    """Yield the parts of a leaf of floats, packed if the model packs it."""
    packing = float_packing(model, name)
    for index in indices:
        part = whole if partition is None else partition.shard(whole, index)
        if packing is None:
            yield Shard(name, index, part)
            continue
        weight, scale = (pack if packing.experts is None else pack_experts)(part, packing)
        for leaf, array in packed_leaves(name, weight, scale):
            yield Shard(leaf, index, array)


def float_packing(model: Model, name: str) -> Packing | None:
    """Return the packing of a leaf of floats for the CPU kernels; None if it is plain."""
    packing = model.packings.get(name)
    assert packing is None or isinstance(packing, Packing), name
    return packing


def packed_leaves(
    name: str, weight: np.ndarray, scale: np.ndarray | None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the leaves of a packed matrix."""
    yield name, weight
    if scale is not None:
        yield beside(name, "scale"), scale


def float_faults(part: Tensor, stored: Mapping[str, TensorSource]) -> list[str]:
    """Return the faults of a tensor that must hold floats, from its header."""
    undescribed = undescribed_module(module_of(part.name), stored)
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
    return faults


def undescribed_module(module: str, stored: Mapping[str, TensorSource]) -> list[str]:
    """Return the fault of a module that has quantized tensors but is not in the config."""
    for name in QUANTIZED_TENSORS:
        if f"{module}.{name}" in stored:
            return [
                f"{module} is quantized (it has the tensor {module}.{name}), but "
                "quantization_config does not describe it"
            ]
    return []
