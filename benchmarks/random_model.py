"""Writes a model folder with random weights, for benchmarks that compare engines.

    python -m benchmarks.random_model --shape M --output DIR [--seed 0]

A Hugging Face folder: config.json, model.safetensors in bfloat16, and a tokenizer. The speed of a
dense model does not depend on its values, so nothing has to be downloaded.

The vocabulary is made for measuring. After three special tokens and the 256 bytes, every token is a
space and some letters. A text therefore has as many tokens as spaces, and any prompt can be given
as text or as ids. The output rows of the special tokens and the bytes are zero. Greedy decoding
therefore never ends, and each sampled token is visible in the text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
NUM_RESERVED = len(SPECIAL_TOKENS) + 256  # tokens that no prompt has and greedy decoding avoids
WEIGHT_STD = 0.02
SPACE = "Ġ"  # the space in byte-level vocabularies


@dataclass(frozen=True)
class Shape:
    """Sizes by their names in `config.json`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


SHAPES = {
    # TinyLlama-1.1B
    "M": Shape(2048, 5632, 22, 32, 4, vocab_size=32000, tie_word_embeddings=False),
    # SmolLM2-135M
    "S": Shape(576, 1536, 30, 9, 3, vocab_size=49152, tie_word_embeddings=True),
    # for tests
    "tiny": Shape(32, 64, 2, 4, 2, vocab_size=512, tie_word_embeddings=False),
}


def write_model(folder: Path, shape: Shape, seed: int = 0) -> None:
    """Create and fill `folder`; the same seed gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(shape))
    _write_json(folder / "tokenizer.json", _tokenizer(shape.vocab_size))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(shape))
    weights = folder / "model.safetensors"
    save_file(dict(_tensors(shape, seed)), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # the library writes files that only their owner can read


def prompt_text(token_ids: list[int], vocab_size: int) -> str:
    """Return the text that tokenizes to `token_ids`, none of which may be reserved."""
    assert min(token_ids) >= NUM_RESERVED
    names = vocabulary(vocab_size)
    return "".join(names[i] for i in token_ids).replace(SPACE, " ")


def vocabulary(size: int) -> list[str]:
    """Return the tokens by id: the special ones, the bytes, then " a" to " z", " aa", " ab" ..."""
    reserved = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())]
    if size <= NUM_RESERVED:
        raise ValueError(f"the vocabulary must be larger than {NUM_RESERVED}, not {size}")
    words = itertools.islice(_words(), size - NUM_RESERVED)
    return reserved + [SPACE + word for word in words]


def _words() -> Iterator[str]:
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield "".join(letters)


def _tensors(shape: Shape, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and values: bf16[N, K] matrices as in Llama checkpoints, norms of ones."""
    random = np.random.default_rng(seed)
    d, ffn, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q, kv = shape.num_attention_heads * head_dim, shape.num_key_value_heads * head_dim

    def normal(rows: int, columns: int) -> np.ndarray:
        values = random.standard_normal((rows, columns), np.float32) * np.float32(WEIGHT_STD)
        return values.astype(ml_dtypes.bfloat16)

    def embedding() -> np.ndarray:
        rows = normal(shape.vocab_size, d)
        rows[:NUM_RESERVED] = 0
        return rows

    ones = np.ones(d, ml_dtypes.bfloat16)
    yield "model.embed_tokens.weight", embedding()
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", ones
        yield prefix + "self_attn.q_proj.weight", normal(q, d)
        yield prefix + "self_attn.k_proj.weight", normal(kv, d)
        yield prefix + "self_attn.v_proj.weight", normal(kv, d)
        yield prefix + "self_attn.o_proj.weight", normal(d, q)
        yield prefix + "post_attention_layernorm.weight", ones
        yield prefix + "mlp.gate_proj.weight", normal(ffn, d)
        yield prefix + "mlp.up_proj.weight", normal(ffn, d)
        yield prefix + "mlp.down_proj.weight", normal(d, ffn)
    yield "model.norm.weight", ones
    if not shape.tie_word_embeddings:
        yield "lm_head.weight", embedding()


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": SPECIAL_TOKENS.index("<s>"),
        "eos_token_id": SPECIAL_TOKENS.index("</s>"),
        "torch_dtype": "bfloat16",
    }


def _tokenizer(vocab_size: int) -> dict[str, object]:
    """Return a byte-level BPE whose merges spell each word letter by letter."""
    names = vocabulary(vocab_size)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, name in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": [[name[:-1], name[-1]] for name in names[NUM_RESERVED:]],
        },
    }


def _tokenizer_config(shape: Shape) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a model folder with random weights.")
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_model(args.output, SHAPES[args.shape], args.seed)
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
