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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forge_jax.errors import ConfigError
from forge_kernels.linear.packed import aligned_empty

if TYPE_CHECKING:
    from forge_jax.models.spec import ModelSpec

AXIS = "tensor"  # of the mesh

Range = tuple[int, int]  # from, to


@dataclass(frozen=True)
class Cut:
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

    def _along(self, array: np.ndarray, begin: int, end: int) -> np.ndarray:
        after = (slice(None),) * (-self.axis - 1)
        return array[(..., slice(begin, end), *after)]


def check_shards(spec: ModelSpec, shards: int) -> None:
    """Raises ConfigError if the model cannot be cut so: which fields forbid it, and what goes."""
    faults = _uneven(spec, shards)
    if not faults:
        return
    fit = [str(n) for n in range(1, spec.num_attention_heads + 1) if not _uneven(spec, n)]
    raise ConfigError(
        f"--tensor-parallel {shards} does not divide {' and '.join(faults)} of this model: use "
        f"--tensor-parallel {' or '.join(fit)}"
    )


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


def cut_of(name: str, spec: ModelSpec, shards: int) -> Cut | None:
    """How the leaf `name` is cut; None: every device has all of it."""
    H, K, D = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim

    def split(size: int, index: int, start: int = 0) -> Range:
        part = size // shards
        return start + index * part, start + (index + 1) * part

    def keys(index: int, start: int = 0) -> Range:
        count, first = max(1, K // shards), index * K // shards
        return start + first * D, start + (first + count) * D

    def heads(index: int) -> tuple[Range, ...]:
        return split(H * D, index), keys(index, H * D), keys(index, (H + K) * D)

    def cut(axis: int, parts: tuple[tuple[Range, ...], ...]) -> Cut:
        return Cut(axis, parts, max(sum(end - begin for begin, end in each) for each in parts))

    each = range(shards)
    if name in ("head.weight", "embedding.weight"):
        V, rows = spec.vocab_size, shard_vocab(spec.vocab_size, shards)
        tokens = tuple(((min(i * rows, V), min((i + 1) * rows, V)),) for i in each)
        return Cut(-2, tokens, rows)
    if not name.startswith("layers."):
        return None
    _, layer, leaf = name.split(".", 2)
    inner = _inner_size(spec, int(layer))
    match leaf:
        case "attention.qkv.weight":
            return cut(-2, tuple(heads(i) for i in each))
        case "attention.qkv.bias":
            return cut(-1, tuple(heads(i) for i in each))
        case "attention.out.weight":
            return cut(-1, tuple((split(H * D, i),) for i in each))
        case "attention.q_norm.weight" if spec.qk_norm == "all":
            return cut(-1, tuple((split(H * D, i),) for i in each))
        case "attention.k_norm.weight" if spec.qk_norm == "all":
            return cut(-1, tuple((keys(i),) for i in each))
        case "mlp.gate_up.weight" | "mlp.gate_up.bias":
            both = tuple((split(inner, i), split(inner, i, inner)) for i in each)
            return cut(-2 if leaf.endswith("weight") else -1, both)
        case "mlp.down.weight":
            return cut(-1, tuple((split(inner, i),) for i in each))
    return None
