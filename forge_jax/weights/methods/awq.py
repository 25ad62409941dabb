"""AWQ (Lin et al. 2023, arXiv:2306.00978), as AutoAWQ writes it for its GEMM kernel."""

from __future__ import annotations

from dataclasses import dataclass

from forge_jax.config.hf_config import HFConfig
from forge_jax.weights.quantization import (
    EVERY_LAYER,
    QuantSpec,
    choose,
    read_group_size,
    read_names,
    refuse_unknown,
)
from forge_jax.weights.stored import FLOATS
from forge_jax.weights.tensors import (
    INT32,
    Matrix,
    ModuleReader,
    Scheme,
    Wanted,
    float32,
    num_groups,
    unpack,
)

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each four bits, lowest bits first


@dataclass(frozen=True)
class AWQLayout:
    """4-bit values and zeros in words of 8 columns, in AWQ's column order."""

    name = "awq"
    order_name = None

    def wanted(self, scheme: Scheme, module: str, shape: tuple[int, int]) -> list[Wanted]:
        outputs, inputs = shape
        groups = num_groups(scheme, shape)
        return [
            Wanted(f"{module}.qweight", ((inputs, outputs // 8),), (INT32,)),
            Wanted(f"{module}.qzeros", ((groups, outputs // 8),), (INT32,)),
            Wanted(f"{module}.{scheme.scale_name}", ((groups, outputs),), FLOATS),
        ]

    def read(self, scheme: Scheme, shape: tuple[int, int], read: ModuleReader) -> Matrix:
        values = unpack(read("qweight"), axis=1, order=ORDER).T
        zero = unpack(read("qzeros"), axis=1, order=ORDER).T
        return Matrix(values, float32(read(scheme.scale_name)).T, zero, None, None)


def read(section: HFConfig) -> QuantSpec:
    """Return the scheme of the section."""
    refuse_unknown(
        section,
        "quant_method bits w_bit group_size q_group_size zero_point version modules_to_not_convert",
        "backend do_fuse fuse_max_seq_len exllama_config modules_to_fuse",
    )
    bits = "bits" if section.has("bits") else "w_bit"
    choose(section, bits, (4,))
    choose(section, "zero_point", (True,), True)
    choose(section, "version", ("gemm", "GEMM"), "gemm")
    size = read_group_size(section, "group_size" if section.has("group_size") else "q_group_size")
    scheme = Scheme(
        layout=AWQLayout(), values="int4", block=(1, size), zeros=True, scale_name="scales"
    )
    return QuantSpec(
        method="awq",
        schemes=((EVERY_LAYER, scheme),),
        ignored=read_names(section, "modules_to_not_convert", "parts"),
        where=section.where,
    )
