"""Matrices whose values are quantized: their format, and the leaves of a model that have it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_jax.errors import CheckpointError, ConfigError, UnsupportedModelError
from forge_jax.weights.formats import MatrixShape
from forge_jax.weights.partition import AXIS, partition_of, possible_shards, with_shards
from forge_jax.weights.quantization import QuantSpec
from forge_jax.weights.tensors import MIDDLE, Matrix, Scheme
from forge_kernels.linear import (
    Format,
    MatrixWeight,
    OrderedWeight,
    PackedWeight,
    Packing,
    Quantization,
    QuantizedWeight,
    native_int4,
    pack_int4,
    pack_values,
)

if TYPE_CHECKING:
    from forge_jax.models.spec import ModelSpec
    from forge_jax.models.weight_map import Tensor, WeightMap

GROUP = 32  # columns per scale of the kernels' int4; larger groups repeat the scale
ROUTERS = (".router.weight", ".shared.gate.weight")
LEAST_GROUP = 8  # columns of a split group; below that, scales outweigh the values


@dataclass(frozen=True)
class QuantizedFormat:
    """A matrix whose values are quantized, by the checkpoint or as they are read.

    Attributes:
      scheme: the values, and the groups of them that share a scale.
      packed: the format of the CPU kernels, which hold the values of some schemes exactly; None if
        XLA multiplies with the stored values.
      rounded: True if the checkpoint has floats, which are rounded as they are read.
      parts: the number of devices that share the inputs. All sizes are those of one part.
      unit: if several devices share the inputs, a number that divides the begin and end of every
        range of inputs that a device has.
      follows: True if the inputs are the outputs of experts' gate and up. Their rows are read in
        this matrix's column order, so that no step permutes anything.
      fused: see `Quantization`.
    """

    scheme: Scheme
    packed: Format | None = None
    rounded: bool = False
    parts: int = 1
    unit: int | None = None
    follows: bool = False
    fused: bool = False

    @property
    def is_ordered(self) -> bool:
        """True if a step permutes the columns of x."""
        return self.scheme.ordered and not self.follows

    def weight(self, shape: MatrixShape, dtype: Any) -> MatrixWeight:
        packing = self.packing(shape)
        weight: MatrixWeight
        if packing is None:
            weight = QuantizedWeight.abstract(self.quantization(shape))
        else:
            weight = PackedWeight.abstract(packing)
        if not self.is_ordered:
            return weight
        return OrderedWeight.abstract(weight, shape.inputs, shape.experts)

    def packing(self, shape: MatrixShape) -> Packing | None:
        if self.packed is None:
            return None
        return Packing(self.packed, shape.outputs, shape.inputs, shape.paired, shape.experts)

    def quantization(self, shape: MatrixShape) -> Quantization:
        """Return the layout of the values for XLA."""
        scheme, inputs = self.scheme, shape.inputs
        is_dynamic = scheme.activations is not None and not scheme.static
        of_parts = self.parts > 1 and is_dynamic and self._size(inputs) is None
        return Quantization(
            values=scheme.values,
            outputs=shape.outputs,
            inputs=inputs,
            group=self.group(inputs),
            zeros=scheme.zeros,
            activations=scheme.activations,
            static=scheme.static,
            axis=AXIS if of_parts else None,
            experts=shape.experts,
            fused=self.fused,
        )

    def names(self, shape: MatrixShape) -> set[str]:
        own = f"{'rounded' if self.rounded else self.scheme.layout.name} {self.scheme.values}"
        return {own} if self.packed is None else {own, self.packed}

    def arrays(self, matrix: Matrix, shape: MatrixShape, leaf: str) -> dict[str, np.ndarray]:
        """Return the arrays of one matrix by the last part of their leaf names.

        Raises:
          CheckpointError: the CPU kernels cannot hold a value; the message names `leaf`.
        """
        found: dict[str, np.ndarray] = {}
        if self.is_ordered:
            assert matrix.order is not None
            found["order"] = matrix.order
        packing = self.packing(replace(shape, experts=None))
        if packing is not None:
            found["weight"], found["scale"] = _pack(matrix, packing, leaf)
            return found
        values = matrix.values
        if self.scheme.values == "int4":
            group = self.group(values.shape[1])
            values = native_int4(values) if self.fused else pack_int4(values, group)
        elif self.scheme.values == "mxfp4":
            values = pack_int4(values, self.group(values.shape[1]))
        elif self.scheme.values == "fp8":
            values = values.view(np.uint8)
        found["weight"] = np.ascontiguousarray(values)
        found["scale"] = np.ascontiguousarray(matrix.scale)
        if matrix.zero is not None:
            found["zero"] = np.ascontiguousarray(matrix.zero)
        if matrix.input_scale is not None:
            found["input_scale"] = matrix.input_scale.reshape(1)
        return found

    def group(self, inputs: int) -> int:
        """Return the columns that share a scale, in a part if a split divides a group."""
        size = self._size(inputs)
        if size is None:
            return inputs
        return size if self.parts == 1 else math.gcd(size, self.unit or inputs)

    def _size(self, inputs: int) -> int | None:
        """Return the columns per group in the checkpoint; None for whole rows."""
        size = self.scheme.block[1]
        return None if size is None or size >= inputs * self.parts else size

    def fault(self, inputs: int) -> str | None:
        """Return why a part cannot have so many columns, or None if it can."""
        size, in_pairs = self._size(inputs), self.scheme.values in ("int4", "mxfp4")
        if self.parts == 1:
            return None
        if size is None:
            return "they are stored in pairs" if in_pairs and inputs % 2 else None
        group = self.group(inputs)
        if self.scheme.activations is not None and group != size:
            return f"each {size} are multiplied with activations that are rounded together"
        if group < LEAST_GROUP or (in_pairs and group % 2):
            return f"each {size} share a scale"
        return None


def _pack(matrix: Matrix, packing: Packing, leaf: str) -> tuple[np.ndarray, np.ndarray]:
    if packing.format == "int8":
        return pack_values(matrix.values, matrix.scale[:, 0], packing)
    columns = packing.inputs // matrix.scale.shape[1]
    scale = np.repeat(matrix.scale, columns // GROUP, axis=1)
    try:
        return pack_values(matrix.values.astype(np.int8) - MIDDLE, scale, packing)
    except ValueError as error:
        raise CheckpointError(
            f"the CPU kernels cannot hold {leaf}: {error}: serve it with --kernels xla"
        ) from error


# ---- which leaves ------------------------------------------------------------------------------


def quantized_formats(
    spec: ModelSpec, weights: WeightMap, *, kernels: bool, shards: int = 1
) -> dict[str, QuantizedFormat]:
    """Return the leaves ("layers.0.mlp.down.weight") that are quantized, and their formats.

    Args:
      spec: the model.
      weights: the tensors of each leaf.
      kernels: True if matrices may be packed for the CPU kernels.
      shards: the number of devices that share the model.

    Raises:
      UnsupportedModelError: matrices of one leaf, or of experts, are quantized in different ways.
      ConfigError: groups cannot be split for so many devices.
    """
    quantization = spec.quantization
    if quantization is None:
        return {}
    formats = cut_formats(_whole_formats(quantization, spec, weights), spec, weights, shards)
    if not kernels:
        return formats
    packed = {
        leaf: _packed_format(format, weights[leaf][0].columns // format.parts)
        for leaf, format in formats.items()
    }
    for both in expert_leaves(spec):  # the kernel supports one format per expert
        if len({packed.get(leaf) for leaf in both}) > 1:
            packed |= dict.fromkeys(both)
    return {leaf: replace(format, packed=packed[leaf]) for leaf, format in formats.items()}


def _whole_formats(
    quantization: QuantSpec, spec: ModelSpec, weights: WeightMap
) -> dict[str, QuantizedFormat]:
    """Return the formats of a model on one device, with the checkpoint's values."""
    table = "head.weight" if spec.tie_word_embeddings else "embedding.weight"
    first_matrices = {down: gate_up for gate_up, down in expert_leaves(spec)}
    formats: dict[str, QuantizedFormat] = {}
    for leaf, parts in weights.items():
        if not is_matrix(leaf, parts) or leaf == table:
            continue
        scheme = _common_scheme(quantization, leaf, parts)
        if scheme is None:
            continue
        follows = scheme.ordered and leaf in first_matrices
        if follows and first_matrices[leaf] not in formats:
            raise UnsupportedModelError(
                f"{quantization.where}: the columns of {parts[0].name} are reordered (desc_act, "
                "actorder), which is supported only if the experts' gates and ups are "
                "quantized too"
            )
        formats[leaf] = QuantizedFormat(scheme, follows=follows)
    return formats


