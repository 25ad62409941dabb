"""Readers of weights: one class for each class of weight formats, and one for converted folders."""

from __future__ import annotations

from forge_jax.checkpoint.readers.converted import ConvertedReader
from forge_jax.checkpoint.readers.floats import FloatReader, undescribed_module
from forge_jax.checkpoint.readers.ggml import GGMLReader
from forge_jax.checkpoint.readers.leaf import LeafReader, Shard, Tensors
from forge_jax.checkpoint.readers.quantized import QuantizedReader
from forge_jax.models.decoder import Model
from forge_jax.weights.formats import PackedFormat, PlainFormat
from forge_jax.weights.ggml_formats import GGMLFormat
from forge_jax.weights.quantized import QuantizedFormat

# Each piece of a mixed matrix has its own reader.
READERS: dict[type, type[LeafReader]] = {
    PlainFormat: FloatReader,
    PackedFormat: FloatReader,
    QuantizedFormat: QuantizedReader,
    GGMLFormat: GGMLReader,
}


def leaf_readers(model: Model, tensors: Tensors) -> dict[str, LeafReader]:
    """Return a reader for each leaf that is made of tensors; vectors are floats."""
    kinds = {name: READERS[type(matrix.format)] for name, matrix in model.pieces.items()}
    return {name: kinds.get(name, FloatReader)(model, name, tensors) for name in tensors.parts}


__all__ = [
    "ConvertedReader",
    "FloatReader",
    "LeafReader",
    "Shard",
    "Tensors",
    "leaf_readers",
    "undescribed_module",
]
