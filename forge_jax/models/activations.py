"""Activations that a served step returns: their names and shapes, known before it compiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from forge_jax.models.probe import Probe, sorted_names

if TYPE_CHECKING:
    from forge_jax.models.decoder import Model
    from forge_jax.models.kv import KV

PATTERN = "attn.pattern"
SHARDED = ("attn.q", "attn.k", "attn.v", "attn.latent", "mlp.inner")  # with tensor parallelism


@dataclass(frozen=True, kw_only=True)
class ServedActivations:
    """The activations that a step returns.

    Attributes:
      row_bytes: bytes of one token's activation by name, in the order of computation.
    """

    row_bytes: dict[str, int]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.row_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of all activations of one token."""
        return sum(self.row_bytes.values())


def served_activations(
    model: Model, kv: KV, patterns: Sequence[str], shards: int
) -> ServedActivations:
    """Return the activations that match `patterns`, without computing anything.

    Args:
      model: all of it, not a shard.
      kv: shapes of a cache of one block.
      patterns: names, or patterns as `fnmatch` matches them.
      shards: number of tensor-parallel shards.

    Raises:
      ValueError: a pattern matches no activation, or one that a step cannot return.
    """
    names = _trace(model, kv, ()).reached
    for pattern in patterns:
        for name in names:
            if fnmatchcase(name, pattern):
                _check_name(name, pattern, shards)
    taken = _trace(model, kv, tuple(patterns)).finish(model.spec.architecture)
    return ServedActivations(
        row_bytes={
            name: math.prod(taken[name].shape[1:]) * taken[name].dtype.itemsize
            for name in sorted_names(taken)
        }
    )


def _check_name(name: str, pattern: str, shards: int) -> None:
    if name.endswith(PATTERN):
        raise ValueError(
            f"{pattern!r} matches {name}, which a served step does not compute: use other names, "
            "and LoadedModel with taps for weights of attention"
        )
    if shards > 1 and name.endswith(SHARDED):
        raise ValueError(
            f"{pattern!r} matches {name}, which tensor parallelism divides: use attn.out, mlp.out, "
            "resid, embed, final_norm or mlp.router"
        )


def _trace(model: Model, kv: KV, patterns: tuple[str, ...]) -> Probe:
    """Return the probe of a step of one token."""
    probe = Probe(taps=patterns)
    one = jax.ShapeDtypeStruct((1,), jnp.int32)

    def step(leaves: tuple[jax.Array, ...], kv: KV, row: jax.Array, ends: jax.Array) -> jax.Array:
        table = row[:, None]
        _, hidden = model.forward(
            leaves,
            kv,
            row,
            row,
            row,
            table,
            row,
            ends,
            row[0],
            implementation="reference",
            max_q_len=1,
            state_slots=row,
            probe=probe,
        )
        return hidden

    ends = jax.ShapeDtypeStruct((2,), jnp.int32)
    jax.eval_shape(step, model.leaves, kv, one, ends)  # pyright: ignore[reportUnknownMemberType]
    return probe