def _common_scheme(quantization: QuantSpec, leaf: str, parts: Iterable[Tensor]) -> Scheme | None:
    """Return the scheme of a leaf's tensors; None if they are not quantized.

    Raises:
      UnsupportedModelError: they have different schemes, or are stored in another order.
    """
    is_router, in_layer = leaf.endswith(ROUTERS), leaf.startswith("layers.")
    schemes: dict[Scheme | None, Tensor] = {}
    for part in parts:
        scheme = quantization.scheme_of(
            module_of(part.name), is_router=is_router, in_layer=in_layer
        )
        schemes.setdefault(scheme, part)
    if schemes.keys() == {None}:
        return None
    if len(schemes) > 1:
        raise UnsupportedModelError(
            f"{quantization.where}: {' and '.join(part.name for part in schemes.values())} are "
            "computed together, but quantized in different ways, which is not supported"
        )
    ((scheme, first),) = schemes.items()
    if any(part.transpose for part in parts):
        raise UnsupportedModelError(
            f"{quantization.where}: {first.name} is stored transposed, which is not supported "
            "for quantized matrices"
        )
    if any(part.heads for part in parts):
        raise UnsupportedModelError(
            f"{quantization.where}: {first.name} has the queries, keys and values of each head "
            "together, which is not supported for quantized matrices: use a checkpoint in floats"
        )
    return scheme


