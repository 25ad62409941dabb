"""Smaller models, made from a model's folder."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.numpy import load_file, save_file


def with_layers(model: Path, layers: Sequence[int], parent: Path) -> Path:
    """Write a folder with these layers of a model, in this order, and return it.

    Args:
      parent: an empty folder, because the new one keeps the model's name.
    """
    folder = parent / model.name
    folder.mkdir()
    for file in model.glob("*.json"):
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = len(layers)
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][layer] for layer in layers]
    if dense := config.get("mlp_only_layers"):
        config["mlp_only_layers"] = [n for n, layer in enumerate(layers) if layer in dense]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        match = re.match(r"(.*\blayers\.)(\d+)(\..*)", name)
        if match is None:
            tensors[name] = tensor
            continue
        for number, layer in enumerate(layers):
            if int(match[2]) == layer:
                tensors[f"{match[1]}{number}{match[3]}"] = tensor
    save_file(tensors, folder / "model.safetensors")
    return folder
