"""Which form each matrix of a quantised checkpoint takes in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forge_jax.errors import ConfigError, UnsupportedModelError
from forge_jax.weights.partition import AXIS, partition_of, possible_shards
from forge_jax.weights.quantization import Scheme
from forge_kernels.linear import Format, Packing, Quantization

if TYPE_CHECKING:
    from forge_jax.models.spec import ModelSpec
    from forge_jax.models.weight_map import Tensor, WeightMap

GROUP = 32  # of the kernels' int4: larger groups are several with one scale
ROUTER = ".router.weight"
LEAST_GROUP = 8  # columns of a group that is cut: a scale for less outweighs the values


@dataclass(frozen=True)
class QuantizedForm:
    """The form of a matrix whose values are quantised already.

    `packed`: for the CPU kernels, which hold the values of some schemes exactly; else as stored.
    `rounded`: the checkpoint has floats, which become such values as they are read.
    `parts`: so many devices share the inputs. What follows is then about one part.
    `follows`: the inputs are those of experts' gates and ups, whose rows are read in the order of
    its columns; so nothing is left to be permuted in a step.
    """

    scheme: Scheme
    packed: Format | None = None
    rounded: bool = False
    parts: int = 1
    follows: bool = False

    @property
    def is_ordered(self) -> bool:
        """Whether rows of x are permuted in a step."""
        return self.scheme.ordered and not self.follows

    def group(self, inputs: int) -> int:
        """Columns that share a scale: where a cut divides a group, those of the pieces."""
        size = self._size(inputs)
        if size is None:
            return inputs
        return size if self.parts == 1 else math.gcd(size, inputs)

    def _size(self, inputs: int) -> int | None:
        """Columns of a group in the checkpoint; None: whole rows."""
        size = self.scheme.block[1]
        return None if size is None or size >= inputs * self.parts else size

    def fault(self, inputs: int) -> str | None:
        """Why a part cannot be of so many columns."""
        size, is_int4 = self._size(inputs), self.scheme.values == "int4"
        if self.parts == 1:
            return None
        if size is None:
            return "they are stored in pairs" if is_int4 and inputs % 2 else None
        group = self.group(inputs)
        if self.scheme.activations is not None and group != size:
            return f"each {size} are multiplied with activations that are rounded together"
        if group < LEAST_GROUP or (is_int4 and group % 2):
            return f"each {size} share a scale"
        return None

    def packing(
        self, outputs: int, inputs: int, paired: bool, experts: int | None = None
    ) -> Packing | None:
        if self.packed is None:
            return None
        return Packing(self.packed, outputs, inputs, paired, experts)

    def quantization(self, outputs: int, inputs: int, experts: int | None = None) -> Quantization:
        scheme = self.scheme
        is_dynamic = scheme.activations is not None and not scheme.static
        of_parts = self.parts > 1 and is_dynamic and self._size(inputs) is None
        return Quantization(
            values=scheme.values,
            outputs=outputs,
            inputs=inputs,
            group=self.group(inputs),
            zeros=scheme.zeros,
            activations=scheme.activations,
            static=scheme.static,
            axis=AXIS if of_parts else None,
            experts=experts,
        )


def quantized_forms(
    spec: ModelSpec, weights: WeightMap, *, kernels: bool, shards: int = 1
) -> dict[str, QuantizedForm]:
    """The leaves ("layers.0.mlp.down.weight") that are quantised, and their forms.

    Args:
      kernels: whether matrices may be packed for the CPU kernels.
      shards: so many devices share the model.

    Raises:
      UnsupportedModelError: matrices that are one leaf are quantised in different ways, or those
        of experts in ways that do not go together.
      ConfigError: groups that cannot be cut for so many devices.
    """
    quantization = spec.quantization
    if quantization is None:
        return {}
    table = "head.weight" if spec.tie_word_embeddings else "embedding.weight"
    first_matrices = {down: gate_up for gate_up, down in expert_leaves(spec)}
    forms: dict[str, QuantizedForm] = {}
    for leaf, parts in weights.items():
        if len(parts[0].shape) < 2 or leaf == table:
            continue
        is_router = leaf.endswith(ROUTER)
        schemes: dict[Scheme | None, Tensor] = {}
        for part in parts:
            scheme = quantization.scheme_of(module_of(part.name), is_router=is_router)
            schemes.setdefault(scheme, part)
        if schemes.keys() == {None}:
            continue
        if len(schemes) > 1:
            raise UnsupportedModelError(
                f"{quantization.where}: {' and '.join(part.name for part in schemes.values())} are "
                "computed together, but quantised in different ways, which is not supported"
            )
        (scheme,) = schemes
        assert scheme is not None
        if any(part.transpose for part in parts):
            raise UnsupportedModelError(
                f"{quantization.where}: {parts[0].name} is stored transposed, which is not "
                "supported of quantised matrices"
            )
        follows = scheme.ordered and leaf in first_matrices
        if follows and first_matrices[leaf] not in forms:
            raise UnsupportedModelError(
                f"{quantization.where}: the columns of {parts[0].name} are in an order of their "
                "own (desc_act, actorder), which is supported where the experts' gates and ups "
                "are quantised, too"
            )
        forms[leaf] = QuantizedForm(scheme, follows=follows)
    forms = cut_forms(forms, spec, weights, shards)
    if not kernels:
        return forms
    packed = {
        leaf: _packed_format(form, weights[leaf][0].shape[-1] // form.parts)
        for leaf, form in forms.items()
    }
    for both in expert_leaves(spec):  # the kernel has one format for an expert
        if len({packed.get(leaf) for leaf in both}) > 1:
            packed |= dict.fromkeys(both)
    return {leaf: replace(form, packed=packed[leaf]) for leaf, form in forms.items()}


def num_experts(leaf: str, spec: ModelSpec) -> int | None:
    """Of how many experts a leaf has a matrix each; None: it is one matrix."""
    match leaf.split("."):
        case ["layers", layer, "mlp", "gate_up" | "down", "weight"]:
            experts = spec.experts_of(int(layer))
            return None if experts is None else experts.count
    return None


def expert_leaves(spec: ModelSpec) -> list[tuple[str, str]]:
    """The two leaves of each layer with experts: of gates and ups, and what is multiplied then."""
    layers = (f"layers.{i}.mlp" for i in range(spec.num_hidden_layers) if spec.experts_of(i))
    return [(f"{mlp}.gate_up.weight", f"{mlp}.down.weight") for mlp in layers]


def cut_forms(
    forms: Mapping[str, QuantizedForm], spec: ModelSpec, weights: WeightMap, shards: int
) -> dict[str, QuantizedForm]:
    """The forms of matrices that so many devices share, made of those of whole ones.

    Raises:
      ConfigError: groups that cannot be cut so, with each number that goes.
    """

    def cut(leaf: str, count: int) -> tuple[QuantizedForm, int]:
        """The form among `count` devices, and the columns of each."""
        found = partition_of(leaf, spec, count)
        parts = count if found is not None and found.axis == -1 else 1
        return replace(forms[leaf], parts=parts), weights[leaf][0].shape[-1] // parts

    cut_all = {leaf: cut(leaf, shards) for leaf in forms}
    for leaf, (form, inputs) in cut_all.items():
        why = form.fault(inputs)
        if why is None:
            continue
        fit = [
            str(count)
            for count in possible_shards(spec)
            if all(each.fault(columns) is None for each, columns in (cut(n, count) for n in forms))
        ]
        raise ConfigError(
            f"--tensor-parallel {shards} leaves a device {inputs} columns of "
            f"{weights[leaf][0].name}, but {why}: use --tensor-parallel {' or '.join(fit)}"
        )
    return {leaf: form for leaf, (form, _) in cut_all.items()}


def module_of(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _packed_format(form: QuantizedForm, inputs: int) -> Format | None:
    """The packed format that holds such values exactly, and rounds rows of x as they are to be.

    The kernels do not know what the other devices have of a row.
    """
    scheme = form.scheme
    if scheme.values == "int8":
        is_dynamic = scheme.activations == "int8" and not scheme.static
        return "int8" if is_dynamic and form.parts == 1 else None
    fits = form.group(inputs) % GROUP == 0 and not scheme.zeros
    return "int4" if scheme.values == "int4" and fits else None
