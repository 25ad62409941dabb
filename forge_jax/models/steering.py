"""Steering vectors in a step: which of them a sequence adds to its residual stream.

All vectors of an engine are in one stack on the device. Each slot has a *row* that selects some of
them, with scales and layers. Shapes are therefore fixed, and a request compiles nothing.

Letters: n vectors, L layers, d hidden size, S sequences, T tokens, K vectors per request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax.models.probe import Edit, Probe
from forge_jax.sampling_params import MAX_STEERING_VECTORS, SteeringVector

_BITS = 32  # layers per word of a row


@dataclass(frozen=True, kw_only=True)
class SteeringShape:
    """The steering vectors of an engine, without their values.

    Attributes:
      names: the vectors' names, in the order of the stack.
      layers: number of the model's layers.
      width: the hidden size.
      digest: hash of the values.
    """

    names: tuple[str, ...]
    layers: int
    width: int
    digest: str

    @property
    def stack(self) -> jax.ShapeDtypeStruct:
        """The shape of all vectors: f32[n, L, d]."""
        return jax.ShapeDtypeStruct((len(self.names), self.layers, self.width), jnp.float32)

    @property
    def num_bytes(self) -> int:
        return 4 * math.prod(self.stack.shape)

    @property
    def columns(self) -> int:
        """The length of a slot's row: K times index, scale, and one bit per layer."""
        return MAX_STEERING_VECTORS * self._words

    @property
    def _words(self) -> int:
        return 2 + math.ceil(self.layers / _BITS)

    def row(self, vectors: Sequence[SteeringVector]) -> np.ndarray:
        """Return a slot's row, i32[columns]. Zeros steer nothing.

        The engine has checked the names and layers. Scales are not 0.
        """
        row = np.zeros((MAX_STEERING_VECTORS, self._words), np.uint32)
        for words, vector in zip(row, vectors, strict=False):
            words[0] = self.names.index(vector.name)
            words[1] = np.float32(vector.scale).view(np.uint32)
            for layer in range(self.layers) if vector.layers is None else vector.layers:
                words[2 + layer // _BITS] |= np.uint32(1 << layer % _BITS)
        return row.reshape(-1).view(np.int32)

    def probe(self, stack: jax.Array, rows: jax.Array, seq: jax.Array) -> Probe:
        """Return the probe that steers a step.

        Args:
          stack: f32[n, L, d].
          rows: i32[S, columns], the row of each sequence.
          seq: i32[T], the sequence of each token.
        """
        fields = rows.reshape(len(rows), MAX_STEERING_VECTORS, self._words)
        edits: dict[str, Edit] = {
            f"layers.{layer}.resid": partial(_steer, stack[:, layer], fields, seq, layer)
            for layer in range(self.layers)
        }
        return Probe(edit=edits)


def _steer(
    vectors: jax.Array,  # f32[n, d], of this layer
    fields: jax.Array,  # i32[S, K, words]
    seq: jax.Array,  # i32[T]
    layer: int,
    x: jax.Array,  # dtype[T, d]
) -> jax.Array:
    """Add the scaled vectors one by one in float32, and round once.

    Other tokens are selected, not added to zero, which would turn -0.0 into 0.0.
    """
    with jax.named_scope("steering"):
        return _steered(vectors, fields, seq, layer, x)


def _steered(
    vectors: jax.Array, fields: jax.Array, seq: jax.Array, layer: int, x: jax.Array
) -> jax.Array:
    scale = jax.lax.bitcast_convert_type(fields[:, :, 1], jnp.float32)
    on = (fields[:, :, 2 + layer // _BITS] >> layer % _BITS) & 1 > 0
    # Without the barrier, the product and the sum may be fused into one operation.
    terms = jax.lax.optimization_barrier(scale[:, :, None] * vectors[fields[:, :, 0]])
    total = x.astype(jnp.float32)
    for k in range(MAX_STEERING_VECTORS):
        total = jnp.where(on[seq, k, None], total + terms[seq, k], total)
    return jnp.where(on.any(axis=1)[seq, None], total.astype(x.dtype), x)
