"""Which part of each weight a device has: heads, columns of the MLP, tokens of the vocabulary.

As in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): the matrices that a layer
begins with are cut by their outputs, those that it ends with by their inputs, so that the devices
have to add up twice in a layer. A shard of a matrix that holds several (queries, keys and values;
gates and ups) has its part of each, one below the other: what a narrower model would have. So the
modules of the decoder compute a shard as they compute a model.

Knows names and sizes; no files and no devices.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forge_jax.errors import ConfigError
from forge_kernels.linear.panels import aligned_empty

if TYPE_CHECKING:
    from forge_jax.models.spec import ModelSpec

AXIS = "tensor"  # of the mesh

# Leaves beside a matrix, which its format has.
BESIDE = (
    *("scale", "zero", "input_scale", "order"),
    *("group_scale", "minimum", "group_minimum"),
)

Range = tuple[int, int]  # from, to


@dataclass(frozen=True)
class Partition:
    """How a leaf is cut: along `axis`, shard i is the ranges `parts[i]`, one after the other.

    `axis` counts from the last, so that it is the same with an axis of experts before it. A shard
    that is smaller than `size` is filled up with zeros: the vocabulary need not divide evenly.
    """

    axis: int
    parts: tuple[tuple[Range, ...], ...]
    size: int

    def shard(self, whole: np.ndarray, index: int) -> np.ndarray:
        """A copy of the part of shard `index`, aligned for the device."""
        shape = list(whole.shape)
        shape[self.axis] = self.size
        part = aligned_empty(tuple(shape), whole.dtype)
        filled = 0
        for begin, end in self.parts[index]:
            start, filled = filled, filled + end - begin
            self._along(part, start, filled)[...] = self._along(whole, begin, end)
        self._along(part, filled, self.size)[...] = 0
        return part

    def within(self, begin: int, end: int) -> Partition:
        """How the piece from `begin` to `end` is cut, counted from its beginning."""

        def within(part: tuple[Range, ...]) -> tuple[Range, ...]:
            both = ((max(a, begin), min(b, end)) for a, b in part)
            return tuple((a - begin, b - begin) for a, b in both if a < b)

        return _partition(self.axis, tuple(map(within, self.parts)))

    def _along(self, array: np.ndarray, begin: int, end: int) -> np.ndarray:
        after = (slice(None),) * (-self.axis - 1)
        return array[(..., slice(begin, end), *after)]


def check_shards(spec: ModelSpec, shards: int) -> None:
    """Raises ConfigError if the model cannot be cut so: which fields forbid it, and what goes."""
    faults = _uneven(spec, shards)
    if not faults:
        return
    fit = map(str, possible_shards(spec))
    raise ConfigError(
        f"--tensor-parallel {shards} does not divide {' and '.join(faults)} of this model: use "
        f"--tensor-parallel {' or '.join(fit)}"
    )


def possible_shards(spec: ModelSpec) -> list[int]:
    """Each number of devices that divides the model's sizes."""
    return [n for n in range(1, spec.num_attention_heads + 1) if not _uneven(spec, n)]


def _uneven(spec: ModelSpec, shards: int) -> list[str]:
    """The fields that cannot be cut into so many parts, with their values."""
    sizes = [("num_attention_heads", spec.num_attention_heads)]
    # Fewer key/value heads than shards: each is on several, which share its queries.
    if shards % spec.num_key_value_heads:
        sizes.append(("num_key_value_heads", spec.num_key_value_heads))
    sizes += _inner_sizes(spec)
    return [f"{name} ({size})" for name, size in sizes if size % shards]


def _inner_sizes(spec: ModelSpec) -> list[tuple[str, int]]:
    """Of the MLPs and the experts that there are."""
    layers = range(spec.num_hidden_layers)
    with_experts = {spec.experts_of(layer) is not None for layer in layers}
    sizes = [] if with_experts == {True} else [("intermediate_size", spec.intermediate_size)]
    if spec.experts is not None and True in with_experts:
        sizes.append(("the experts' intermediate size", spec.experts.intermediate_size))
    return sizes


def _inner_size(spec: ModelSpec, layer: int) -> int:
    experts = spec.experts_of(layer)
    return spec.intermediate_size if experts is None else experts.intermediate_size


