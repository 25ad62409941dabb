"""QuantSpec: how a checkpoint's matrices are quantised, read from `config.json` and checked.

Known: `fp8` (per tensor, or in blocks as of DeepSeek and Qwen), `compressed-tensors` (int8 and FP8
with and without quantised activations, 4-bit packed), `gptq` and `awq` (4 bits). What is not known,
be it a method, a field or a value, is refused by name: computing with weights that are read in
another way than they were written gives fluent nonsense.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from forge_jax.errors import UnsupportedModelError
from forge_jax.host.files import short_repr
from forge_jax.weights.names import compile_pattern, within

if TYPE_CHECKING:
    from forge_jax.config.hf_config import HFConfig

log = logging.getLogger(__name__)

Layout = Literal["plain", "packed", "gptq", "awq"]
Values = Literal["int8", "fp8", "int4"]
MAX_GROUPS = 64  # of a compressed-tensors config
MAX_NAMES = 100_000  # in a list of modules
MAX_GROUP_SIZE = 2**20
_LAYERS = "model"  # part of the names of all modules of the layers


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How one kind of matrices [N, K] is stored, and what becomes of the rows they multiply.

    Attributes:
      layout: "plain": values as they are; "packed": of compressed-tensors, 8 in an int32.
      values: what a value is. FP8 is E4M3 (Micikevicius et al. 2022, arXiv:2209.05433).
      block: (rows, columns) that share a scale; None: all.
      zeros: whether a value is `(stored - zero) * scale`, with a zero for each scale.
      ordered: the group of a column stands in a tensor (GPTQ's desc_act).
      activations: rows of x are rounded to this type, with a scale for each row, or in FP8 blocks
        for each row and block; `static`: with the scale that the checkpoint has for the matrix.
      scale_name: of the tensor.
      zero_offset: what is added to a stored zero.
    """

    layout: Layout
    values: Values
    block: tuple[int | None, int | None]
    zeros: bool = False
    ordered: bool = False
    activations: Literal["int8", "fp8"] | None = None
    static: bool = False
    scale_name: str = "weight_scale"
    zero_offset: int = 0


@dataclass(frozen=True)
class _Names:
    """Modules, by names and patterns of the file."""

    names: tuple[str, ...]
    form: Literal["patterns", "parts"]  # compressed-tensors' rules; or parts of a path

    @property
    def means_all(self) -> bool:
        return self.form == "parts" and _LAYERS in self.names

    def has(self, module: str) -> bool:
        return self.rank(module) is not None

    def rank(self, module: str) -> int | None:
        """How closely a module is meant, 0 the closest: its name, a pattern, its class; or None."""
        if self.form == "parts":
            return 0 if any(within(name, module) for name in self.names) else None
        if module in self.names:
            return 0
        patterns = (name[3:] for name in self.names if name.startswith("re:"))
        if any(compile_pattern(pattern)(module) for pattern in patterns):
            return 1
        return 2 if "Linear" in self.names else None


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """Which matrices of a checkpoint are quantised, and how."""

    method: str
    schemes: tuple[tuple[_Names, Scheme], ...]
    ignored: _Names
    where: str  # the file and the section, for messages

    def scheme_of(self, module: str, *, is_router: bool = False) -> Scheme | None:
        """Of a linear layer by its name in the checkpoint; None: it is not quantised.

        Methods that mean all modules of the layers do not mean routers: AutoGPTQ and others leave
        these as they are, and their files do not say so.

        Raises:
          UnsupportedModelError: several groups mean it, none more closely than another.
        """
        if self.ignored.has(module):
            return None
        ranks = [
            (names.rank(module), scheme)
            for names, scheme in self.schemes
            if not (is_router and names.means_all)
        ]
        ranked = [(rank, scheme) for rank, scheme in ranks if rank is not None]
        closest = min((rank for rank, _ in ranked), default=None)
        schemes = {scheme for rank, scheme in ranked if rank == closest}
        if len(schemes) > 1:
            raise UnsupportedModelError(
                f"{self.where}: the targets of several config_groups mean {module}, which is not "
                "supported where these differ"
            )
        return schemes.pop() if schemes else None


def read_quantization(config: HFConfig) -> QuantSpec | None:
    """What `quantization_config` (or `compression_config`) says; None without one.

    Raises:
      UnsupportedModelError: a method, field or value that is not known, by name.
      ModelError: a field is missing, or has the wrong type or range.
    """
    sections = [name for name in ("quantization_config", "compression_config") if config.has(name)]
    if not sections:
        return None
    if len(sections) > 1:
        raise config.error("compression_config", "left out where there is a quantization_config")
    section = config.section(sections[0])
    assert section is not None
    default = "compressed-tensors" if sections[0] == "compression_config" else None
    method = section.string("quant_method", default)
    if method not in _METHODS:
        raise UnsupportedModelError(
            f"{section.where}: quant_method {short_repr(method)} is not supported; "
            f"supported: {', '.join(_METHODS)}; or use the unquantized checkpoint"
        )
    return _METHODS[method](section)


