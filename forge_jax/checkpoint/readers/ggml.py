"""The reader of GGUF matrices: numbers and scales as they are in the file's GGML blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np

from forge_jax.checkpoint.gguf.weights import GGUFWeight, read_blocks
from forge_jax.checkpoint.readers.floats import float_faults, undescribed_module
from forge_jax.checkpoint.readers.leaf import LeafReader, Shard, beside, empty_leaves
from forge_jax.models.weight_map import Tensor
from forge_jax.weights.ggml_formats import GGMLFormat
from forge_jax.weights.ggml_types import KEY
from forge_jax.weights.partition import Partition
from forge_jax.weights.quantized import module_of
from forge_kernels.blocks import BlockValues, joined
from forge_kernels.linear import BlockPacking, arrange_blocks, pack_blocks
from forge_kernels.linear.blocks import Read


def _read_in_order(
    parts: Sequence[Tensor], weights: Sequence[GGUFWeight], rows: np.ndarray
) -> BlockValues:
    """Return rows of the stacked parts, as `read_blocks`, in the order of the leaf."""
    order = parts[0].stored_rows()
    if order is not None:
        assert len(parts) == 1, parts
        rows = order[rows]
    return read_blocks(weights, rows)


class GGMLReader(LeafReader):
    """A matrix in GGML blocks; each shard is read from the file separately."""

    def faults(self) -> list[str]:
        return [fault for part in self.parts for fault in self._faults(part)]

    def _faults(self, part: Tensor) -> list[str]:
        stored, types = self.tensors.stored, self.model.spec.ggml_types
        assert types is not None
        faults, found = float_faults(part, stored), stored.get(part.name)
        if found is None or undescribed_module(module_of(part.name), stored):
            return faults
        kept = found.stored.format.blocks if isinstance(found, GGUFWeight) else None
        if kept != types.blocks_of(part.name):
            faults.append(f"tensor {part.name} does not have the type in {KEY}")
        return faults

    def whole(self) -> Iterator[tuple[str, np.ndarray]]:
        return self._leaves(0)

    def shards(self, indices: Sequence[int]) -> Iterator[Shard]:
        for index in indices:
            for leaf, array in self._leaves(index):
                yield Shard(leaf, index, array)

    def _leaves(self, index: int) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the leaves of shard `index`, or of the whole matrix if the model is not split."""
        if self.experts is None:
            yield from self._matrix(self.parts, index)
            return
        arrays = empty_leaves(self.model, self.name)
        for place, expert in enumerate(self.experts_of(index)):
            parts = self.expert_parts(range(expert, expert + 1))
            for leaf, array in self._matrix(parts, index):
                arrays[leaf][place] = array
        yield from arrays.items()

    def _matrix(self, parts: tuple[Tensor, ...], index: int) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the leaves of one matrix that is made of `parts`."""
        format, shape = self.model.pieces[self.name]
        assert isinstance(format, GGMLFormat)
        one = replace(shape, experts=None)
        read = self._reading(parts, format, index)
        packing = format.packing(shape)
        if isinstance(packing, BlockPacking):
            yield self.name, pack_blocks(read, replace(packing, experts=None))
            return
        for part, array in arrange_blocks(read, format.quantization(one)).items():
            yield beside(self.name, part), array

    def _reading(self, parts: tuple[Tensor, ...], format: GGMLFormat, index: int) -> Read:
        """Return a function that reads rows of shard `index` by their numbers in the shard."""
        weights = [cast(GGUFWeight, self.tensors.stored[part.name]) for part in parts]
        read, partition = partial(_read_in_order, parts, weights), self.partition
        if partition is None or partition.by_expert:
            return read
        if partition.axis == -2:
            return partial(_rows_of_shard, read, partition, index)
        ranges, blocks = partition.parts[index], format.blocks

        def columns(rows: np.ndarray) -> BlockValues:
            found = read(rows)
            return joined([found.columns(begin, end, blocks) for begin, end in ranges], axis=1)

        return columns


def _rows_of_shard(read: Read, partition: Partition, index: int, rows: np.ndarray) -> BlockValues:
    """Return the given rows of shard `index`, with zeros past the last row."""
    theirs = np.concatenate([np.arange(begin, end) for begin, end in partition.parts[index]])
    exists = rows < len(theirs)
    found = read(theirs[np.where(exists, rows, 0)])
    return found if exists.all() else found.only(exists)
