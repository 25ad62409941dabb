"""Small random LoRA adapters in PEFT's format, and their effect on a model's weights."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401, makes bfloat16 a type that numpy reads
import numpy as np
from safetensors.numpy import load_file, save_file

PROJECTIONS = tuple(f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down"))
PROJECTIONS += ("qkv_proj", "gate_up_proj", "c_attn", "c_fc", "c_proj")
PROJECTIONS += ("shared_mlp.input_linear", "shared_mlp.output_linear")
PROJECTIONS += ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "fc1", "fc2")


def weights_of(model: Path) -> dict[str, np.ndarray]:
    return load_file(model / "model.safetensors")


def projections(model: Path, names: Sequence[str] = PROJECTIONS) -> list[str]:
    """Return the modules of a model's layers with these names, without those of experts."""
    ends = tuple(f".{name}.weight" for name in names)
    return [
        name.removesuffix(".weight")
        for name in weights_of(model)
        if name.endswith(ends) and ".experts." not in name and ".shared_expert" not in name
    ]


def is_transposed(module: str) -> bool:
    """Return True for GPT-2's modules, whose matrices are stored [inputs, outputs]."""
    return ".h." in module and module.rpartition(".")[2].startswith("c_")


def write_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int,
    modules: Sequence[str] | None = None,
    rank: int = 4,
    alpha: float = 8.0,
    ranks: Mapping[str, int] | None = None,
    size: float = 0.3,
    dtype: Any = np.float32,
    **config: Any,
) -> Path:
    """Write an adapter of `modules` (all projections by default) with matrices of about `size`.

    `ranks` are of single modules, by full name; `config` adds to adapter_config.json.
    """
    rng, ranks = np.random.default_rng(seed), ranks or {}
    weights, tensors = weights_of(model), {}
    modules = projections(model) if modules is None else modules
    for module in modules:
        (outputs, inputs), r = weights[f"{module}.weight"].shape, ranks.get(module, rank)
        if is_transposed(module):
            outputs, inputs = inputs, outputs
        a = rng.normal(size=(r, inputs)) / math.sqrt(inputs)
        b = size * rng.normal(size=(outputs, r)) / math.sqrt(r)
        for part, values in (("A", a), ("B", b)):
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = values.astype(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj"],
        "fan_in_fan_out": any(map(is_transposed, modules)),
        "rank_pattern": dict(ranks),
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def merged(folder: Path, model: Path, adapter: Path, scaling: Mapping[str, float] | float) -> Path:
    """Write a copy of the model merged with the adapter: W + scaling B A, in float64.

    Args:
      scaling: Scaling of all modules, or of each.
    """
    shutil.copytree(model, folder)
    weights = {name: np.array(value) for name, value in weights_of(model).items()}
    matrices = load_file(adapter / "adapter_model.safetensors")
    for name in matrices:
        module, part, _ = name.removeprefix("base_model.model.").rsplit(".", 2)
        if part == "lora_A":
            a, b = (matrices[name.replace("lora_A", f"lora_{p}")].astype(np.float64) for p in "AB")
            factor = scaling if isinstance(scaling, float) else scaling[module]
            weight = weights[f"{module}.weight"]
            change = factor * (b @ a)
            change = change.T if is_transposed(module) else change
            weights[f"{module}.weight"] = (weight + change).astype(weight.dtype)
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors")
    return folder
