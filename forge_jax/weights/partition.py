"""Partition of weights among devices: by heads, MLP columns and vocabulary tokens.

The method is Megatron-LM's (Shoeybi et al. 2019, arXiv:1909.08053, section 3). The first matrices
of attention and MLP are split by outputs and the last ones by inputs. Devices therefore sum up only
twice per layer. A shard of a fused matrix (q, k and v, or gate and up) has its part of each,
stacked. It looks like the matrix of a narrower model, so the decoder's modules compute it as one.

Expert parallelism gives a shard some experts of a layer whole. The rest is split in the same way.

This module depends on names and sizes only, not on files or devices.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forge_jax.errors import ConfigError
from forge_kernels.host_arrays import aligned_empty

if TYPE_CHECKING:
    from forge_jax.models.spec import ModelSpec

AXIS = "tensor"  # name of the mesh axis
EXPERTS = 0  # the axis of a leaf that has an array for each expert

# Leaves of a matrix's format other than its values.
BESIDE = (
    *("scale", "zero", "input_scale", "order"),
    *("group_scale", "minimum", "group_minimum"),
)

Range = tuple[int, int]  # begin, end


class Whole(int):
    """The size of a section that every device has whole, see `ModelSpec.own_sections`."""


@dataclass(frozen=True)
class Partition:
    """The way a leaf is split: along `axis`, shard i is the ranges `parts[i]`, concatenated.

    `axis` is EXPERTS, or negative, so that it does not depend on an axis of experts before it. A
    shard smaller than `size` is padded with zeros, because the vocabulary need not divide evenly.
    """

    axis: int
    parts: tuple[tuple[Range, ...], ...]
    size: int

    def shard(self, whole: np.ndarray, index: int) -> np.ndarray:
        """Return a copy of shard `index`, aligned for the device."""
        shape = list(whole.shape)
        shape[self.axis] = self.size
        part = aligned_empty(tuple(shape), whole.dtype)
        filled = 0
        for begin, end in self.parts[index]:
            start, filled = filled, filled + end - begin
            self._along(part, start, filled)[...] = self._along(whole, begin, end)
        self._along(part, filled, self.size)[...] = 0
        return part

    @property
    def unit(self) -> int:
        """The largest number that divides the begin and end of every range."""
        return math.gcd(*itertools.chain.from_iterable(itertools.chain(*self.parts)))

    def of_groups(self, size: int) -> Partition:
        """Return the partition of groups of `size` elements, which must divide `unit`."""
        assert self.unit % size == 0 and self.size % size == 0, (self, size)
        parts = (tuple((a // size, b // size) for a, b in part) for part in self.parts)
        return _partition(self.axis, tuple(parts))

    @property
    def by_expert(self) -> bool:
        """True if a shard has the whole matrices of some experts."""
        return self.axis == EXPERTS

    def experts(self, index: int) -> range:
        """Return the experts of shard `index`, if the leaf is split by experts."""
        assert self.by_expert
        [own] = self.parts[index]
        return range(*own)

    def within(self, begin: int, end: int) -> Partition:
        """Return the partition of the piece from `begin` to `end`, relative to `begin`."""

        def within(part: tuple[Range, ...]) -> tuple[Range, ...]:
            both = ((max(a, begin), min(b, end)) for a, b in part)
            return tuple((a - begin, b - begin) for a, b in both if a < b)

        return _partition(self.axis, tuple(map(within, self.parts)))

    def _along(self, array: np.ndarray, begin: int, end: int) -> np.ndarray:
        before = (slice(None),) * (self.axis % array.ndim)
        return array[(*before, slice(begin, end))]


def with_whole_experts(spec: ModelSpec) -> ModelSpec:
    """Return the spec for expert parallelism.

    Raises:
      ConfigError: the model has no experts.
    """
    if spec.experts is None:
        raise ConfigError(
            "--expert-parallel divides the experts of a model, but this model "
            f"({spec.architecture}) has none: omit the option"
        )
    return dataclasses.replace(spec, experts=dataclasses.replace(spec.experts, whole=True))


def check_shards(spec: ModelSpec, shards: int) -> None:
    """Raise ConfigError if the model cannot be split so, with the fields and the valid numbers."""
    faults = _uneven(spec, shards)
    if not faults:
        return
    raise ConfigError(
        f"--tensor-parallel {shards} does not divide {' and '.join(faults)} of this model: "
        f"{with_shards(spec, possible_shards(spec))}"
    )


def with_shards(spec: ModelSpec, counts: Sequence[int]) -> str:
    """Return the advice to use one of these numbers of devices; 1 is always possible."""
    if not spec.expert_parallel:
        return f"use --tensor-parallel {' or '.join(map(str, counts))}"
    several = [str(count) for count in counts if count > 1]
    use = f"use --tensor-parallel {' or '.join(several)}, or " if several else ""
    return f"{use}omit --expert-parallel"


def possible_shards(spec: ModelSpec) -> list[int]:
    """Return each number of devices that divides the model's sizes."""
    return [n for n in range(1, spec.num_attention_heads + 1) if not _uneven(spec, n)]


