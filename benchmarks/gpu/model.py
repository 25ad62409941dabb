"""A model of Llama-3.1-8B's shape with random weights: on the device, and as a folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.models.spec import ModelSpec
from forge_jax.models.weight_map import decoder_weights

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
TINY = {
    **LLAMA_3_1_8B,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PATTERN_VALUES = 1 << 24


def config(tiny: bool) -> dict[str, Any]:
    return TINY if tiny else LLAMA_3_1_8B


def write_folder(folder: Path, tiny: bool) -> ModelSpec:
    """Write config.json and model.safetensors, without a tokenizer.

    All tensors repeat one stretch of random numbers at different offsets. The speed of a dense
    model does not depend on its values, so 16 GB are written as fast as the disk allows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(tiny)))
    spec = read_spec(folder)
    tensors = [tensor for parts in decoder_weights(spec).values() for tensor in parts]
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    rng = np.random.default_rng(0)
    pattern = (0.02 * rng.standard_normal(PATTERN_VALUES, np.float32)).astype(ml_dtypes.bfloat16)
    data = np.concatenate((pattern, pattern)).tobytes()
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index, shape in enumerate(shapes.values()):
            left, start = 2 * math.prod(shape), 2 * (index * 977 % PATTERN_VALUES)
            while left:
                piece = min(left, 2 * PATTERN_VALUES)
                file.write(data[start : start + piece])
                left -= piece
    return spec


def random_leaves(leaves: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[jax.Array, ...]:
    """Return weights on the device, made one leaf at a time."""

    def make(index: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError("packed weights cannot be random: build the model with plain ones")
        normal = jax.jit(
            lambda key: (0.02 * jax.random.normal(key, leaf.shape, jnp.float32)).astype(leaf.dtype)
        )
        return jax.block_until_ready(normal(jax.random.key(index)))

    return tuple(make(index, leaf) for index, leaf in enumerate(leaves))
