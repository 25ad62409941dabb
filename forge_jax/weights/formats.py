"""Weight formats: how the matrices of a model are stored in memory.

A format defines the arrays of a matrix of some shape, and the weight type of `forge_kernels.linear`
that multiplies with them. `WeightFormats` selects one for each matrix, once, when the model is
built. The readers of `forge_jax.checkpoint.readers` fill the arrays, one reader per class of
formats.

Formats of floats are here, formats of quantized checkpoints in `quantized.py`, and formats of GGUF
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

    If `paired`, its halves are gate and up, and the product includes SwiGLU.
    """

    outputs: int
    inputs: int
    paired: bool = False
    experts: int | None = None


class WeightFormat(Protocol):
    """A way to store a matrix."""

    def weight(self, shape: MatrixShape, dtype: Any) -> MatrixWeight:
        """Return the weight with shapes and types for arrays; `dtype` is that of activations."""
        ...

    def packing(self, shape: MatrixShape) -> Packing | BlockPacking | None:
        """Return the packing for the CPU kernels, or None if XLA multiplies with the matrix."""
        ...

    def names(self, shape: MatrixShape) -> set[str]:
        """Return the names for `Model.formats`, which are part of an engine's fingerprint."""
        ...


class MatrixSpec(NamedTuple):
    """The format and shape of a matrix of a model; the shape of one shard if it is split."""

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
    """Floats in the model's type."""

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
    """Return the format of a matrix of floats: packed for the CPU kernels, or plain for None."""
    return PLAIN if packed is None else PackedFormat(packed)


@dataclass(frozen=True)
class Piece:
    """Some rows of a mixed matrix, from consecutive tensors."""

    format: WeightFormat
    rows: int
    tensors: int


@dataclass(frozen=True)
class MixedFormat:
    """A matrix whose tensors have several formats; each piece is multiplied separately."""

    pieces: tuple[Piece, ...]

    def weight(self, shape: MatrixShape, dtype: Any) -> MatrixWeight:
        return MixedMatrix(tuple(each.weight(rows, dtype) for each, rows in self._each(shape)))

    def packing(self, shape: MatrixShape) -> None:
        return None

    def names(self, shape: MatrixShape) -> set[str]:
        return {name for each, rows in self._each(shape) for name in each.names(rows)}

    def split(self, leaf: str, shape: MatrixShape) -> dict[str, MatrixSpec]:
        """Return the pieces by leaf name."""
        return {piece_name(leaf, i): piece for i, piece in enumerate(self._each(shape))}

    def _each(self, shape: MatrixShape) -> list[MatrixSpec]:
        assert shape.experts is None and sum(p.rows for p in self.pieces) == shape.outputs
        return [MatrixSpec(p.format, MatrixShape(p.rows, shape.inputs)) for p in self.pieces]


def piece_name(leaf: str, number: int) -> str:
    """Return the leaf of a piece, such as "layers.0.attention.qkv.pieces.1.weight"."""
    return f"{leaf.removesuffix('weight')}pieces.{number}.weight"


def split_pieces(matrices: Mapping[str, MatrixSpec]) -> dict[str, MatrixSpec]:
    """Return the matrices, with mixed ones replaced by their pieces."""
    split: dict[str, MatrixSpec] = {}
    for leaf, matrix in matrices.items():
        format, shape = matrix
        split |= format.split(leaf, shape) if isinstance(format, MixedFormat) else {leaf: matrix}
    return split


def tensors_by_piece(weights: WeightMap, matrices: Mapping[str, MatrixSpec]) -> WeightMap:
    """Return the map with an entry for each piece of a mixed matrix."""
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


def fused_values(device: Any) -> frozenset[Values]:
    """Return the values that XLA converts inside matrix products on a `jax.Device`.

    Before compute capability 9.0, XLA:GPU converts FP8 to 16 bits before each product.
    """
    if device.platform == "cpu":
        return frozenset()
    capability = getattr(device, "compute_capability", "0")
    fp8: list[Values] = ["fp8"] if float(capability) >= 9 else []
    return frozenset(("int8", "int4", *fp8))


@dataclass(frozen=True, kw_only=True)
class WeightFormats:
    """The format of each matrix of a model.

    Attributes:
      layers: the packing of float matrices in the layers for the CPU kernels; None: plain.
      head: the same for the head.
      embedding: the same for the embedding, if it is not the head.
      leaves: the formats of matrices that are quantized or in GGML blocks in the checkpoint, or
        that are rounded, by leaf name.
      ggml_activations: the type that the CPU kernels round activations to for GGML blocks.
      rounded: the type that matrices of the layers are rounded to as they are read, unless they are
        for the CPU kernels.
      fused: the values that the device converts inside its matrix products (`fused_values`).
      lora: True if adapters add to gate and up, so that their product cannot include SwiGLU.
    """

    layers: Format | None = None
    head: Format | None = None
    embedding: Format | None = None
    leaves: Mapping[str, WeightFormat] = field(default_factory=dict)
    ggml_activations: GGMLActivations | None = None
    rounded: Values | None = None
    fused: frozenset[Values] = frozenset()
    lora: bool = False

    @property
    def packed(self) -> dict[str, Format | None]:
        """The packing of float matrices, by field name."""
        return {"layers": self.layers, "head": self.head, "embedding": self.embedding}

    def of(self, leaf: str) -> WeightFormat:
        """Return the format of a matrix such as "layers.0.attention.qkv.weight"."""
        found = self.leaves.get(leaf)
        if found is not None:
            return found
        match leaf.removesuffix(".weight").split(".")[-1]:
            case "head":
                return float_format(self.head)
            case "embedding":
                return float_format(self.embedding)
            case "router" | "gate":
                return PLAIN
            case "ba" if self.layers is not None:  # gates of states, which are not rounded
                return float_format("bf16")
        return float_format(self.layers)