def _uneven(spec: ModelSpec, shards: int) -> list[str]:
    """Return the fields that cannot be split into so many parts, with their values."""
    sizes = [("num_attention_heads", spec.num_attention_heads)]
    # With fewer key/value heads than shards, several shards hold the same head.
    layers = (spec.of_layer(layer) for layer in range(spec.num_hidden_layers))
    for kv_heads in dict.fromkeys(layer.num_key_value_heads for layer in layers):
        if shards % kv_heads:
            sizes.append(("num_key_value_heads", kv_heads))
    sizes += [*spec.own_counts().items(), *_inner_sizes(spec)]
    return [f"{name} ({size})" for name, size in sizes if size % shards]


def _inner_sizes(spec: ModelSpec) -> list[tuple[str, int]]:
    """Return the sizes of MLPs and experts that devices divide, if the model has them."""
    layers = range(spec.num_hidden_layers)
    with_experts = {spec.experts_of(layer) is not None for layer in layers}
    sizes = [] if with_experts == {True} else [("intermediate_size", spec.intermediate_size)]
    if spec.experts is not None and True in with_experts:
        count, inner = spec.experts.count, spec.experts.intermediate_size
        whole = spec.experts.whole
        sizes.append(
            ("the number of experts", count) if whole else ("the experts' intermediate size", inner)
        )
        if spec.experts.shared_size:
            sizes.append(("the shared experts' intermediate size", spec.experts.shared_size))
    return sizes


def _inner_size(spec: ModelSpec, layer: int) -> int:
    experts = spec.experts_of(layer)
    return spec.of_layer(layer).intermediate_size if experts is None else experts.intermediate_size