def num_experts(leaf: str, spec: ModelSpec) -> int | None:
    """Return the number of experts if the leaf has a matrix for each; None for one matrix."""
    match leaf.split("."):
        case ["layers", layer, "mlp", "gate_up" | "down", "weight"]:
            experts = spec.experts_of(int(layer))
            return None if experts is None else experts.count
    return None


def expert_leaves(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return the two leaves of each layer with experts: gate and up, and down."""
    layers = (f"layers.{i}.mlp" for i in range(spec.num_hidden_layers) if spec.experts_of(i))
    return [(f"{mlp}.gate_up.weight", f"{mlp}.down.weight") for mlp in layers]


def cut_formats(
    formats: Mapping[str, QuantizedFormat], spec: ModelSpec, weights: WeightMap, shards: int
) -> dict[str, QuantizedFormat]:
    """Return the formats of matrices that `shards` devices share, from those of whole ones.

    Raises:
      ConfigError: groups cannot be split so; the message lists the numbers of devices that work.
    """

    def cut(leaf: str, count: int) -> tuple[QuantizedFormat, int]:
        """Return the format for `count` devices, and the columns of each."""
        found = partition_of(leaf, spec, count)
        columns = weights[leaf][0].columns
        if found is None or found.axis != -1:
            return replace(formats[leaf], parts=1, unit=None), columns
        return replace(formats[leaf], parts=count, unit=found.unit), columns // count

    cut_all = {leaf: cut(leaf, shards) for leaf in formats}
    for leaf, (format, inputs) in cut_all.items():
        why = format.fault(inputs)
        if why is None:
            continue
        fit = [
            count
            for count in possible_shards(spec)
            if all(
                each.fault(columns) is None for each, columns in (cut(n, count) for n in formats)
            )
        ]
        ranges = "" if format.unit in (None, inputs) else f" in ranges of {format.unit}"
        raise ConfigError(
            f"--tensor-parallel {shards} leaves a device {inputs} columns of "
            f"{weights[leaf][0].name}{ranges}, but {why}: {with_shards(spec, fit)}"
        )
    return {leaf: format for leaf, (format, _) in cut_all.items()}


def is_matrix(leaf: str, parts: Sequence[Tensor]) -> bool:
    """Return True if the leaf is a matrix, or one per expert, and not a bias or norm."""
    is_norm = leaf.endswith("norm.weight")  # norms of queries and keys, [H, D]
    return leaf.endswith(".weight") and not is_norm and len(parts[0].shape) > 1


def module_of(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _packed_format(format: QuantizedFormat, inputs: int) -> Format | None:
    """Return the packed format that holds the values exactly and rounds rows of x as required.

    None if there is none. The kernels cannot round rows that several devices share.
    """
    scheme = format.scheme
    if scheme.values == "int8":
        is_dynamic = scheme.activations == "int8" and not scheme.static
        return "int8" if is_dynamic and format.parts == 1 else None
    fits = format.group(inputs) % GROUP == 0 and not scheme.zeros
    return "int4" if scheme.values == "int4" and fits else None