def shard_spec(spec: ModelSpec, shards: int) -> ModelSpec:
    """What one of the shards computes, as a model of its own; the vocabulary stays whole."""
    if shards == 1:
        return spec
    experts = spec.experts
    if experts is not None:
        inner = experts.intermediate_size // shards
        experts = dataclasses.replace(experts, intermediate_size=inner)
    return dataclasses.replace(
        spec,
        num_attention_heads=spec.num_attention_heads // shards,
        num_key_value_heads=max(1, spec.num_key_value_heads // shards),
        intermediate_size=spec.intermediate_size // shards,
        experts=experts,
    )


def shard_vocab(vocab_size: int, shards: int) -> int:
    """Rows of embedding and head that a shard has; the last ones may be no token's."""
    return -(-vocab_size // shards)


def matrix_of(name: str) -> str:
    """The leaf of the matrix that a leaf belongs to: its own, or that of scales and the like."""
    module, _, part = name.rpartition(".")
    return f"{module}.weight" if part in BESIDE else name


def whole_of(name: str) -> str:
    """The leaf of the whole matrix, of one of its pieces ("qkv.pieces.1.weight")."""
    return re.sub(r"\.pieces\.\d+\.", ".", name)


def axis_of(name: str, spec: ModelSpec, shards: int) -> int | None:
    """Along which axis the leaf `name` is cut, from the last; None: every device has all of it.

    Of matrices in 8 or 4 bits, whose scales and zeros are cut as they are; packed ones are not
    meant. What says something of the inputs is cut where these are.
    """
    partition, part = partition_of(whole_of(matrix_of(name)), spec, shards), name.rpartition(".")[2]
    if partition is None or part == "input_scale" or (part == "order" and partition.axis != -1):
        return None
    return partition.axis


# The axis along which a leaf of a layer is cut, from the last.
_AXES = {
    **{"attention.qkv.weight": -2, "attention.qkv.bias": -1, "attention.out.weight": -1},
    **{"attention.q_norm.weight": -1, "attention.k_norm.weight": -1},
    **{"mlp.gate_up.weight": -2, "mlp.gate_up.bias": -1, "mlp.down.weight": -1},
}


def partition_of(name: str, spec: ModelSpec, shards: int) -> Partition | None:
    """How the leaf `name` is cut; None: every device has all of it."""
    if shards == 1:
        return None
    if name in ("head.weight", "embedding.weight"):
        V, rows = spec.vocab_size, shard_vocab(spec.vocab_size, shards)
        tokens = (((min(i * rows, V), min((i + 1) * rows, V)),) for i in range(shards))
        return Partition(-2, tuple(tokens), rows)
    if not name.startswith("layers."):
        return None
    _, layer, leaf = name.split(".", 2)
    axis = _AXES.get(leaf)
    if axis is None or (leaf.endswith("_norm.weight") and spec.qk_norm != "all"):
        return None
    matrix, inner = leaf.rpartition(".")[0], _inner_size(spec, int(layer))
    return _partition(axis, tuple(_ranges(matrix, spec, inner, shards, i) for i in range(shards)))


def _ranges(matrix: str, spec: ModelSpec, inner: int, shards: int, index: int) -> tuple[Range, ...]:
    """The outputs or inputs of a layer's matrix that a shard has; `inner`: size of the MLP."""
    H, K, D = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    queries, gates = _split(H * D, shards, index), _split(inner, shards, index)
    match matrix:
        case "attention.qkv":
            keys, values = (_keys(spec, shards, index, start * D) for start in (H, H + K))
            return queries, keys, values
        case "attention.k_norm":
            return (_keys(spec, shards, index),)
        case "mlp.gate_up":
            return gates, _split(inner, shards, index, inner)
        case "mlp.down":
            return (gates,)
    return (queries,)


def adapter_partition(target: str, part: str, spec: ModelSpec, shards: int) -> Partition | None:
    """How an adapter's matrix a `[L, r, inputs]` or b `[L, rows, r]` of a target ("q") is cut.

    As the matrix that it adds to: so a device needs nothing of the others for its part of it. None:
    every device has all.
    """
    if shards == 1:
        return None
    H, D, each = spec.num_attention_heads, spec.head_dim, range(shards)
    inner = spec.intermediate_size
    match target, part:
        case "q", "b":
            return _partition(-2, tuple((_split(H * D, shards, i),) for i in each))
        case (("k" | "v"), "b"):
            return _partition(-2, tuple((_keys(spec, shards, i),) for i in each))
        case (("gate" | "up"), "b"):
            return _partition(-2, tuple((_split(inner, shards, i),) for i in each))
        case "o", "a":
            return _partition(-1, tuple((_split(H * D, shards, i),) for i in each))
        case "down", "a":
            return _partition(-1, tuple((_split(inner, shards, i),) for i in each))
    return None


def _partition(axis: int, parts: tuple[tuple[Range, ...], ...]) -> Partition:
    return Partition(axis, parts, max(sum(end - begin for begin, end in each) for each in parts))


def _split(size: int, shards: int, index: int, start: int = 0) -> Range:
    part = size // shards
    return start + index * part, start + (index + 1) * part


def _keys(spec: ModelSpec, shards: int, index: int, start: int = 0) -> Range:
    """Rows of the key heads of a shard, or of the value heads."""
    K, D = spec.num_key_value_heads, spec.head_dim
    count, first = max(1, K // shards), index * K // shards
    return start + first * D, start + (first + count) * D