# ---- what all methods share ------------------------------------------------------------------


def _refuse(section: HFConfig, name: str, known: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{section.where}: {name} {short_repr(section.values.get(name))} is not supported; "
        f"supported: {known}"
    )


def _choose(section: HFConfig, name: str, known: tuple[Any, ...], default: Any = None) -> Any:
    """A field that has one of a few values; without a default it must be there."""
    if default is None and not section.has(name):
        raise section.error(name, f"one of {', '.join(map(str, known))}")
    value = section.values.get(name) if section.has(name) else default
    if not any(type(value) is type(each) and value == each for each in known):
        raise _refuse(section, name, ", ".join(map(str, known)))
    return value


def _refuse_unknown(section: HFConfig, known: str, harmless: str = "") -> None:
    """Fields that say nothing (null, false, empty) may have any name.

    `known` are those that are read, `harmless` those that do not change what the tensors mean.
    """
    names = {*known.split(), *harmless.split()}
    for name, value in section.values.items():
        if name not in names and value not in (None, False, "", [], {}):
            raise UnsupportedModelError(
                f"{section.where}: {short_repr(name)} is not a known field (its value is "
                f"{short_repr(value)})"
            )


def _names(section: HFConfig, name: str, form: Literal["patterns", "parts"]) -> _Names:
    value = section.values.get(name)
    value = [] if value is None else value
    if (
        not isinstance(value, list)
        or len(value) > MAX_NAMES
        or any(not isinstance(each, str) or not each for each in value)
    ):
        raise section.error(name, "a list of names of modules")
    if form == "patterns":
        for each in value:
            if each.startswith("re:"):
                try:
                    compile_pattern(each[3:])
                except ValueError as error:
                    raise UnsupportedModelError(
                        f"{section.where}: {name}: pattern {short_repr(each)}: {error}"
                    ) from None
    return _Names(tuple(value), form)


def _group_size(section: HFConfig, name: str) -> int | None:
    """Values of a row that share a scale; None: all, which files write as -1."""
    if section.values.get(name) == -1:
        return None
    size = section.integer(name, high=MAX_GROUP_SIZE)
    if size % 2:
        raise section.error(name, "even, or -1")
    return size


def _note_kv_cache(section: HFConfig) -> None:
    if section.has("kv_cache_scheme"):
        log.warning(
            "%s: kv_cache_scheme is not used: the cache has its own type and scales (--kv-dtype)",
            section.where,
        )


_EVERY = _Names((_LAYERS,), "parts")  # all in the layers: the head's name is lm_head


# ---- the methods -------------------------------------------------------------------------------


