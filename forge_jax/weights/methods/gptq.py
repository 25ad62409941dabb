"""GPTQ (Frantar et al. 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel write it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from forge_jax.config.hf_config import HFConfig
from forge_jax.weights.quantization import (
    EVERY_LAYER,
    ModuleNames,
    QuantSpec,
    choose,
    read_group_size,
    refuse_unknown,
)
from forge_jax.weights.stored import FLOATS
from forge_jax.weights.tensors import (
    INT32,
    INT64,
    MIDDLE,
    Matrix,
    ModuleReader,
    Scheme,
    Wanted,
    float32,
    num_groups,
    read_column_order,
    unpack,
)


@dataclass(frozen=True)
class GPTQLayout:
    """4-bit values and zeros in words: 8 input rows per word of values, 8 columns of zeros."""

    name = "gptq"
    order_name = "g_idx"

    def wanted(self, scheme: Scheme, module: str, shape: tuple[int, int]) -> list[Wanted]:
        outputs, inputs = shape
        groups = num_groups(scheme, shape)
        return [
            Wanted(f"{module}.qweight", ((inputs // 8, outputs),), (INT32,)),
            Wanted(f"{module}.qzeros", ((groups, outputs // 8),), (INT32,)),
            Wanted(f"{module}.{scheme.scale_name}", ((groups, outputs),), FLOATS),
            Wanted(
                f"{module}.{self.order_name}",
                ((inputs,),),
                (INT32, INT64),
                optional=not scheme.ordered,
            ),
        ]

    def read(self, scheme: Scheme, shape: tuple[int, int], read: ModuleReader) -> Matrix:
        values = unpack(read("qweight"), axis=0).T
        stored = unpack(read("qzeros"), axis=1).T
        if scheme.zero_offset and np.any(stored == 15):
            # The format stores zeros less 1, so 15 is 16 to some readers and 0 to others.
            raise read.error(
                "qzeros", "a stored zero of 15 is ambiguous, because readers decode it differently"
            )
        zero = stored + np.uint8(scheme.zero_offset)
        if not scheme.zeros:
            if np.any(zero != MIDDLE):
                raise read.error("qzeros", f"all zeros must be {MIDDLE}, because `sym` is true")
            zero = None
        scale = float32(read(scheme.scale_name)).T
        return Matrix(values, scale, zero, read_column_order(scheme, shape, read), None)


def read(section: HFConfig) -> QuantSpec:
    """Return the scheme of the section."""
    refuse_unknown(
        section,
        "quant_method bits group_size desc_act sym lm_head checkpoint_format pack_dtype "
        "modules_in_block_to_quantize",
        "damp_percent damp_auto_increment static_groups true_sequential model_name_or_path "
        "model_file_base_name quantizer meta tokenizer dataset batch_size cache_block_outputs "
        "use_cuda_fp16 model_seqlen block_name_to_quantize module_name_preceding_first_block "
        "pad_token_id disable_exllama use_exllama exllama_config max_input_length backend mse "
        "act_group_aware is_marlin_format method format",
    )
    choose(section, "bits", (4,))
    choose(section, "pack_dtype", ("int32",), "int32")
    if section.has("is_marlin_format"):
        choose(section, "is_marlin_format", (False,))
    version = choose(section, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if section.has("format"):  # the field's first name
        both = section.has("checkpoint_format")
        version = choose(section, "format", (version,) if both else ("gptq", "gptq_v2"))
    size = read_group_size(section, "group_size")
    scheme = Scheme(
        layout=GPTQLayout(),
        values="int4",
        block=(1, size),
        zeros=not section.boolean("sym", True),
        ordered=section.boolean("desc_act", False) and size is not None,
        scale_name="scales",
        zero_offset=1 if version == "gptq" else 0,
    )
    names = EVERY_LAYER
    if section.has("modules_in_block_to_quantize"):
        lists = section.values["modules_in_block_to_quantize"]
        are_lists = isinstance(lists, list) and all(isinstance(each, list) for each in lists)
        flat = [name for each in lists for name in each] if are_lists else []
        if not flat or any(not isinstance(name, str) or not name for name in flat):
            raise section.error("modules_in_block_to_quantize", "lists of module names")
        names = ModuleNames(tuple(flat), "parts")
    if section.boolean("lm_head", False):
        names = replace(names, names=(*names.names, "lm_head"))
    return QuantSpec(
        method="gptq",
        schemes=((names, scheme),),
        ignored=ModuleNames((), "parts"),
        where=section.where,
    )
