"""The spec of the model in a folder or GGUF file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from forge_jax.checkpoint.converted import read_record
from forge_jax.checkpoint.gguf import config_of, is_gguf, read_gguf
from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import CheckpointError, UnsupportedModelError
from forge_jax.host.files import read_json, short_repr
from forge_jax.models.registry import spec_of
from forge_jax.models.spec import ModelSpec

MODEL_OPTIMIZER = "hf_quant_config.json"  # written by NVIDIA's Model Optimizer


def read_spec(folder: Path) -> ModelSpec:
    """Read `config.json` and, if there is one, `generation_config.json` of a model folder.

    A GGUF file's metadata replace them. A converted folder has the dtype of its weights.

    Raises:
      UnsupportedModelError: an architecture or option is not implemented; the message names it.
      ModelError: a file or field is missing or wrong.
    """
    spec = spec_of(*_read_configs(folder))
    record = read_record(folder)
    return spec if record is None else dataclasses.replace(spec, dtype=record.dtype)


def _read_configs(folder: Path) -> tuple[HFConfig, HFConfig]:
    if is_gguf(folder):
        config, generation = config_of(read_gguf(folder))
        return HFConfig(config, str(folder)), HFConfig(generation, str(folder))
    try:
        config = read_json(folder / "config.json")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json: it is not a model folder") from None
    if not config.get("quantization_config"):
        _refuse_model_optimizer(folder / MODEL_OPTIMIZER)
    generation_path = folder / "generation_config.json"
    try:
        generation = read_json(generation_path)
    except FileNotFoundError:
        generation = {}
    return HFConfig(config, str(folder / "config.json")), HFConfig(generation, str(generation_path))


def _refuse_model_optimizer(file: Path) -> None:
    """Reject checkpoints whose quantization is described in a separate file.

    Raises:
      UnsupportedModelError: the file exists.
    """
    try:
        section = read_json(file).get("quantization")
    except FileNotFoundError:
        return
    algorithm = section.get("quant_algo") if isinstance(section, dict) else section
    if algorithm is not None:
        raise UnsupportedModelError(
            f"{file}: quant_algo {short_repr(algorithm)} is not supported: use the unquantized "
            "checkpoint, or one with a supported quantization_config in config.json"
        )