def _read_fp8(section: HFConfig) -> QuantSpec:
    """FP8 with a scale for each matrix (AutoFP8) or block (DeepSeek-V3, arXiv:2412.19437)."""
    _refuse_unknown(
        section,
        "quant_method activation_scheme fmt weight_block_size modules_to_not_convert "
        "ignored_layers kv_cache_scheme",
    )
    _choose(section, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    static = _choose(section, "activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    block: tuple[int | None, int | None] = (None, None)
    if section.has("weight_block_size"):
        size = section.values["weight_block_size"]
        if not isinstance(size, list) or len(size) != 2 or any(
            type(n) is not int or not 1 <= n <= MAX_GROUP_SIZE for n in size
        ):  # fmt: skip
            raise section.error("weight_block_size", "a list of two sizes")
        if static:
            raise _refuse(section, "activation_scheme", "dynamic, with weight_block_size")
        block = size[0], size[1]
    _note_kv_cache(section)
    both = [_names(section, name, "parts") for name in ("modules_to_not_convert", "ignored_layers")]
    scheme = Scheme(
        layout="plain",
        values="fp8",
        block=block,
        activations="fp8",
        static=static,
        scale_name="weight_scale" if block == (None, None) else "weight_scale_inv",
    )
    return QuantSpec(
        method="fp8",
        schemes=((_EVERY, scheme),),
        ignored=_Names(both[0].names + both[1].names, "parts"),
        where=section.where,
    )


def _read_gptq(section: HFConfig) -> QuantSpec:
    """GPTQ (Frantar et al. 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel write it."""
    _refuse_unknown(
        section,
        "quant_method bits group_size desc_act sym lm_head checkpoint_format pack_dtype "
        "modules_in_block_to_quantize",
        "damp_percent damp_auto_increment static_groups true_sequential model_name_or_path "
        "model_file_base_name quantizer meta tokenizer dataset batch_size cache_block_outputs "
        "use_cuda_fp16 model_seqlen block_name_to_quantize module_name_preceding_first_block "
        "pad_token_id disable_exllama use_exllama exllama_config max_input_length backend mse "
        "act_group_aware is_marlin_format method format",
    )
    _choose(section, "bits", (4,))
    _choose(section, "pack_dtype", ("int32",), "int32")
    if section.has("is_marlin_format"):
        _choose(section, "is_marlin_format", (False,))
    version = _choose(section, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if section.has("format"):  # of the first files that said it
        both = section.has("checkpoint_format")
        version = _choose(section, "format", (version,) if both else ("gptq", "gptq_v2"))
    size = _group_size(section, "group_size")
    scheme = Scheme(
        layout="gptq",
        values="int4",
        block=(1, size),
        zeros=not section.boolean("sym", True),
        ordered=section.boolean("desc_act", False) and size is not None,
        scale_name="scales",
        zero_offset=1 if version == "gptq" else 0,
    )
    names = _EVERY
    if section.has("modules_in_block_to_quantize"):
        lists = section.values["modules_in_block_to_quantize"]
        are_lists = isinstance(lists, list) and all(isinstance(each, list) for each in lists)
        flat = [name for each in lists for name in each] if are_lists else []
        if not flat or any(not isinstance(name, str) or not name for name in flat):
            raise section.error("modules_in_block_to_quantize", "lists of names of modules")
        names = _Names(tuple(flat), "parts")
    if section.boolean("lm_head", False):
        names = replace(names, names=(*names.names, "lm_head"))
    return QuantSpec(
        method="gptq",
        schemes=((names, scheme),),
        ignored=_Names((), "parts"),
        where=section.where,
    )


def _read_awq(section: HFConfig) -> QuantSpec:
    """AWQ (Lin et al. 2023, arXiv:2306.00978), as AutoAWQ writes it for its GEMM kernel."""
    _refuse_unknown(
        section,
        "quant_method bits w_bit group_size q_group_size zero_point version modules_to_not_convert",
        "backend do_fuse fuse_max_seq_len exllama_config modules_to_fuse",
    )
    bits = "bits" if section.has("bits") else "w_bit"
    _choose(section, bits, (4,))
    _choose(section, "zero_point", (True,), True)
    _choose(section, "version", ("gemm", "GEMM"), "gemm")
    size = _group_size(section, "group_size" if section.has("group_size") else "q_group_size")
    scheme = Scheme(layout="awq", values="int4", block=(1, size), zeros=True, scale_name="scales")
    return QuantSpec(
        method="awq",
        schemes=((_EVERY, scheme),),
        ignored=_names(section, "modules_to_not_convert", "parts"),
        where=section.where,
    )


def _read_compressed(section: HFConfig) -> QuantSpec:
    """compressed-tensors, as llm-compressor writes it: a scheme for each group of modules."""
    _refuse_unknown(
        section,
        "quant_method format config_groups ignore kv_cache_scheme quantization_status "
        "sparsity_config transform_config",
        "global_compression_ratio version run_compressed",
    )
    _choose(section, "quantization_status", ("compressed", "frozen"), "compressed")
    for name in ("sparsity_config", "transform_config"):
        inner = section.section(name)
        if inner is not None and inner.values and inner.values.get("format") != "dense":
            raise _refuse(section, name, "none")
    _note_kv_cache(section)
    groups = section.section("config_groups")
    if groups is None or not groups.values or len(groups.values) > MAX_GROUPS:
        raise section.error("config_groups", f"an object of 1 to {MAX_GROUPS} groups")
    schemes = []
    for name in groups.values:
        group = groups.section(name)
        if group is None:
            raise groups.error(name, "an object")
        _refuse_unknown(group, "targets weights input_activations output_activations format")
        targets = _names(group, "targets", "patterns")
        if not targets.names:
            raise group.error("targets", "a list of names of modules")
        schemes.append((targets, _read_group(group, section)))
    return QuantSpec(
        method="compressed-tensors",
        schemes=tuple(schemes),
        ignored=_names(section, "ignore", "patterns"),
        where=section.where,
    )


_ARGS = "num_bits type strategy symmetric dynamic group_size block_structure actorder"
_NO_MEANING = "observer observer_kwargs"


def _read_group(group: HFConfig, section: HFConfig) -> Scheme:
    weights = group.section("weights")
    if weights is None:
        raise group.error("weights", "an object")
    if group.has("output_activations"):
        raise _refuse(group, "output_activations", "none")
    _refuse_unknown(weights, _ARGS, _NO_MEANING + " scale_dtype zp_dtype")
    where = group if group.has("format") else section
    formats = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
    form = _choose(where, "format", formats)
    kind, bits = _choose(weights, "type", ("int", "float")), weights.integer("num_bits")
    packed = form == "pack-quantized"
    if bits != (4 if packed else 8):
        raise _refuse(weights, "num_bits", f"{4 if packed else 8}, with format {form}")
    wrong = {"float-quantized": "int", "int-quantized": "float", "pack-quantized": "float"}
    if wrong.get(form) == kind:
        raise _refuse(weights, "type", f"the other one, with format {form}")
    if weights.boolean("dynamic", False):
        raise _refuse(weights, "dynamic", "false")
    symmetric = weights.boolean("symmetric", True)
    if not symmetric and not packed:
        raise _refuse(weights, "symmetric", f"true, with format {form}")
    actorder = weights.values.get("actorder")
    if actorder not in (None, False, True, "group", "weight", "static", "dynamic"):
        raise _refuse(weights, "actorder", "group, weight, static, dynamic")
    block = _read_block(weights, packed)
    if kind == "int" and not packed and block[1] is not None:
        raise _refuse(weights, "strategy", "tensor or channel, with type int")
    activations, static = _read_activations(group, kind, block, packed)
    return Scheme(
        layout="packed" if packed else "plain",
        values="int4" if packed else "int8" if kind == "int" else "fp8",
        block=block,
        zeros=not symmetric,
        ordered=actorder in (True, "group", "dynamic") and block[1] is not None,
        activations=activations,
        static=static,
    )


def _read_block(weights: HFConfig, packed: bool) -> tuple[int | None, int | None]:
    known = ("channel", "group") if packed else ("tensor", "channel", "block")
    strategy = _choose(weights, "strategy", known)
    _check_sizes(weights, strategy)
    match strategy:
        case "tensor":
            return None, None
        case "channel":
            return 1, None
        case "group":
            return 1, _group_size(weights, "group_size")
    size = weights.values.get("block_structure")
    if isinstance(size, str):  # older files: "128x128"
        size = [int(n) if n.isascii() and n.isdigit() else 0 for n in size.split("x")]
    if (
        not isinstance(size, list)
        or len(size) != 2
        or any(type(n) is not int or not 1 <= n <= MAX_GROUP_SIZE for n in size)
    ):
        raise weights.error("block_structure", "a list of two sizes")
    return size[0], size[1]


def _check_sizes(args: HFConfig, strategy: str) -> None:
    """Sizes of groups or blocks stand only where there are such."""
    if strategy != "group" and args.values.get("group_size") not in (None, -1):
        raise args.error("group_size", f"left out, with strategy {strategy}")
    if strategy != "block" and args.values.get("block_structure") is not None:
        raise args.error("block_structure", f"left out, with strategy {strategy}")


def _read_activations(
    group: HFConfig, kind: str, block: tuple[int | None, int | None], packed: bool
) -> tuple[Literal["int8", "fp8"] | None, bool]:
    """What rows are rounded to, and whether with a scale of the file."""
    inputs = group.section("input_activations")
    if inputs is None:
        return None, False
    if packed:
        raise _refuse(group, "input_activations", "none, with format pack-quantized")
    _refuse_unknown(inputs, _ARGS, _NO_MEANING + " scale_dtype zp_dtype")
    if _choose(inputs, "type", ("int", "float")) != kind:
        raise _refuse(inputs, "type", f"that of the weights, {kind}")
    _choose(inputs, "num_bits", (8,))
    _choose(inputs, "symmetric", (True,), True)
    if inputs.values.get("actorder"):
        raise _refuse(inputs, "actorder", "none")
    in_blocks = block[1] is not None
    if _choose(inputs, "dynamic", (True, False), False):
        known = "group" if in_blocks else "token"
        if _choose(inputs, "strategy", ("token", "group", "tensor")) == "tensor":
            # One scale for all rows of a step: a row would depend on those beside it.
            raise _refuse(inputs, "strategy", f"{known}, where dynamic is true")
        if inputs.values["strategy"] != known:
            raise _refuse(inputs, "strategy", f"{known}, with these weights")
        _check_sizes(inputs, known)
        if in_blocks and inputs.values.get("group_size") != block[1]:
            raise _refuse(inputs, "group_size", f"that of the weights, {block[1]}")
        return ("int8" if kind == "int" else "fp8"), False
    if in_blocks:
        raise _refuse(inputs, "dynamic", "true, with weights in blocks")
    _check_sizes(inputs, _choose(inputs, "strategy", ("tensor",)))
    return ("int8" if kind == "int" else "fp8"), True


_METHODS: dict[str, Callable[[HFConfig], QuantSpec]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "gptq": _read_gptq,
    "awq": _read_awq,
}
