"""Writes the trained model as a Hugging Face folder: bf16 safetensors, configuration, tokenizer."""

import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from .model import ModelConfig
from .tokenizer import BOS, END, PAD, tokenizer_config


def model_config(config: ModelConfig, tokenizer: Tokenizer) -> dict:
    """Return `config.json` in Hugging Face's format."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }


def tensors(state: nnx.State) -> dict[str, np.ndarray]:
    """Return tensors by Hugging Face name, which is the path of the module in `model.py`."""
    named = {}
    for path, leaf in nnx.to_flat_state(state):
        parts = [str(part) for part in path if part != "weight"]
        array = np.asarray(leaf[...]).astype(ml_dtypes.bfloat16)
        named["model." + ".".join([*parts, "weight"])] = array
    return named


def export(
    folder: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    state: nnx.State,
    *,
    drafts: bool = False,
) -> None:
    """Replace the folder's files one by one, each by an atomic rename; the model card stays.

    A draft model (`drafts`) has no tokenizer, because it uses that of its target.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(state), partial / "model.safetensors", metadata={"format": "pt"})
    documents = {"config.json": model_config(config, tokenizer)}
    if not drafts:
        tokenizer.save(str(partial / "tokenizer.json"))
        documents |= {
            "tokenizer_config.json": tokenizer_config(config.max_position_embeddings),
            "generation_config.json": {
                "bos_token_id": tokenizer.token_to_id(BOS),
                "eos_token_id": tokenizer.token_to_id(END),
                "pad_token_id": tokenizer.token_to_id(PAD),
                "do_sample": True,
            },
        }
    for name, content in documents.items():
        (partial / name).write_text(json.dumps(content, indent=2) + "\n")
    for path in partial.iterdir():
        path.chmod(0o644)
        os.replace(path, folder / path.name)
    partial.rmdir()