def shard_spec(spec: ModelSpec, shards: int) -> ModelSpec:
    """Return the model that one shard computes; the vocabulary stays whole."""
    if shards == 1:
        return spec
    experts = spec.experts
    if experts is not None:
        shared_size = experts.shared_size // shards
        experts = dataclasses.replace(experts, shared_size=shared_size)
        if experts.whole:
            experts = dataclasses.replace(experts, devices=shards)
        else:
            inner = experts.intermediate_size // shards
            experts = dataclasses.replace(experts, intermediate_size=inner)
    return dataclasses.replace(
        spec,
        num_attention_heads=spec.num_attention_heads // shards,
        num_key_value_heads=max(1, spec.num_key_value_heads // shards),
        intermediate_size=spec.intermediate_size // shards,
        experts=experts,
        **spec.own_sizes_of_shard(shards),
    )


def shard_vocab(vocab_size: int, shards: int) -> int:
    """Return the rows of embedding and head per shard; the last shard may be padded."""
    return -(-vocab_size // shards)


def matrix_of(name: str) -> str:
    """Return the matrix leaf that a leaf belongs to: itself, or the matrix of a scale."""
    module, _, part = name.rpartition(".")
    return f"{module}.weight" if part in BESIDE else name


def whole_of(name: str) -> str:
    """Return the leaf of the whole matrix for a piece such as "qkv.pieces.1.weight"."""
    return re.sub(r"\.pieces\.\d+\.", ".", name)


def axis_of(name: str, spec: ModelSpec, shards: int) -> int | None:
    """Return the axis along which a leaf is split; None if every device has all of it.

    The axis is EXPERTS or negative, see `Partition`. This holds for matrices in 8 or 4 bits, whose
    scales and zeros are split like the values, but not for packed matrices. Leaves that describe
    inputs are split only if the inputs or the experts are.
    """
    partition, part = partition_of(whole_of(matrix_of(name)), spec, shards), name.rpartition(".")[2]
    if partition is None:
        return None
    of_inputs = part == "input_scale" or (part == "order" and partition.axis != -1)
    return None if of_inputs and partition.axis != EXPERTS else partition.axis


# The negative axis along which a leaf of a layer is split.
_AXES = {
    **{"attention.qkv.weight": -2, "attention.qkv.bias": -1, "attention.out.weight": -1},
    **{"attention.q_norm.weight": -1, "attention.k_norm.weight": -1},
    **{"mlp.gate_up.weight": -2, "mlp.gate_up.bias": -1, "mlp.down.weight": -1},
    **{"mlp.up.weight": -2, "mlp.up.bias": -1},
    **{"mlp.shared.gate_up.weight": -2, "mlp.shared.down.weight": -1},
}

_OF_EXPERTS = ("mlp.gate_up.weight", "mlp.gate_up_bias", "mlp.down.weight", "mlp.down_bias")


def partition_of(name: str, spec: ModelSpec, shards: int) -> Partition | None:
    """Return how the leaf `name` is split; None if every device has all of it."""
    if shards == 1:
        return None
    if name in ("head.weight", "head.bias", "embedding.weight"):
        V, rows = spec.vocab_size, shard_vocab(spec.vocab_size, shards)
        tokens = (((min(i * rows, V), min((i + 1) * rows, V)),) for i in range(shards))
        return Partition(-1 if name == "head.bias" else -2, tuple(tokens), rows)
    if not name.startswith("layers."):
        return None
    _, layer, leaf = name.split(".", 2)
    experts = spec.experts_of(int(layer))
    if experts is not None and experts.whole and leaf in _OF_EXPERTS:
        each = tuple((_split(experts.count, shards, i),) for i in range(shards))
        return _partition(EXPERTS, each)
    own = spec.own_sections(leaf)
    if own is not None:
        axis, sections = own
        return _partition(axis, tuple(_split_each(sections, shards, i) for i in range(shards)))
    axis = _AXES.get(leaf)
    if axis is None or (leaf.endswith("_norm.weight") and spec.qk_norm == "head"):
        return None
    if leaf.endswith("_norm.weight") and spec.qk_norm == "each_head":
        return _head_norms(leaf, spec, shards)
    matrix, inner = leaf.rpartition(".")[0], _inner_size(spec, int(layer))
    if matrix.startswith("mlp.shared.") and experts is not None:
        matrix, inner = matrix.replace(".shared", ""), experts.shared_size
    sizes = spec.of_layer(int(layer))
    ranges = [_ranges(matrix, sizes, inner, shards, i) for i in range(shards)]
    if matrix == "attention.qkv":  # queries, keys and values, or the first of them
        ranges = [each[: len(spec.projections(int(layer)))] for each in ranges]
    return _partition(axis, tuple(ranges))


def _head_norms(leaf: str, spec: ModelSpec, shards: int) -> Partition:
    """Return how the norms of queries or keys are split, [H, D], by heads."""
    one = dataclasses.replace(spec, head_dim=1)
    matrix = leaf.rpartition(".")[0]
    return _partition(-2, tuple(_ranges(matrix, one, 1, shards, i) for i in range(shards)))


def _ranges(matrix: str, spec: ModelSpec, inner: int, shards: int, index: int) -> tuple[Range, ...]:
    """Return a shard's outputs or inputs of a layer's matrix; `inner` is the size of the MLP."""
    H, K, D = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    queries, gates = _split(H * D, shards, index), _split(inner, shards, index)
    match matrix:
        case "attention.qkv":
            Q = spec.query_parts * H
            keys, values = (_keys(spec, shards, index, start * D) for start in (Q, Q + K))
            return _split(Q * D, shards, index), keys, values
        case "attention.k_norm":
            return (_keys(spec, shards, index),)
        case "mlp.gate_up":
            return gates, _split(inner, shards, index, inner)
        case "mlp.up" | "mlp.down":
            return (gates,)
    return (queries,)


def adapter_partition(target: str, part: str, spec: ModelSpec, shards: int) -> Partition | None:
    """Return how an adapter's a `[L, r, inputs]` or b `[L, rows, r]` of a target ("q") is split.

    It is split like the matrix that it adds to, so that a device needs nothing of the others. None
    means that every device has all of it.
    """
    if shards == 1:
        return None
    H, D, each = spec.num_attention_heads, spec.head_dim, range(shards)
    inner = spec.intermediate_size
    match target, part:
        case "q", "b":
            rows = spec.query_parts * H * D
            return _partition(-2, tuple((_split(rows, shards, i),) for i in each))
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


def _split_each(sizes: Sequence[int], shards: int, index: int) -> tuple[Range, ...]:
    """Return a shard's part of each of several sections, which follow each other."""
    ends = itertools.accumulate(sizes)
    return tuple(
        (end - size, end) if isinstance(size, Whole) else _split(size, shards, index, end - size)
        for size, end in zip(sizes, ends, strict=True)
    )


def _keys(spec: ModelSpec, shards: int, index: int, start: int = 0) -> Range:
    """Return the rows of a shard's key heads or value heads."""
    K, D = spec.num_key_value_heads, spec.head_dim
    count, first = max(1, K // shards), index * K // shards
    return start + first * D, start + (first + count) * D
