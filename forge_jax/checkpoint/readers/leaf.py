"""The base of all readers: one leaf of a model, and the tensors of a checkpoint it is made of."""

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
from forge_jax.weights.stored import TensorSource
from forge_kernels.linear.panels import aligned_empty


@dataclass(frozen=True, eq=False)
class Tensors:
    """The tensors of a checkpoint that a model needs."""

    parts: WeightMap  # leaf name -> stored tensors
    stored: Mapping[str, TensorSource]


class Shard(NamedTuple):
    """The part of a leaf that one of several devices has."""

    leaf: str
    index: int
    array: np.ndarray


@dataclass(frozen=True, eq=False)
class LeafReader(ABC):
    """Reads one leaf of a model, and the leaves beside it: scales and the like."""

    model: Model
    name: str  # of the leaf; with several pieces, of one of them
    tensors: Tensors

    @abstractmethod
    def faults(self) -> list[str]:
        """What is wrong with the tensors, by their headers."""

    @abstractmethod
    def whole(self) -> Iterator[tuple[str, np.ndarray]]:
        """The leaves of a model on one device."""

    @abstractmethod
    def shards(self, indices: Sequence[int]) -> Iterator[Shard]:
        """The parts of the devices `indices`, each made when the one before has been taken."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.tensors.parts[self.name]

    @property
    def experts(self) -> int | None:
        """The number of matrices, if they are those of experts."""
        matrix = self.model.pieces.get(self.name)
        return None if matrix is None else matrix.shape.experts

    @property
    def partition(self) -> Partition | None:
        """How the leaf is cut; None: every device has all of it."""
        whole = whole_of(self.name)
        partition = partition_of(whole, self.model.spec, self.model.shards)
        if partition is None or whole == self.name:
            return partition
        start, number = 0, 0
        while (piece := piece_name(whole, number)) != self.name:
            start, number = start + self._rows_of(piece), number + 1
        return partition.within(start, start + self._rows_of(self.name))

    def expert_parts(self, expert: int) -> tuple[Tensor, ...]:
        """The tensors that have something of one expert: its own, or those of all."""
        assert self.experts is not None
        return expert_parts(self.parts, self.experts, expert)

    def stored_matrix(self, expert: int | None = None) -> StoredMatrix:
        """The floats of the leaf, or of one expert's matrix."""
        parts = self.parts if expert is None else self.expert_parts(expert)
        return StoredMatrix(parts, self.tensors.stored, expert)

    def _rows_of(self, leaf: str) -> int:
        return sum(part.shape[0] for part in self.tensors.parts[leaf])


def expert_parts(parts: tuple[Tensor, ...], experts: int, expert: int) -> tuple[Tensor, ...]:
    """The tensors, of those of all experts, that have something of one."""
    size = len(parts) // experts
    return parts if len(parts) == 1 else parts[size * expert : size * (expert + 1)]


def beside(leaf: str, part: str) -> str:
    """The leaf of "scale" and the like, beside that of the matrix."""
    return leaf.removesuffix("weight") + part


def empty_leaves(model: Model, name: str) -> dict[str, np.ndarray]:
    """The leaf `name` and those beside it, to be filled expert by expert."""
    shapes = zip(model.names, model.leaves, strict=True)
    return {
        leaf: aligned_empty(shape.shape, shape.dtype)
        for leaf, shape in shapes
        if matrix_of(leaf) == name
    }
