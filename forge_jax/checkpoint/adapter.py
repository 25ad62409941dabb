"""LoRA adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors.

The config and the header are checked completely before any data is read. If an adapter needs
something that would not give PEFT's results here, it is rejected by name, never partly applied.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forge_jax.checkpoint.safetensors import read_header
from forge_jax.errors import CheckpointError, UnsupportedModelError
from forge_jax.host.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, file_size, read_json, short_repr
from forge_jax.models.decoder import Model
from forge_jax.models.families.multimodal import TextSide
from forge_jax.models.lora import LoraShape, lora_targets
from forge_jax.models.plugins import find_architecture
from forge_jax.weights.names import text_name
from forge_jax.weights.stored import FLOATS, StoredTensor

_PREFIX = "base_model.model."
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*", re.ASCII)
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight", re.ASCII)

_REMEDY = "merge the adapter into its base model (PEFT: merge_and_unload) and serve that model"

# PEFT options that change the meaning of the files if they are set.
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "their own biases",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "modules_to_save": "whole modules",
    "layer_replication": "repeated layers",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "parameters outside modules",
    "alora_invocation_tokens": "activation by tokens",
    "arrow_config": "routing between adapters",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
# These initializations subtract something from the base model, which would have to change too.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, kw_only=True)
class _Config:
    rank: int
    alpha: float
    rslora: bool
    transposed: bool  # True if the base model stores its matrices transposed
    ranks: Mapping[str, int]  # per module, where different
    alphas: Mapping[str, float]
    base_model: Any  # base_model_name_or_path, unchecked

    def rank_of(self, module: str) -> int:
        return int(_of_module(self.ranks, module, self.rank))

    def scaling(self, module: str) -> float:
        """Return the factor of the product (rsLoRA: Kalajdzievski 2023, arXiv:2312.03732)."""
        rank, alpha = self.rank_of(module), _of_module(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True, kw_only=True)
class _Module:
    """A checkpoint matrix that can be adapted: some rows of one of the model's matrices."""

    layer: int
    matrix: str  # "attention.qkv"
    start: int
    rows: int
    inputs: int
    transposed: bool  # True if the checkpoint stores the transpose
    stored_rows: np.ndarray | None  # rows of the checkpoint's matrix, see `Tensor`


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter in the form that a runner takes."""

    digest: str  # SHA-256 of both files' digests
    rank: int  # the largest of any module
    arrays: tuple[np.ndarray, ...]  # as in `LoraShape.adapter`; b includes the scaling


def adapter_digest(folder: Path) -> str:
    """Return a digest of both files: 64 hexadecimal digits.

    Raises:
      CheckpointError: a file is missing or cannot be read.
    """
    digest = hashlib.sha256()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        _check_is_there(folder, name)
        try:
            with (folder / name).open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _check_is_there(folder: Path, name: str) -> None:
    try:
        file_size(folder / name)  # rejects pipes, which would block forever
    except FileNotFoundError:
        other = "adapter_model.bin"
        if name == ADAPTER_WEIGHTS and (folder / other).exists():
            why = f"{other} is not supported: load the adapter in PEFT and save it as safetensors"
        else:
            why = "it is not a PEFT adapter"
        raise CheckpointError(f"{folder} has no {name}: {why}") from None


@dataclass(frozen=True, eq=False)
class CheckedAdapter:
    """An adapter whose config and header fit a model."""

    config: _Config
    stored: Mapping[str, StoredTensor]
    modules: Mapping[str, _Module]  # those with an A and a B matrix


def check_adapter(folder: Path, model: Model, shape: LoraShape) -> CheckedAdapter:
    """Check an adapter's config, and every name, shape and type in the header, without its data.

    Raises:
      UnsupportedModelError: as in `read_adapter`.
      CheckpointError: as in `read_adapter`.
    """
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        _check_is_there(folder, name)
    config = _read_config(folder)
    stored = read_header(folder / ADAPTER_WEIGHTS)
    if isinstance(find_architecture(model.spec.architecture), TextSide):
        stored = _of_text_side(folder, stored)
    pairs = _pairs(folder, config, stored, _modules(model), shape.rank)
    return CheckedAdapter(config, stored, pairs)


def read_adapter(folder: Path, model: Model, shape: LoraShape) -> Adapter:
    """Read and check an adapter of `model`, padded to the rank of `shape`.

    Raises:
      UnsupportedModelError: the adapter needs something that is not implemented.
      CheckpointError: a file is missing or broken, or does not fit the model or `shape`.
    """
    digest = adapter_digest(folder)
    checked = check_adapter(folder, model, shape)
    config, stored, pairs = checked.config, checked.stored, checked.modules
    targets = list(lora_targets(model.spec).items())
    arrays = tuple(np.zeros(s.shape, s.dtype) for s in shape.plain_adapter(model.spec, model.dtype))
    for name, module in pairs.items():
        a, b = (stored[_tensor_name(name, part)] for part in "AB")
        rank, scaling = a.shape[0], config.scaling(name)
        a_values = _finite(a, model.dtype)
        b_values = _finite(b, model.dtype, scaling)
        if module.stored_rows is not None:
            b_values = b_values[module.stored_rows]
        end = module.start + module.rows
        for index, (_, target) in enumerate(targets):
            first, last = target.start, target.start + target.rows
            if target.matrix != module.matrix or not module.start <= first < end:
                continue
            rows = slice(first - module.start, last - module.start)
            arrays[2 * index][module.layer, :rank] = a_values
            arrays[2 * index + 1][module.layer, :, :rank] = b_values[rows]
    if adapter_digest(folder) != digest:
        raise CheckpointError(f"{folder} changed while it was read: load it again")
    rank = max(stored[_tensor_name(name, "A")].shape[0] for name in pairs)
    return Adapter(digest=digest, rank=rank, arrays=shape.pack(arrays))


def _read_config(folder: Path) -> _Config:
    file = folder / ADAPTER_CONFIG
    config = read_json(file)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(
            f"{file}: peft_type must be LORA, got {short_repr(kind)}: {_REMEDY}"
        )
    for name, what in _REFUSED.items():
        if config.get(name):
            raise UnsupportedModelError(
                f"{file}: {name}: adapters with {what} are not supported: {_REMEDY}"
            )
    if config.get("bias", "none") != "none":
        raise UnsupportedModelError(
            f"{file}: bias must be none, got {short_repr(config['bias'])}: {_REMEDY}"
        )
    begin = config.get("init_lora_weights")
    if isinstance(begin, str) and begin.lower().startswith(_CHANGES_BASE):
        raise UnsupportedModelError(
            f"{file}: init_lora_weights {short_repr(begin)} changes the base model: convert the "
            "adapter to plain LoRA "
            "(PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    if type(config.get("use_rslora", False)) is not bool:
        raise CheckpointError(f"{file}: use_rslora must be true or false")
    ranks = _pattern(config, "rank_pattern", file)
    return _Config(
        rank=_rank(config.get("r"), "r", file),
        alpha=_number(config.get("lora_alpha"), "lora_alpha", file),
        rslora=config.get("use_rslora", False),
        transposed=bool(config.get("fan_in_fan_out")),
        ranks={key: _rank(value, f"rank_pattern {key}", file) for key, value in ranks.items()},
        alphas={
            key: _number(value, f"alpha_pattern {key}", file)
            for key, value in _pattern(config, "alpha_pattern", file).items()
        },
        base_model=config.get("base_model_name_or_path"),
    )


def _rank(value: Any, what: str, file: Path) -> int:
    if type(value) is not int or not 1 <= value < 2**31:
        raise CheckpointError(
            f"{file}: {what} must be an integer of at least 1, got {short_repr(value)}"
        )
    return value


def _number(value: Any, what: str, file: Path) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise CheckpointError(f"{file}: {what} must be a number, got {short_repr(value)}")
    return float(value)


def _pattern(config: Mapping[str, Any], name: str, file: Path) -> Mapping[str, Any]:
    """Return a pattern of PEFT whose keys are module names or their ends, not expressions."""
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict):
        raise CheckpointError(f"{file}: {name} must be an object, got {short_repr(pattern)}")
    for key in pattern:
        if not _PLAIN_NAME.fullmatch(key):
            raise UnsupportedModelError(
                f"{file}: {name}: {short_repr(key)} is not a plain module name; regular "
                "expressions are not supported: write one entry per module"
            )
    return pattern


def _of_module[Value](pattern: Mapping[str, Value], module: str, default: Value) -> Value:
    """Return the value of the first key that is the module's name or its end."""
    for key, value in pattern.items():
        if module == key or module.endswith(f".{key}"):
            return value
    return default


