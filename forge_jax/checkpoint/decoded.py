"""Quantized matrices that a model needs as floats: decoded from the checkpoint as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from forge_jax.errors import UnsupportedModelError
from forge_jax.models.decoder import Model
from forge_jax.models.weight_map import WeightMap
from forge_jax.weights.quantized import module_of
from forge_jax.weights.stored import TensorSource
from forge_jax.weights.tensors import MIDDLE, Matrix, Scheme, check_matrix, read_matrices


def with_decoded(
    model: Model, parts: WeightMap, stored: Mapping[str, TensorSource]
) -> tuple[Mapping[str, TensorSource], list[str]]:
    """Return the tensors with floats for quantized matrices of which leaves have rows of each head.

    These are the matrices that turn latents into keys and values (`forge_jax.models.latent`).

    Returns:
      (stored, faults): the tensors, and the faults of the quantized ones, from their headers.

    Raises:
      UnsupportedModelError: the values cannot be decoded.
    """
    quantization = model.spec.quantization
    if quantization is None:
        return stored, []
    decoded: dict[str, TensorSource] = {}
    hidden: set[str] = set()
    faults: list[str] = []
    for leaf, (part, *_) in parts.items():
        if part.of_heads is None or part.name in decoded:
            continue
        module, shape = module_of(part.name), (part.shape[0], part.shape[1])
        scheme = quantization.scheme_of(module, in_layer=leaf.startswith("layers."))
        if scheme is None:
            continue
        if scheme.values == "mxfp4":
            raise UnsupportedModelError(
                f"{quantization.where}: {module} is quantized to {scheme.values}, which is "
                "supported only for experts"
            )
        faults += check_matrix(scheme, module, shape, stored)
        hidden |= {wanted.name for wanted in scheme.layout.wanted(scheme, module, shape)}
        decoded[part.name] = _Decoded(scheme, module, shape, stored)
    if not decoded:
        return stored, []
    return {k: v for k, v in stored.items() if k not in hidden} | decoded, faults


@dataclass(frozen=True, eq=False)
class _Decoded:
    """The floats of a quantized matrix; each call reads the matrix and decodes only its rows."""

    scheme: Scheme
    module: str
    shape: tuple[int, int]
    stored: Mapping[str, TensorSource]
    dtype: np.dtype = field(default=np.dtype(np.float32))

    def read_rows(self, out: np.ndarray, first: int) -> None:
        matrix = read_matrices(self.scheme, {self.module: self.shape}, self.stored)
        out[...] = _floats(matrix.rows(np.arange(first, first + len(out))), self.scheme)


def _floats(matrix: Matrix, scheme: Scheme) -> np.ndarray:
    """Return f32[N, K], with the columns in the model's order."""
    values = matrix.values.astype(np.float32)
    group = scheme.block[1] or values.shape[1]

    def by_column(of_groups: np.ndarray) -> np.ndarray:
        return np.repeat(of_groups, group, axis=1)[:, : values.shape[1]]

    if matrix.zero is not None:
        values -= by_column(matrix.zero.astype(np.float32))
    elif scheme.values == "int4":
        values -= MIDDLE
    values *= by_column(matrix.scale)
    if matrix.order is None:
        return values
    out = np.empty_like(values)
    out[:, matrix.order] = values
    return out
