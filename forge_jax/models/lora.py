"""The arrays of LoRA adapters next to a model's own: their shapes, and a step's use of them.

All adapters of an engine share one array for each of the two matrices of each target, indexed by
*place*. Shapes are therefore fixed, and loading or unloading an adapter compiles nothing. Adapters
of a smaller rank are padded with zeros. Place 0 means no adapter and has no weights.

On CPUs with bfloat16 weights, the matrices are packed for the C++ kernels.

Letters: L layers, P places, r rank, T tokens of the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from forge_kernels.lora import lora, pack_adapter, packed_lora, packings

if TYPE_CHECKING:
    from forge_jax.models.spec import ModelSpec


class Target(NamedTuple):
    """A matrix that adapters may change: rows of a matrix of the decoder, which fuses several."""

    matrix: str  # "attention.qkv"
    start: int  # the first row in the matrix
    rows: int
    inputs: int


def lora_targets(spec: ModelSpec) -> dict[str, Target]:
    """Return the targets by name, in the order of the stacks; matrices of experts are excluded."""
    d, inner = spec.hidden_size, spec.intermediate_size
    heads = spec.num_attention_heads * spec.head_dim
    q_rows = spec.query_parts * heads
    kv_rows = spec.num_key_value_heads * spec.head_dim
    targets = {
        "q": Target("attention.qkv", 0, q_rows, d),
        "k": Target("attention.qkv", q_rows, kv_rows, d),
        "v": Target("attention.qkv", q_rows + kv_rows, kv_rows, d),
        "o": Target("attention.out", 0, d, heads),
    }
    if any(spec.experts_of(layer) is None for layer in range(spec.num_hidden_layers)):
        if spec.mlp_gated:
            targets["gate"] = Target("mlp.gate_up", 0, inner, d)
            targets["up"] = Target("mlp.gate_up", inner, inner, d)
        else:
            targets["up"] = Target("mlp.up", 0, inner, d)
        targets["down"] = Target("mlp.down", 0, d, inner)
    return targets


@dataclass(frozen=True, kw_only=True)
class LoraShape:
    """The number of adapters that can be loaded at once, their rank, and their layout."""

    places: int  # P, without place 0
    rank: int  # r
    packed: bool = False  # for the CPU kernels

    def stacks(self, spec: ModelSpec, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shapes of a and b for each target.

        They are `[L, P, r, inputs]` and `[L, rows, P, r]`, or `[L, P, ...]` if they are packed.
        """
        layers, places, rank = spec.num_hidden_layers, self.places, self.rank
        if self.packed:
            return self._packed(spec, (layers, places))
        return tuple(
            jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
            for target in lora_targets(spec).values()
            for shape in (
                (layers, places, rank, target.inputs),
                (layers, target.rows, places, rank),
            )
        )

    def adapter(self, spec: ModelSpec, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shapes of one adapter, as `pack` returns it: `[L, ...]` if it is packed."""
        if self.packed:
            return self._packed(spec, (spec.num_hidden_layers,))
        return self.plain_adapter(spec, dtype)

    def plain_adapter(self, spec: ModelSpec, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shapes of one adapter: `[L, r, inputs]` and `[L, rows, r]` per target."""
        layers, rank = spec.num_hidden_layers, self.rank
        return tuple(
            jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
            for target in lora_targets(spec).values()
            for shape in ((layers, rank, target.inputs), (layers, target.rows, rank))
        )

    def pack(self, adapter: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """Return an adapter (see `plain_adapter`) in the layout of the stacks."""
        if not self.packed:
            return adapter
        packed: list[np.ndarray] = []
        for a, b in zip(adapter[::2], adapter[1::2], strict=True):
            layers = [pack_adapter(*of_layer) for of_layer in zip(a, b, strict=True)]
            packed += map(np.stack, zip(*layers, strict=True))
        return tuple(packed)

    def _packed(
        self, spec: ModelSpec, leading: tuple[int, ...]
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(
            jax.ShapeDtypeStruct((*leading, *packing.weight.shape), packing.weight.dtype)
            for target in lora_targets(spec).values()
            for packing in packings(target.inputs, target.rows, self.rank)
        )

    def num_bytes(self, spec: ModelSpec, dtype: Any) -> int:
        """Return the bytes of the stacks; of one device's part if the spec is its shard's."""
        stacks = self.stacks(spec, dtype)
        return sum(math.prod(stack.shape) * stack.dtype.itemsize for stack in stacks)


class LayerLora(NamedTuple):
    """The adapters of one layer."""

    index: int
    stacks: dict[str, tuple[jax.Array, jax.Array]]  # by target, of all layers
    rows: dict[str, int]  # by target
    places: jax.Array  # i32[T]

    def delta(
        self, x: jax.Array, targets: tuple[str, ...], num_rows: jax.Array | None = None
    ) -> jax.Array:
        """Return the term to add to the product of x, dtype[T, inputs], and these targets.

        Rows from `num_rows` (i32[]) on are not used.
        """
        with jax.named_scope("lora"):
            parts = [self._delta(x, target, num_rows) for target in targets]
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)

    def _delta(self, x: jax.Array, target: str, num_rows: jax.Array | None) -> jax.Array:
        a, b = self.stacks[target]
        if a.dtype != jnp.uint16:
            return lora(x, a[self.index], b[self.index], self.places)
        return packed_lora(
            x,
            a,
            b,
            self.places,
            layer=self.index,
            outputs=self.rows[target],
            num_rows=num_rows,
        )


class Lora(NamedTuple):
    """The adapters of a step, and the adapter of each token."""

    stacks: tuple[jax.Array, ...]  # as in `LoraShape.stacks`
    places: jax.Array  # i32[T], the adapter of each token; 0: none

    def layer(self, spec: ModelSpec, index: int) -> LayerLora:
        targets = lora_targets(spec)
        pairs = zip(self.stacks[::2], self.stacks[1::2], strict=True)
        rows = {name: target.rows for name, target in targets.items()}
        return LayerLora(index, dict(zip(targets, pairs, strict=True)), rows, self.places)


def set_adapter(
    stacks: tuple[jax.Array, ...],
    place: jax.Array,  # i32[], from 1
    adapter: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Write one adapter (see `LoraShape.adapter`) to its place in the stacks."""
    put = jax.lax.dynamic_update_index_in_dim  # a scatter of 16 bits is slow on CPUs
    return tuple(
        # a: [L, P, ...], b: [L, rows, P, r], or packed [L, P, ...]
        put(stack, new, place - 1, axis=1 + (index % 2 if stack.dtype != jnp.uint16 else 0))
        for index, (stack, new) in enumerate(zip(stacks, adapter, strict=True))
    )
