"""The compressed-tensors format, as llm-compressor writes it: a scheme per group of modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forge_jax.config.hf_config import HFConfig
from forge_jax.weights.quantization import (
    MAX_GROUP_SIZE,
    QuantSpec,
    choose,
    note_kv_cache,
    read_group_size,
    read_names,
    refuse,
    refuse_unknown,
)
from forge_jax.weights.tensors import (
    INT32,
    INT64,
    PLAIN,
    Matrix,
    ModuleReader,
    Scheme,
    Wanted,
    float32,
    num_groups,
    read_column_order,
    scale_tensors,
    unpack,
)

MAX_GROUPS = 64


@dataclass(frozen=True)
class PackedLayout:
    """4-bit values, 8 of a row in a word, and zeros, 8 rows in a word."""

    name = "packed"
    order_name = "weight_g_idx"

    def wanted(self, scheme: Scheme, module: str, shape: tuple[int, int]) -> list[Wanted]:
        outputs, inputs = shape
        wanted = [
            *scale_tensors(scheme, module, shape),
            Wanted(f"{module}.weight_packed", ((outputs, inputs // 8),), (INT32,)),
            Wanted(f"{module}.weight_shape", ((2,),), (INT64, INT32), optional=True),
        ]
        if scheme.zeros:
            zeros = outputs // 8, num_groups(scheme, shape)
            wanted.append(Wanted(f"{module}.weight_zero_point", (zeros,), (INT32,)))
        name, optional = f"{module}.{self.order_name}", not scheme.ordered
        wanted.append(Wanted(name, ((inputs,),), (INT32, INT64), optional))
        return wanted

    def read(self, scheme: Scheme, shape: tuple[int, int], read: ModuleReader) -> Matrix:
        if read.has("weight_shape") and tuple(read("weight_shape")) != shape:
            raise read.error("weight_shape", f"it is {read('weight_shape').tolist()}, not {shape}")
        values = unpack(read("weight_packed"), axis=1)
        zero = unpack(read("weight_zero_point"), axis=0) if scheme.zeros else None
        scale = float32(read(scheme.scale_name)).reshape(shape[0], -1)
        return Matrix(values, scale, zero, read_column_order(scheme, shape, read), None)


def read(section: HFConfig) -> QuantSpec:
    """Return the schemes of the section."""
    refuse_unknown(
        section,
        "quant_method format config_groups ignore kv_cache_scheme quantization_status "
        "sparsity_config transform_config",
        "global_compression_ratio version run_compressed",
    )
    choose(section, "quantization_status", ("compressed", "frozen"), "compressed")
    for name in ("sparsity_config", "transform_config"):
        inner = section.section(name)
        if inner is not None and inner.values and inner.values.get("format") != "dense":
            raise refuse(section, name, "none")
    note_kv_cache(section)
    groups = section.section("config_groups")
    if groups is None or not groups.values or len(groups.values) > MAX_GROUPS:
        raise section.error("config_groups", f"an object of 1 to {MAX_GROUPS} groups")
    schemes = []
    for name in groups.values:
        group = groups.section(name)
        if group is None:
            raise groups.error(name, "an object")
        refuse_unknown(group, "targets weights input_activations output_activations format")
        targets = read_names(group, "targets", "patterns")
        if not targets.names:
            raise group.error("targets", "a list of module names")
        schemes.append((targets, _read_group(group, section)))
    return QuantSpec(
        method="compressed-tensors",
        schemes=tuple(schemes),
        ignored=read_names(section, "ignore", "patterns"),
        where=section.where,
    )


_ARGS = "num_bits type strategy symmetric dynamic group_size block_structure actorder"
_NO_MEANING = "observer observer_kwargs"


def _read_group(group: HFConfig, section: HFConfig) -> Scheme:
    weights = group.section("weights")
    if weights is None:
        raise group.error("weights", "an object")
    if group.has("output_activations"):
        raise refuse(group, "output_activations", "none")
    refuse_unknown(weights, _ARGS, _NO_MEANING + " scale_dtype zp_dtype")
    where = group if group.has("format") else section
    formats = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
    format = choose(where, "format", formats)
    kind, bits = choose(weights, "type", ("int", "float")), weights.integer("num_bits")
    packed = format == "pack-quantized"
    if bits != (4 if packed else 8):
        raise refuse(weights, "num_bits", f"{4 if packed else 8} with format {format}")
    wrong = {"float-quantized": "int", "int-quantized": "float", "pack-quantized": "float"}
    if wrong.get(format) == kind:
        raise refuse(weights, "type", f"the other of int and float with format {format}")
    if weights.boolean("dynamic", False):
        raise refuse(weights, "dynamic", "false")
    symmetric = weights.boolean("symmetric", True)
    if not symmetric and not packed:
        raise refuse(weights, "symmetric", f"true with format {format}")
    actorder = weights.values.get("actorder")
    if actorder not in (None, False, True, "group", "weight", "static", "dynamic"):
        raise refuse(weights, "actorder", "group, weight, static, dynamic")
    block = _read_block(weights, packed)
    if kind == "int" and not packed and block[1] is not None:
        raise refuse(weights, "strategy", "tensor or channel with type int")
    activations, static = _read_activations(group, kind, block, packed)
    return Scheme(
        layout=PackedLayout() if packed else PLAIN,
        values="int4" if packed else "int8" if kind == "int" else "fp8",
        block=block,
        zeros=not symmetric,
        ordered=actorder in (True, "group", "dynamic") and block[1] is not None,
        activations=activations,
        static=static,
    )


def _read_block(weights: HFConfig, packed: bool) -> tuple[int | None, int | None]:
    known = ("channel", "group") if packed else ("tensor", "channel", "block")
    strategy = choose(weights, "strategy", known)
    _check_sizes(weights, strategy)
    match strategy:
        case "tensor":
            return None, None
        case "channel":
            return 1, None
        case "group":
            return 1, read_group_size(weights, "group_size")
    size = weights.values.get("block_structure")
    if isinstance(size, str):  # older files write "128x128"
        size = [int(n) if n.isascii() and n.isdigit() else 0 for n in size.split("x")]
    if (
        not isinstance(size, list)
        or len(size) != 2
        or any(type(n) is not int or not 1 <= n <= MAX_GROUP_SIZE for n in size)
    ):
        raise weights.error("block_structure", "a list of two sizes")
    return size[0], size[1]


def _check_sizes(args: HFConfig, strategy: str) -> None:
    """Check that sizes of groups or blocks are given only for strategies that use them."""
    if strategy != "group" and args.values.get("group_size") not in (None, -1):
        raise args.error("group_size", f"omitted with strategy {strategy}")
    if strategy != "block" and args.values.get("block_structure") is not None:
        raise args.error("block_structure", f"omitted with strategy {strategy}")


def _read_activations(
    group: HFConfig, kind: str, block: tuple[int | None, int | None], packed: bool
) -> tuple[Literal["int8", "fp8"] | None, bool]:
    """Return the type that rows are rounded to, and True if the file has their scale."""
    inputs = group.section("input_activations")
    if inputs is None:
        return None, False
    if packed:
        raise refuse(group, "input_activations", "none with format pack-quantized")
    refuse_unknown(inputs, _ARGS, _NO_MEANING + " scale_dtype zp_dtype")
    if choose(inputs, "type", ("int", "float")) != kind:
        raise refuse(inputs, "type", f"that of the weights, {kind}")
    choose(inputs, "num_bits", (8,))
    choose(inputs, "symmetric", (True,), True)
    if inputs.values.get("actorder"):
        raise refuse(inputs, "actorder", "none")
    in_blocks = block[1] is not None
    if choose(inputs, "dynamic", (True, False), False):
        known = "group" if in_blocks else "token"
        if choose(inputs, "strategy", ("token", "group", "tensor")) == "tensor":
            # One scale for all rows would make a row depend on the batch composition.
            raise refuse(inputs, "strategy", f"{known} if dynamic is true")
        if inputs.values["strategy"] != known:
            raise refuse(inputs, "strategy", f"{known} with these weights")
        _check_sizes(inputs, known)
        if in_blocks and inputs.values.get("group_size") != block[1]:
            raise refuse(inputs, "group_size", f"that of the weights, {block[1]}")
        return ("int8" if kind == "int" else "fp8"), False
    if in_blocks:
        raise refuse(inputs, "dynamic", "true with weights in blocks")
    _check_sizes(inputs, choose(inputs, "strategy", ("tensor",)))
    return ("int8" if kind == "int" else "fp8"), True
