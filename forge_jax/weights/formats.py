"""Weight formats: how the matrices of a model are stored in memory.

A format says which arrays a matrix of some shape becomes, and which weight type of
`forge_kernels.linear` multiplies with them. `WeightFormats` chooses one for each matrix, once, when
the model is built. The readers of `forge_jax.checkpoint.readers` fill the arrays, one reader for
each class of formats.

Formats of floats are here; those of quantised checkpoints are in `quantized.py`, those of GGUF
files in `ggml_formats.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from forge_kernels.linear import (
    BlockPacking,
    Format,
    MatrixWeight,
    MixedMatrix,
    PackedWeight,
    Packing,
    PlainWeight,
)

if TYPE_CHECKING:
    from forge_jax.models.weight_map import WeightMap
    from forge_jax.weights.tensors import Values

GGMLActivations = Literal["int8"]


@dataclass(frozen=True)
class MatrixShape:
    """A matrix [outputs, inputs], or `experts` such matrices.

    `paired`: its halves are gates and ups, and SwiGLU is a part of the product.
    """

    outputs: int
    inputs: int
    paired: bool = False
    experts: int | None = None


class WeightFormat(Protocol):
    """How a matrix is stored."""

    def weight(self, shape: MatrixShape, dtype: Any) -> MatrixWeight:
        """The weight with shapes and types in place of arrays; `dtype` is that of activations."""
        ...

    def packing(self, shape: MatrixShape) -> Packing | BlockPacking | None:
        """How it is packed for the CPU kernels; None if XLA multiplies with it."""
        ...

    def names(self, shape: MatrixShape) -> set[str]:
        """The names that `Model.formats` lists: they are a part of an engine's fingerprint."""
        ...


class MatrixSpec(NamedTuple):
    """A matrix of a model: its format and its shape, of one shard if the model is cut."""

    format: WeightFormat
    shape: MatrixShape

    @property
    def packing(self) -> Packing | BlockPacking | None:
        return self.format.packing(self.shape)

    @property
    def names(self) -> set[str]:
        return self.format.names(self.shape)


@dataclass(frozen=True)
class PlainFormat:
    """Floats, as the model computes with them."""

    def weight(self, shape: MatrixShape, dtype: Any) -> MatrixWeight:
        return PlainWeight.abstract(shape.outputs, shape.inputs, dtype, shape.experts)

    def packing(self, shape: MatrixShape) -> None:
        return None

    def names(self, shape: MatrixShape) -> set[str]:
        return set()


PLAIN = PlainFormat()


@dataclass(frozen=True)
class PackedFormat:
    """Floats in the layout of the CPU kernels, as bfloat16 or rounded to int8 or int4."""

    format: Format

    def weight(self, shape: MatrixShape, dtype: Any) -> MatrixWeight:
        return PackedWeight.abstract(self.packing(shape))

    def packing(self, shape: MatrixShape) -> Packing:
        return Packing(self.format, shape.outputs, shape.inputs, shape.paired, shape.experts)

    def names(self, shape: MatrixShape) -> set[str]:
        return {self.format}


def float_format(packed: Format | None) -> WeightFormat:
    """The format of a matrix of floats: packed for the CPU kernels, or plain (None)."""
    return PLAIN if packed is None else PackedFormat(packed)


@dataclass(frozen=True)
class Piece:
    """Some rows of a mixed matrix: those of some tensors that follow each other."""

    format: WeightFormat
    rows: int
    tensors: int


@dataclass(frozen=True)
class MixedFormat:
    """A matrix whose tensors have several formats: each piece is multiplied by itself."""

    pieces: tuple[Piece, ...]

    def weight(self, shape: MatrixShape, dtype: Any) -> MatrixWeight:
        return MixedMatrix(tuple(each.weight(rows, dtype) for each, rows in self._each(shape)))

    def packing(self, shape: MatrixShape) -> None:
        return None

    def names(self, shape: MatrixShape) -> set[str]:
        return {name for each, rows in self._each(shape) for name in each.names(rows)}

    def split(self, leaf: str, shape: MatrixShape) -> dict[str, MatrixSpec]:
        """The pieces, by the names of their leaves."""
        return {piece_name(leaf, i): piece for i, piece in enumerate(self._each(shape))}

    def _each(self, shape: MatrixShape) -> list[MatrixSpec]:
        assert shape.experts is None and sum(p.rows for p in self.pieces) == shape.outputs
        return [MatrixSpec(p.format, MatrixShape(p.rows, shape.inputs)) for p in self.pieces]


def piece_name(leaf: str, number: int) -> str:
    """The leaf of a piece: "layers.0.attention.qkv.pieces.1.weight"."""
    return f"{leaf.removesuffix('weight')}pieces.{number}.weight"


def split_pieces(matrices: Mapping[str, MatrixSpec]) -> dict[str, MatrixSpec]:
    """The matrices with those of several pieces replaced by these."""
    split: dict[str, MatrixSpec] = {}
    for leaf, matrix in matrices.items():
        format, shape = matrix
        split |= format.split(leaf, shape) if isinstance(format, MixedFormat) else {leaf: matrix}
    return split


def tensors_by_piece(weights: WeightMap, matrices: Mapping[str, MatrixSpec]) -> WeightMap:
    """The map with an entry for each piece of a mixed matrix."""
    split: WeightMap = {}
    for leaf, parts in weights.items():
        matrix = matrices.get(leaf)
        if matrix is None or not isinstance(matrix.format, MixedFormat):
            split[leaf] = parts
            continue
        start = 0
        for number, piece in enumerate(matrix.format.pieces):
            split[piece_name(leaf, number)] = parts[start : start + piece.tensors]
            start += piece.tensors
    return split


@dataclass(frozen=True, kw_only=True)
class WeightFormats:
    """The format of each matrix of a model.

    Attributes:
      layers: of matrices of floats in the layers: packed for the CPU kernels, or plain (None).
      head: the same of the head.
      embedding: the same of the embedding, where it is not the head.
      leaves: of the matrices that the checkpoint has quantised or in ggml blocks, and of those that
        are rounded, by the names of their leaves.
      ggml_activations: what the CPU kernels round activations to before they multiply ggml blocks.
      rounded: what matrices of the layers are rounded to as they are read, if not for the kernels.
      lora: adapters add to gates and ups, so that SwiGLU cannot be a part of their product.
    """

    layers: Format | None = None
    head: Format | None = None
    embedding: Format | None = None
    leaves: Mapping[str, WeightFormat] = field(default_factory=dict)
    ggml_activations: GGMLActivations | None = None
    rounded: Values | None = None
    lora: bool = False

    @property
    def packed(self) -> dict[str, Format | None]:
        """How matrices of floats are packed, by the names of the fields."""
        return {"layers": self.layers, "head": self.head, "embedding": self.embedding}

    def of(self, leaf: str) -> WeightFormat:
        """The format of the matrix "layers.0.attention.qkv.weight" and the like."""
        found = self.leaves.get(leaf)
        if found is not None:
            return found
        match leaf.split(".")[-2]:
            case "head":
                return float_format(self.head)
            case "embedding":
                return float_format(self.embedding)
            case "router":
                return PLAIN
        return float_format(self.layers)
