"""Writes a larger model that computes the same function as a small one.

    python -m training.forge_tiny.widen --shape 1.1B --output FOLDER [--source FOLDER]

Speculation pays only if a step takes time, but a step of forge-tiny takes 0.25 ms. The wide model
answers like its source, with the step times of its shape. Four rules preserve the function:

- Every channel of the residual stream is repeated as often as the width grows, so that the mean of
  squares of RMSNorm stays the same. Norms weigh the copies with zero, so they are never read.
- An added layer is an identity, because its output projections are zero.
- Added heads and feed-forward units meet zeros in the output projections.
- A query head keeps its key-value head. If the wide model has smaller groups of query heads, the
  key-value head is repeated. `head_dim` stays, and with it RoPE and the scale of attention.

All weights that do not reach an output are random, because zeros could be cheaper to read or to
multiply. The vocabulary stays, because logits of added tokens would have to be minus infinity.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from . import BUNDLED

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
RANDOM_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that grow, by their names in `config.json`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int


SHAPES = {
    # TinyLlama-1.1B
    "1.1B": Shape(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
    ),
    # llama-160m and llama-68m, draft models of SpecInfer (Miao et al. 2023, arXiv:2305.09781)
    "160M": Shape(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
    ),
    "68M": Shape(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=12,
    ),
}


def widen(source: Path, folder: Path, shape: Shape, seed: int = 0) -> None:
    """Write the model of `source`, in the format of forge-tiny, as a folder of this shape.

    Raises:
      ValueError: The model does not fit into the shape. The message names the field.
    """
    config = json.loads((source / "config.json").read_text())
    check(config, shape)
    weights = load_file(source / "model.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _Widening(config, shape, seed).tensors(weights)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config | asdict(shape), indent=2) + "\n")
    for name in COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def check(config: dict, shape: Shape) -> None:
    """Raise ValueError if a model of this configuration does not fit into the shape."""
    if config["architectures"] != ["LlamaForCausalLM"] or not config["tie_word_embeddings"]:
        raise ValueError("only Llamas with tie_word_embeddings can be widened")
    for name, size in asdict(shape).items():
        if size < config[name]:
            raise ValueError(f"{name}: {size} is less than the source's {config[name]}")
    if shape.hidden_size % config["hidden_size"]:
        raise ValueError(
            f"hidden_size: {shape.hidden_size} is not a multiple of the source's "
            f"{config['hidden_size']}"
        )
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads: {shape.num_attention_heads} is not a multiple of "
            f"num_key_value_heads, {shape.num_key_value_heads}"
        )
    needed = config["num_key_value_heads"] * _repeats(config, shape)
    if needed > shape.num_key_value_heads:
        raise ValueError(
            f"num_key_value_heads: {shape.num_key_value_heads} is too few for groups of "
            f"{shape.num_attention_heads // shape.num_key_value_heads} query heads: {needed} needed"
        )


def _repeats(config: dict, shape: Shape) -> int:
    """Return the number of key-value heads that replace each of the source's."""
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    return -(-group // (shape.num_attention_heads // shape.num_key_value_heads))


class _Widening:
    def __init__(self, config: dict, shape: Shape, seed: int):
        self._config, self._shape = config, shape
        self._random = np.random.default_rng(seed)
        self._copies = shape.hidden_size // config["hidden_size"]
        self._head_dim = config["head_dim"]
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        wide_group = shape.num_attention_heads // shape.num_key_value_heads
        repeats = _repeats(config, shape)
        self._heads = [  # heads of the wide model, by the source's query head
            (kv * repeats + i // wide_group) * wide_group + i % wide_group
            for kv in range(config["num_key_value_heads"])
            for i in range(group)
        ]
        # The source's head for each of the first key-value heads of the wide model.
        self._kv_heads = np.repeat(np.arange(config["num_key_value_heads"]), repeats)

    def tensors(self, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        out = {
            "model.embed_tokens.weight": np.tile(
                weights["model.embed_tokens.weight"], (1, self._copies)
            ),
            "model.norm.weight": self._norm(weights["model.norm.weight"]),
        }
        for layer in range(self._shape.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            for name, empty in self._empty_layer().items():
                out[prefix + name + ".weight"] = empty
            if layer < self._config["num_hidden_layers"]:
                self._fill(out, weights, prefix)
        return out

    def _empty_layer(self) -> dict[str, np.ndarray]:
        """Return a layer that adds nothing."""
        shape, d = self._shape, self._shape.hidden_size
        q = shape.num_attention_heads * self._head_dim
        kv = shape.num_key_value_heads * self._head_dim
        ffn = shape.intermediate_size
        return {
            "input_layernorm": np.ones(d, ml_dtypes.bfloat16),
            "self_attn.q_proj": self._normal(q, d),
            "self_attn.k_proj": self._normal(kv, d),
            "self_attn.v_proj": self._normal(kv, d),
            "self_attn.o_proj": np.zeros((d, q), ml_dtypes.bfloat16),
            "post_attention_layernorm": np.ones(d, ml_dtypes.bfloat16),
            "mlp.gate_proj": self._normal(ffn, d),
            "mlp.up_proj": self._normal(ffn, d),
            "mlp.down_proj": np.zeros((d, ffn), ml_dtypes.bfloat16),
        }

    def _fill(
        self, out: dict[str, np.ndarray], weights: dict[str, np.ndarray], prefix: str
    ) -> None:
        """Copy the source's layer into an empty one."""
        hidden, ffn = self._config["hidden_size"], self._config["intermediate_size"]
        source = {name.removesuffix(".weight"): array for name, array in weights.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{prefix}{name}.weight"] = self._norm(source[prefix + name])
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            out[f"{prefix}{name}.weight"][:ffn, :hidden] = source[prefix + name]
        down = np.tile(source[prefix + "mlp.down_proj"], (self._copies, 1))
        out[f"{prefix}mlp.down_proj.weight"][:, :ffn] = down
        q, o = (out[f"{prefix}self_attn.{name}.weight"] for name in ("q_proj", "o_proj"))
        wide_o = np.tile(source[prefix + "self_attn.o_proj"], (self._copies, 1))
        for old, new in enumerate(self._heads):
            q[self._rows(new), :hidden] = source[prefix + "self_attn.q_proj"][self._rows(old)]
            o[:, self._rows(new)] = wide_o[:, self._rows(old)]
        for name in ("self_attn.k_proj", "self_attn.v_proj"):
            for new, old in enumerate(self._kv_heads):
                rows = source[prefix + name][self._rows(old)]
                out[f"{prefix}{name}.weight"][self._rows(new), :hidden] = rows

    def _rows(self, head: int) -> slice:
        return slice(head * self._head_dim, (head + 1) * self._head_dim)

    def _norm(self, weight: np.ndarray) -> np.ndarray:
        return np.pad(weight, (0, self._shape.hidden_size - len(weight)))

    def _normal(self, rows: int, columns: int) -> np.ndarray:
        values = self._random.standard_normal((rows, columns), np.float32)
        return (values * np.float32(RANDOM_STD)).astype(ml_dtypes.bfloat16)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.forge_tiny.widen",
        description="Write a larger model that computes the same function.",
    )
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--source", type=Path, default=BUNDLED, help="the model to widen (default: forge-tiny)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the unused weights (default 0)"
    )
    args = parser.parse_args(argv)
    try:
        widen(args.source, args.output, SHAPES[args.shape], args.seed)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
