"""The reader of matrices that the checkpoint quantizes, or that are rounded as they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from forge_jax.checkpoint.matrix import StoredMatrix
from forge_jax.checkpoint.readers.floats import float_faults
from forge_jax.checkpoint.readers.leaf import (
    LeafReader,
    Shard,
    beside,
    empty_leaves,
    expert_parts,
)
from forge_jax.errors import CheckpointError
from forge_jax.models.decoder import Model
from forge_jax.models.weight_map import Tensor
from forge_jax.weights.partition import Partition
from forge_jax.weights.quantized import QuantizedFormat, module_of
from forge_jax.weights.rounding import round_matrix
from forge_jax.weights.shards import shard_of
from forge_jax.weights.stored import TensorSource
from forge_jax.weights.tensors import Matrix, check_matrix, read_matrices, read_order
from forge_kernels.threads import for_each


class QuantizedReader(LeafReader):
    """A matrix with the checkpoint's quantized values, or with floats rounded as they are read."""

    def faults(self) -> list[str]:
        stored, format = self.tensors.stored, quantized_format(self.model, self.name)
        if format.rounded:
            return [fault for part in self.parts for fault in float_faults(part, stored)]
        return [fault for part in self.parts for fault in _faults(part, format, stored)]

    def whole(self) -> Iterator[tuple[str, np.ndarray]]:
        return quantized_leaves(self.model, self.name, self.matrix)

    def _leaves(self, index: int) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the leaves of the experts of device `index`."""
        own = self.experts_of(index)
        return quantized_leaves(self.model, self.name, lambda place: self.matrix(own[place]))

    def shards(self, indices: Sequence[int]) -> Iterator[Shard]:
        if self.by_expert:
            for index in indices:
                for leaf, array in self._leaves(index):
                    yield Shard(leaf, index, array)
            return
        matrices = [self.matrix(expert) for expert in range(self.experts or 1)]
        yield from quantized_shards(self.model, self.name, matrices, self.partition, indices)

    def matrix(self, expert: int) -> Matrix:
        """Return the values of the whole matrix, or of one expert's."""
        format, stored = quantized_format(self.model, self.name), self.tensors.stored
        one = None if self.experts is None else range(expert, expert + 1)
        if format.rounded:
            return round_matrix(self.stored_matrix(one), format.scheme)
        parts = self.parts if one is None else self.expert_parts(one)
        modules = {module_of(part.name): (part.shape[-2], part.shape[-1]) for part in parts}
        matrix = read_matrices(format.scheme, modules, stored, expert)
        if beside(self.name, "bias") not in self.model.names:
            _check_no_bias(modules, stored)
        order = self._order_of_rows(expert)
        if order is None:
            return matrix
        return matrix.rows(np.concatenate([order, order + len(order)]))

    def _order_of_rows(self, expert: int) -> np.ndarray | None:
        """Return the order of an expert's gate and up rows: the column order of its down matrix."""
        down = self.name.replace(".gate_up.", ".down.")
        following = self.model.pieces[down].format
        if self.experts is None or down == self.name:
            return None
        if not isinstance(following, QuantizedFormat) or not following.follows:
            return None
        parts = self.tensors.parts[down]
        (part,) = expert_parts(parts, self.experts, range(expert, expert + 1))
        shape = part.shape[0], part.shape[1]
        return read_order(following.scheme, module_of(part.name), shape, self.tensors.stored)


def quantized_format(model: Model, name: str) -> QuantizedFormat:
    """Return the format of a leaf that must be quantized."""
    format = model.pieces[name].format
    assert isinstance(format, QuantizedFormat), name
    return format


def quantized_leaves(
    model: Model, name: str, read: Callable[[int], Matrix]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the leaf `name` and its parts, of one matrix (`read(0)`) or of one per expert."""
    format, shape = quantized_format(model, name), model.pieces[name].shape
    if shape.experts is None:
        for part, array in format.arrays(read(0), shape, name).items():
            yield beside(name, part), array
        return
    arrays = empty_leaves(model, name)

    def place(expert: int) -> None:
        for part, array in format.arrays(read(expert), shape, name).items():
            arrays[beside(name, part)][expert] = array

    if format.rounded:  # `read` uses several threads itself
        for expert in range(shape.experts):
            place(expert)
    else:
        for_each(place, range(shape.experts))
    yield from arrays.items()


def quantized_shards(
    model: Model,
    name: str,
    matrices: Sequence[Matrix],
    partition: Partition | None,
    indices: Sequence[int],
) -> Iterator[Shard]:
    """Yield the parts of whole matrices: one, or one per expert."""
    format = quantized_format(model, name)
    for index in indices:
        parts = [shard_of(matrix, format, partition, index) for matrix in matrices]
        for leaf, array in quantized_leaves(model, name, parts.__getitem__):
            yield Shard(leaf, index, array)


def _faults(part: Tensor, format: QuantizedFormat, stored: Mapping[str, TensorSource]) -> list[str]:
    stacked = format.scheme.stacked
    if len(part.shape) != 2 + stacked:
        return [
            f"{part.name} has the quantized matrices of all experts of a layer, which is not "
            "supported: each expert needs its own tensors"
        ]
    shape, experts = (part.shape[-2], part.shape[-1]), part.shape[0] if stacked else None
    return check_matrix(format.scheme, module_of(part.name), shape, stored, experts)


def _check_no_bias(modules: Iterable[str], stored: Mapping[str, TensorSource]) -> None:
    """Reject a bias other than zero, which would be lost; some writers add biases of zeros."""
    for name in (f"{module}.bias" for module in modules):
        found = stored.get(name)
        if found is None:
            continue
        values = StoredMatrix((Tensor(name, found.shape),), stored).read(found.shape, np.float32)
        if values.any():
            raise CheckpointError(f"tensor {name} must be 0, because the model has no bias there")
