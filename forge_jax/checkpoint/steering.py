"""Files of steering vectors: safetensors with one tensor, [d] or [L, d]."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forge_jax.checkpoint.safetensors import read_header
from forge_jax.errors import CheckpointError
from forge_jax.models.spec import ModelSpec
from forge_jax.models.steering import SteeringShape
from forge_jax.weights.stored import FLOATS


@dataclass(frozen=True, kw_only=True)
class SteeringVectors:
    """The steering vectors of an engine.

    Attributes:
      shape: names and sizes.
      stack: f32[n, L, d]. A file with one vector has it in every layer.
      one_vector: True for each name whose file has one vector for all layers.
    """

    shape: SteeringShape
    stack: np.ndarray
    one_vector: dict[str, bool]


def read_steering(files: Sequence[tuple[str, Path]], spec: ModelSpec) -> SteeringVectors:
    """Read the vectors of `files`, pairs of name and file.

    Raises:
      CheckpointError: a file is missing or broken, or does not fit the model. The message names it.
    """
    layers, width = spec.num_hidden_layers, spec.hidden_size
    values = [_read(file, layers, width) for _, file in files]
    stack = np.stack([np.broadcast_to(each, (layers, width)) for each in values])
    names = tuple(name for name, _ in files)
    digest = hashlib.sha256(repr(names).encode() + stack.tobytes()).hexdigest()
    return SteeringVectors(
        shape=SteeringShape(names=names, layers=layers, width=width, digest=digest),
        stack=stack,
        one_vector={name: each.ndim == 1 for name, each in zip(names, values, strict=True)},
    )


def _read(file: Path, layers: int, width: int) -> np.ndarray:
    """Return f32[d] or f32[L, d]."""
    tensors = list(read_header(file).values())
    if len(tensors) != 1:
        raise CheckpointError(
            f"{file} has {len(tensors)} tensors: a file of a steering vector has one"
        )
    [tensor] = tensors
    where = f"{file}: {tensor.name}"
    if tuple(tensor.shape) not in ((width,), (layers, width)):
        raise CheckpointError(
            f"{where} has shape {tuple(tensor.shape)}, but this model's steering vectors have "
            f"shape ({width},), or ({layers}, {width}) with one vector per layer"
        )
    if tensor.dtype not in FLOATS:
        raise CheckpointError(f"{where} is {tensor.dtype}: convert it to float32")
    values = tensor.read().astype(np.float32)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{where} has values that are not finite")
    return values
