"""The base of all readers: one leaf of a model and the checkpoint tensors that it is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from forge_jax.checkpoint.matrix import StoredMatrix
from forge_jax.models.decoder import Model
from forge_jax.models.weight_map import Tensor, WeightMap
from forge_jax.weights.formats import piece_name
from forge_jax.weights.partition import Partition, matrix_of, partition_of, whole_of
from forge_jax.weights.quantized import num_experts
from forge_jax.weights.stored import TensorSource
from forge_kernels.host_arrays import aligned_empty


@dataclass(frozen=True, eq=False)
class Tensors:
    """The tensors of a checkpoint that a model needs."""

    parts: WeightMap  # leaf name -> stored tensors
    stored: Mapping[str, TensorSource]


class Shard(NamedTuple):
    """One device's part of a leaf."""

    leaf: str
    index: int
    array: np.ndarray


@dataclass(frozen=True, eq=False)
class LeafReader(ABC):
    """Reads one leaf of a model, and the leaves that belong to it, such as scales."""

    model: Model
    name: str  # name of the leaf, or of one of its pieces
    tensors: Tensors

    @abstractmethod
    def faults(self) -> list[str]:
        """Return the faults of the tensors, from their headers."""

    @abstractmethod
    def whole(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the leaves of a model on one device."""

    @abstractmethod
    def shards(self, indices: Sequence[int]) -> Iterator[Shard]:
        """Yield the parts of the devices `indices`, each made after the previous one is taken."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.tensors.parts[self.name]

    @property
    def experts(self) -> int | None:
        """The number of experts in the files if the leaf has a matrix for each, else None."""
        return num_experts(self.name, self.model.spec)

    @property
    def partition(self) -> Partition | None:
        """The way the leaf is split; None if every device has all of it."""
        whole = whole_of(self.name)
        partition = partition_of(whole, self.model.spec, self.model.shards)
        if partition is None or whole == self.name:
            return partition
        start, number = 0, 0
        while (piece := piece_name(whole, number)) != self.name:
            start, number = start + self._rows_of(piece), number + 1
        return partition.within(start, start + self._rows_of(self.name))

    @property
    def by_expert(self) -> bool:
        """True if a device has the whole matrices of some experts."""
        return self.partition is not None and self.partition.by_expert

    def experts_of(self, index: int) -> range:
        """Return the experts that device `index` has, or has parts of."""
        assert self.experts is not None
        partition = self.partition
        if partition is None or not partition.by_expert:
            return range(self.experts)
        return partition.experts(index)

    def expert_parts(self, experts: range) -> tuple[Tensor, ...]:
        """Return the tensors that hold the matrices of `experts`: their own, or one for all."""
        assert self.experts is not None
        return expert_parts(self.parts, self.experts, experts)

    def stored_matrix(self, experts: range | None = None) -> StoredMatrix:
        """Return the floats of the leaf, or of the matrices of `experts`."""
        parts = self.parts if experts is None else self.expert_parts(experts)
        return StoredMatrix(parts, self.tensors.stored, experts)

    def _rows_of(self, leaf: str) -> int:
        return sum(part.rows for part in self.tensors.parts[leaf])


def expert_parts(parts: tuple[Tensor, ...], count: int, experts: range) -> tuple[Tensor, ...]:
    """Return those of `parts`, of `count` experts, that hold the matrices of `experts`."""
    size = len(parts) // count
    return parts if len(parts) == 1 else parts[size * experts.start : size * experts.stop]


def beside(leaf: str, part: str) -> str:
    """Return the leaf of a part such as "scale" that belongs to a matrix."""
    return leaf.removesuffix("weight") + part


def empty_leaves(model: Model, name: str) -> dict[str, np.ndarray]:
    """Return memory for the leaf `name` and its parts, to be filled expert by expert."""
    shapes = zip(model.names, model.leaves, strict=True)
    return {
        leaf: aligned_empty(shape.shape, shape.dtype)
        for leaf, shape in shapes
        if matrix_of(leaf) == name
    }
