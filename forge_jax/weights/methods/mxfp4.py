"""MXFP4 experts (OCP Microscaling Formats 1.0), as in OpenAI's gpt-oss checkpoints.

32 values share a power of two. A value is E2M1: a sign, two bits of exponent and one of mantissa.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forge_jax.config.hf_config import HFConfig
from forge_jax.weights.quantization import ModuleNames, QuantSpec, read_names, refuse_unknown
from forge_jax.weights.tensors import UINT8, Matrix, ModuleReader, Scheme, Wanted

GROUP = 32  # values per scale
EXPERTS = ("mlp.experts",)  # the modules that transformers quantizes


@dataclass(frozen=True)
class MXFP4Layout:
    """The matrices of all experts of a layer: two values per byte, low bits first, and scales."""

    name = "blocks"
    order_name = None

    def wanted(self, scheme: Scheme, module: str, shape: tuple[int, int]) -> list[Wanted]:
        outputs, groups = shape[0], shape[1] // GROUP
        return [
            Wanted(f"{module}_blocks", ((outputs, groups, GROUP // 2),), (UINT8,)),
            Wanted(f"{module}_scales", ((outputs, groups),), (UINT8,)),
        ]

    def read(self, scheme: Scheme, shape: tuple[int, int], read: ModuleReader) -> Matrix:
        packed = read.of_expert("_blocks")
        values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(shape)
        return Matrix(values, np.asarray(read.of_expert("_scales")), None, None, None)


MXFP4 = MXFP4Layout()


def read(section: HFConfig) -> QuantSpec:
    """Return the scheme of the section."""
    refuse_unknown(section, "quant_method modules_to_not_convert", "dequantize")
    scheme = Scheme(layout=MXFP4, values="mxfp4", block=(1, GROUP), stacked=True)
    return QuantSpec(
        method="mxfp4",
        schemes=((ModuleNames(EXPERTS, "parts"), scheme),),
        ignored=read_names(section, "modules_to_not_convert", "parts"),
        where=section.where,
    )