def _modules(model: Model) -> dict[str, _Module]:
    """Return the matrices that can be adapted, by their names in checkpoints."""
    architecture = find_architecture(model.spec.architecture)
    maps = [architecture.weights(model.spec)]
    if architecture.other_weights is not None:
        maps.append(architecture.other_weights(model.spec))
    matrices = {target.matrix for target in lora_targets(model.spec).values()}
    modules: dict[str, _Module] = {}
    for weights in maps:
        for leaf, parts in weights.items():
            match = _LAYER.fullmatch(leaf)
            if match is None or match[2] not in matrices:
                continue
            layer = int(match[1])
            if match[2].startswith("mlp") and model.spec.experts_of(layer) is not None:
                continue
            start = 0
            for part in parts:
                modules[part.name.removesuffix(".weight")] = _Module(
                    layer=layer,
                    matrix=match[2],
                    start=start,
                    rows=part.rows,
                    inputs=part.columns,
                    transposed=part.transpose,
                    stored_rows=part.stored_rows(),
                )
                start += part.rows
    return modules


def _of_text_side(folder: Path, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return an adapter's tensors by their names for a text checkpoint; others keep theirs."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        ours = text_name(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
        ours = name if ours is None else _PREFIX + ours
        if ours in found:
            raise CheckpointError(
                f"{folder / ADAPTER_WEIGHTS}: {short_repr(name, 200)} and another tensor belong to "
                "the same matrix: remove one of them"
            )
        found[ours] = tensor
    return found


def _tensor_name(module: str, part: str) -> str:
    return f"{_PREFIX}{module}.lora_{part}.weight"


def _pairs(
    folder: Path,
    config: _Config,
    stored: Mapping[str, StoredTensor],
    modules: Mapping[str, _Module],
    max_rank: int,
) -> dict[str, _Module]:
    """Check every name, shape and type, and return the modules that have both matrices."""
    made_for = f"the adapter was made for {short_repr(config.base_model)} (base_model_name_or_path)"
    known = {_tensor_name(module, part): module for module in modules for part in "AB"}
    for name in stored:
        if name not in known:
            raise UnsupportedModelError(
                f"{folder / ADAPTER_WEIGHTS}: {short_repr(name, 200)} is not supported: only A and "
                "B matrices of this model's q, k, v, o, gate, up and down projections are "
                f"({made_for}): {_REMEDY}"
            )
    names = dict.fromkeys(known[name] for name in stored)
    if not names:
        raise CheckpointError(f"{folder / ADAPTER_WEIGHTS} has no tensors")
    for name in names:
        module, rank = modules[name], config.rank_of(name)
        if config.transposed and not module.transposed:
            raise UnsupportedModelError(
                f"{folder / ADAPTER_CONFIG}: fan_in_fan_out is true, but the base model does not "
                f"store {name} transposed: {_REMEDY}"
            )
        if rank > max_rank:
            raise CheckpointError(
                f"{folder}: {name} has rank {rank}, but at most {max_rank} is served: raise "
                "--max-lora-rank"
            )
        for part, wanted in (("A", (rank, module.inputs)), ("B", (module.rows, rank))):
            tensor = stored.get(_tensor_name(name, part))
            where = f"{folder / ADAPTER_WEIGHTS}: {_tensor_name(name, part)}"
            if tensor is None:
                raise CheckpointError(f"{where} is missing: copy or save the adapter again")
            if tensor.shape != wanted:
                raise CheckpointError(
                    f"{where} has shape {tensor.shape}, not {wanted} as r and this model require: "
                    f"{made_for}"
                )
            if tensor.dtype not in FLOATS:
                raise CheckpointError(f"{where} is {tensor.dtype}, which is not supported")
    return {name: modules[name] for name in names}


def _finite(tensor: StoredTensor, dtype: np.dtype, scaling: float = 1.0) -> np.ndarray:
    """Return the scaled values in the model's type. A single NaN would reach every request."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = (tensor.read().astype(np.float32) * np.float32(scaling)).astype(dtype)
    if not np.isfinite(values.astype(np.float32)).all():
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} has values that are not finite in {dtype}"
        )
    return values
