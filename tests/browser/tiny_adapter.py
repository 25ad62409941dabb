"""A small random LoRA adapter of the bundled model. This environment has no numpy."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

from tests.server_process import ROOT

CONFIG = ROOT / "forge_jax/checkpoint/bundled/forge-tiny/config.json"
RANK = 2


def write_adapter(folder: Path, *, size: float = 0.4) -> Path:
    """Write an adapter of the output projections of all attention layers, in PEFT's format."""
    config = json.loads(CONFIG.read_text())
    width = config["hidden_size"]
    rng = random.Random(0)
    header: dict[str, object] = {}
    data = b""
    for layer in range(config["num_hidden_layers"]):
        module = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        for part, shape, scale in (("A", (RANK, width), width**-0.5), ("B", (width, RANK), size)):
            values = [rng.gauss(0.0, scale) for _ in range(RANK * width)]
            tensor = struct.pack(f"<{len(values)}f", *values)
            offsets = [len(data), len(data) + len(tensor)]
            described = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
            header[f"{module}.lora_{part}.weight"] = described
            data += tensor
    encoded = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    file = struct.pack("<Q", len(encoded)) + encoded + data
    (folder / "adapter_model.safetensors").write_bytes(file)
    adapter = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "forge-tiny",
        "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0, "bias": "none",
        "target_modules": ["o_proj"], "fan_in_fan_out": False,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder
