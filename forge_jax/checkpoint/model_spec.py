"""The spec of the model in a folder or GGUF file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from forge_jax.checkpoint.converted import read_record
from forge_jax.checkpoint.gguf import config_of, is_gguf, read_gguf
from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import CheckpointError
from forge_jax.host.files import read_json
from forge_jax.models.registry import spec_of
from forge_jax.models.spec import ModelSpec


def read_spec(folder: Path) -> ModelSpec:
    """Read `config.json` (and `generation_config.json`, if there is one) of a model folder.

    For a GGUF file, the metadata take their place. The dtype of a converted folder is that of its
    weights.

    Raises:
      UnsupportedModelError: an architecture or option that is not implemented, by name.
      ModelError: a file or field that is missing or wrong.
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
    generation_path = folder / "generation_config.json"
    try:
        generation = read_json(generation_path)
    except FileNotFoundError:
        generation = {}
    return HFConfig(config, str(folder / "config.json")), HFConfig(generation, str(generation_path))
