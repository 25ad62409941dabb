"""Matrices of GGUF files, which stay in GGML blocks: their format and their leaves."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forge_jax.errors import ConfigError, UnsupportedModelError
from forge_jax.weights.formats import (
    GGMLActivations,
    MatrixShape,
    MixedFormat,
    Piece,
    WeightFormat,
    float_format,
)
from forge_jax.weights.ggml_types import KEY, GGMLTypes
from forge_jax.weights.partition import Partition, partition_of, possible_shards, with_shards
from forge_jax.weights.quantized import QuantizedFormat, expert_leaves, num_experts
from forge_jax.weights.tensors import Values
from forge_kernels.blocks import Blocks
from forge_kernels.linear import (
    BlockPacking,
    Format,
    MatrixWeight,
    PackedWeight,
    Quantization,
    QuantizedWeight,
)

if TYPE_CHECKING:
    from forge_jax.models.spec import ModelSpec
    from forge_jax.models.weight_map import Tensor, WeightMap


@dataclass(frozen=True)
class GGMLFormat:
    """A matrix in GGML blocks.

    Attributes:
      blocks: how the values of a row are kept.
      packed: True for the CPU kernels, which support all block types.
      activations: if packed, the type that rows of x are rounded to, except for experts.
      fused: see `Quantization`.
    """

    blocks: Blocks
    packed: bool
    activations: GGMLActivations | None = None
    fused: bool = False

    def weight(self, shape: MatrixShape, dtype: Any) -> MatrixWeight:
        packing = self.packing(shape)
        if packing is None:
            return QuantizedWeight.abstract(self.quantization(shape))
        return PackedWeight.abstract(packing)

    def packing(self, shape: MatrixShape) -> BlockPacking | None:
        if not self.packed:
            return None
        rows = self.activations if shape.experts is None else None
        return BlockPacking(
            self.blocks, shape.outputs, shape.inputs, shape.paired, shape.experts, rows
        )

    def quantization(self, shape: MatrixShape) -> Quantization:
        """Return the layout of the values for XLA."""
        return Quantization.of_blocks(
            self.blocks, shape.outputs, shape.inputs, shape.experts, self.fused
        )

    def names(self, shape: MatrixShape) -> set[str]:
        packing = self.packing(shape)
        if packing is None:
            return {f"{self.quantization(shape).values} blocks"}
        return {f"{self.blocks.values} blocks", packing.format}


def ggml_formats(
    spec: ModelSpec,
    weights: WeightMap,
    plain: Format | None,
    shards: int = 1,
    activations: GGMLActivations | None = None,
) -> dict[str, WeightFormat]:
    """Return the leaves that have tensors in blocks, and their formats on each device.

    Args:
      spec: the model.
      weights: the tensors of each leaf.
      plain: the packing of float matrices; None if the CPU kernels are not used.
      shards: the number of devices.
      activations: the type that the CPU kernels round activations to; None: no rounding.

    Raises:
      UnsupportedModelError: gates and ups of experts have different types.
      ConfigError: the blocks cannot be split; the message lists the numbers of devices that work.
    """
    if spec.ggml_types is None:
        return {}
    formats = _whole_formats(spec, spec.ggml_types, weights, plain, activations)
    if shards == 1:
        return formats
    cut_all: dict[str, WeightFormat] = {}
    for leaf, format in formats.items():
        of_shard = _of_shard(format, partition_of(leaf, spec, shards))
        if of_shard is None:
            fit = [
                count
                for count in possible_shards(spec)
                if all(_of_shard(f, partition_of(n, spec, count)) for n, f in formats.items())
            ]
            raise ConfigError(
                f"--tensor-parallel {shards} splits the groups of {weights[leaf][0].name}, of "
                f"which 16 values must stay together: {with_shards(spec, fit)}, or "
                "--gguf-weights decoded"
            )
        cut_all[leaf] = of_shard
    return cut_all


def fused_format(format: WeightFormat, values: Collection[Values]) -> WeightFormat:
    """Return the format for a device that converts `values` inside its matrix products."""
    if isinstance(format, MixedFormat):
        pieces = (replace(p, format=fused_format(p.format, values)) for p in format.pieces)
        return MixedFormat(tuple(pieces))
    if isinstance(format, QuantizedFormat):
        return replace(format, fused=format.scheme.values in values and format.packed is None)
    if isinstance(format, GGMLFormat):
        return replace(format, fused=format.blocks.in_bytes.values in values and not format.packed)
    return format


def unpacked_experts(
    spec: ModelSpec, formats: Mapping[str, WeightFormat]
) -> dict[str, WeightFormat]:
    """Return the formats with experts for plain XLA, not for the CPU kernels."""
    found = dict(formats)
    for leaf in itertools.chain.from_iterable(expert_leaves(spec)):
        format = found.get(leaf)
        if isinstance(format, GGMLFormat):
            found[leaf] = replace(format, packed=False)
    return found


def _of_shard(format: WeightFormat, partition: Partition | None) -> WeightFormat | None:
    """Return the format of a device's part of a matrix, or None if it cannot be split."""
    if partition is None or partition.by_expert:
        return format
    if isinstance(format, MixedFormat):
        assert partition.axis == -2, "a mixed matrix cannot be split by its inputs"
        ends = list(itertools.accumulate(piece.rows for piece in format.pieces))
        return MixedFormat(
            tuple(
                replace(piece, rows=partition.within(end - piece.rows, end).size)
                for piece, end in zip(format.pieces, ends, strict=True)
            )
        )
    if partition.axis == -2:
        return format
    assert isinstance(format, GGMLFormat)
    blocks = format.blocks.cut(partition.unit)
    return None if blocks is None else replace(format, blocks=blocks)


