"""A small Qwen 3.5 with wide value heads, as a GGUF file with value heads in another order."""

import json
from pathlib import Path

import gguf
import numpy as np
from gguf_writer import Q, write_gguf
from gguf_zoo import random_blocks
from safetensors.numpy import save_file

from forge_jax.checkpoint.safetensors import read_header

VALUE_DIM = 64


def write_wide(golden: Path, target: Path, kind: Q = Q.Q8_0, *, keys: int = 2) -> Path:
    """Write a file like the folder `golden`, with random gated DeltaNet of `keys` key heads.

    A key head has two value heads of `VALUE_DIM`. Rows of 256 have the type `kind`.
    """
    rng, text = np.random.default_rng(5), json.loads((golden / "config.json").read_text())
    config = text["text_config"]
    config |= {"linear_num_key_heads": keys, "linear_num_value_heads": 2 * keys}
    config["linear_value_head_dim"] = VALUE_DIM
    inner, hidden = 2 * keys * VALUE_DIM, config["hidden_size"]
    channels = 2 * keys * config["linear_key_head_dim"] + inner
    shapes = {
        "A_log": (2 * keys,),
        "conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
        "dt_bias": (2 * keys,),
        "in_proj_a.weight": (2 * keys, hidden),
        "in_proj_b.weight": (2 * keys, hidden),
        "in_proj_qkv.weight": (channels, hidden),
        "in_proj_z.weight": (inner, hidden),
        "norm.weight": (VALUE_DIM,),
        "out_proj.weight": (hidden, inner),
    }
    tensors = {}
    for name, stored in read_header(golden / "model.safetensors").items():
        shape = shapes.get(name.partition(".linear_attn.")[2])
        size = 1.0 if name.endswith("linear_attn.norm.weight") else 0.2
        random = None if shape is None else rng.standard_normal(shape, np.float32) * size
        tensors[name] = np.array(stored.read()) if random is None else random
    folder = target.with_suffix(".folder")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(text))
    save_file(tensors, folder / "model.safetensors")
    if gguf.GGML_QUANT_SIZES[kind][0] < 256:
        return write_gguf(folder, target, kind)
    rounded = gguf.quants.quantize  # which rounds to none of these types
    gguf.quants.quantize = lambda values, kind: random_blocks(rng, kind, *values.shape)
    try:
        return write_gguf(folder, target, kind)
    finally:
        gguf.quants.quantize = rounded
