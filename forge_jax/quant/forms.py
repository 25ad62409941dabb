"""Which form each matrix of a quantised checkpoint takes in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_jax.errors import UnsupportedModelError
from forge_jax.quant.spec import Scheme
from forge_kernels.linear import Format, Packing, Quantization

if TYPE_CHECKING:
    from forge_jax.checkpoint.weight_map import Tensor, WeightMap
    from forge_jax.models.spec import ModelSpec

GROUP = 32  # of the kernels' int4: larger groups are several with one scale


@dataclass(frozen=True)
class QuantizedForm:
    """The form of a matrix whose values are quantised already.

    `packed`: for the CPU kernels, which hold the values of some schemes exactly; else as stored.
    `rounded`: the checkpoint has floats, which become such values as they are read.
    """

    scheme: Scheme
    packed: Format | None = None
    rounded: bool = False

    def packing(self, outputs: int, inputs: int, paired: bool) -> Packing | None:
        if self.packed is None:
            return None
        return Packing(self.packed, outputs, inputs, paired)

    def quantization(self, outputs: int, inputs: int) -> Quantization:
        scheme = self.scheme
        return Quantization(
            values=scheme.values,
            outputs=outputs,
            inputs=inputs,
            group=inputs if scheme.block[1] is None else scheme.block[1],
            zeros=scheme.zeros,
            activations=scheme.activations,
            static=scheme.static,
        )


def quantized_forms(
    spec: ModelSpec, weights: WeightMap, *, kernels: bool
) -> dict[str, QuantizedForm]:
    """The leaves ("layers.0.mlp.down.weight") that are quantised, and their forms.

    Args:
      kernels: whether matrices may be packed for the CPU kernels.

    Raises:
      UnsupportedModelError: matrices that are one leaf are quantised in different ways, or are
        experts.
    """
    quantization = spec.quantization
    if quantization is None:
        return {}
    table = "head.weight" if spec.tie_word_embeddings else "embedding.weight"
    forms = {}
    for leaf, parts in weights.items():
        if len(parts[0].shape) < 2 or leaf == table:
            continue
        schemes: dict[Scheme | None, Tensor] = {}
        for part in parts:
            schemes.setdefault(quantization.scheme_of(module_of(part.name)), part)
        if schemes.keys() == {None}:
            continue
        if len(schemes) > 1:
            raise UnsupportedModelError(
                f"{quantization.where}: {' and '.join(part.name for part in schemes.values())} are "
                "computed together, but quantised in different ways, which is not supported"
            )
        (scheme,) = schemes
        assert scheme is not None
        is_router = leaf.endswith(".router.weight")
        if is_router or len(parts[0].shape) > 2 or ".experts." in parts[0].name:
            raise UnsupportedModelError(
                f"{quantization.where}: {parts[0].name} is quantised, but quantised experts and "
                "routers are not supported"
            )
        if any(part.transpose for part in parts):
            raise UnsupportedModelError(
                f"{quantization.where}: {parts[0].name} is stored transposed, which is not "
                "supported of quantised matrices"
            )
        packed = _packed_format(scheme, parts[0].shape[1]) if kernels else None
        forms[leaf] = QuantizedForm(scheme, packed)
    return forms


def module_of(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _packed_format(scheme: Scheme, inputs: int) -> Format | None:
    """The packed format that holds such values exactly, and rounds rows of x as they are to be."""
    if scheme.values == "int8":
        return "int8" if scheme.activations == "int8" and not scheme.static else None
    group = scheme.block[1] or inputs
    fits = group % GROUP == 0 and not scheme.zeros
    return "int4" if scheme.values == "int4" and fits else None