def _whole_formats(
    spec: ModelSpec,
    types: GGMLTypes,
    weights: WeightMap,
    plain: Format | None,
    activations: GGMLActivations | None,
) -> dict[str, WeightFormat]:
    """Return the formats of a model on one device."""
    formats: dict[str, WeightFormat] = {}
    for leaf, parts in weights.items():
        blocks = [types.blocks_of(part.name) for part in parts]
        if not any(blocks):
            continue
        if len(parts[0].shape) != 2:
            raise UnsupportedModelError(
                f"{KEY}: {parts[0].name} is not a matrix, so it cannot stay in blocks"
            )
        if num_experts(leaf, spec) is None:
            formats[leaf] = _joined_format(blocks, parts, plain, activations)
        else:
            formats[leaf] = _expert_format(blocks, parts, packed=plain is not None)
    for both in expert_leaves(spec):  # either both are packed or neither
        if sum(leaf in formats for leaf in both) == 1:
            formats |= {
                leaf: replace(format, packed=False)
                for leaf in both
                if isinstance(format := formats.get(leaf), GGMLFormat)
            }
    return formats


def _joined_format(
    blocks: Sequence[Blocks | None],
    parts: Sequence[Tensor],
    plain: Format | None,
    activations: GGMLActivations | None,
) -> WeightFormat:
    """Return the format of stacked tensors, a mixed one if their types differ."""
    pieces: list[Piece] = []
    pairs = zip(blocks, parts, strict=True)
    for found, group in itertools.groupby(pairs, key=lambda pair: _in_bytes(pair[0])):
        kinds, same = zip(*group, strict=True)
        format = (
            float_format(plain)
            if found is None
            else GGMLFormat(_common(kinds), plain is not None, activations)
        )
        pieces.append(Piece(format, sum(part.rows for part in same), len(same)))
    return pieces[0].format if len(pieces) == 1 else MixedFormat(tuple(pieces))


def _in_bytes(blocks: Blocks | None) -> Blocks | None:
    return None if blocks is None else blocks.in_bytes


def _common(blocks: Sequence[Blocks]) -> Blocks:
    """Return the storage of matrices that differ at most between 6 and 8 bits."""
    first, *others = dict.fromkeys(blocks)
    return first.in_bytes if others else first


def _expert_format(
    blocks: Sequence[Blocks | None], parts: Sequence[Tensor], *, packed: bool
) -> GGMLFormat:
    """Return the common format of the matrices of experts.

    Raises:
      UnsupportedModelError: the tensors have different types.
    """
    pairs = [*zip(map(_in_bytes, blocks), parts, strict=True)]
    firsts = {found: part.name for found, part in reversed(pairs)}
    if len(firsts) > 1:
        raise UnsupportedModelError(
            f"{KEY}: {' and '.join(sorted(firsts.values()))} have different types, which is not "
            "supported for experts because they are computed together: use --gguf-weights "
            "decoded"
        )
    return GGMLFormat(_common([each for each in blocks if each is not None]), packed)
