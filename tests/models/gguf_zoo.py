"""A small Llama as a GGUF file with matrices of every type, in random blocks.

The gguf package rounds to none of the types with blocks of 256. Their blocks are therefore random
bits, with factors that give the values about the size of weights.
"""

from pathlib import Path

import gguf
import numpy as np

Q = gguf.GGMLQuantizationType
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 512, 4, 2, 64, 320
STD = 0.05
# The offsets of a block's float16 numbers: the factor of scales, as a fraction of the values' size,
# and the unit of minima.
FACTORS = {
    Q.Q4_0: {0: 1 / 4.6},
    Q.Q4_1: {0: 1 / 4.6, 2: -7.5 / 4.6},
    Q.Q5_0: {0: 1 / 9.2},
    Q.Q5_1: {0: 1 / 9.2, 2: -15.5 / 9.2},
    Q.Q8_0: {0: 1 / 74},
    Q.Q2_K: {80: 1 / 8.5, 82: 1.5 / 8.5},
    Q.Q3_K: {108: 1 / 42},
    Q.Q4_K: {0: 1 / 150, 2: 7.5 / 150},
    Q.Q5_K: {0: 1 / 300, 2: 15.5 / 300},
    Q.Q6_K: {208: 1 / 1360},
    Q.IQ4_NL: {0: 1 / 70},
    Q.IQ4_XS: {0: 1 / 1300},
}
# By layer: q, k, v, output, gate, up, down. The first is that of llama.cpp's Q4_K_M.
LAYERS = (
    (Q.Q4_K, Q.Q4_K, Q.Q6_K, Q.Q4_K, Q.Q4_K, Q.Q4_K, Q.Q6_K),
    (Q.Q4_0, Q.Q4_1, Q.Q8_0, Q.Q5_0, Q.Q5_1, Q.Q5_1, Q.Q8_0),
    (Q.Q8_0, Q.Q5_0, Q.Q8_0, Q.Q4_1, Q.Q2_K, Q.Q3_K, Q.Q2_K),
    (Q.Q5_K, Q.Q5_K, Q.BF16, Q.Q3_K, Q.Q4_0, Q.Q4_0, Q.Q5_K),
)
NAMES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
SHAPES = (
    (HEADS * HEAD_DIM, HIDDEN),
    (KV_HEADS * HEAD_DIM, HIDDEN),
    (KV_HEADS * HEAD_DIM, HIDDEN),
    (HIDDEN, HEADS * HEAD_DIM),
    (INNER, HIDDEN),
    (INNER, HIDDEN),
    (HIDDEN, INNER),
)


def random_blocks(rng: np.random.Generator, kind: Q, rows: int, columns: int) -> np.ndarray:
    """Return u8[rows, bytes of a row]."""
    if kind == Q.BF16:
        values = rng.standard_normal((rows, columns)).astype(np.float32) * STD
        return gguf.quants.quantize(values, kind)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows, columns // per_block, block_bytes), dtype=np.uint8)
    size = rng.uniform(0.5, 1.5, data.shape[:2]) * STD
    for at, part in FACTORS[kind].items():
        data[..., at : at + 2] = (size * part).astype(np.float16)[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def write_zoo(
    target: Path, layers=LAYERS, *, embedding=Q.Q4_K, head: Q | None = Q.Q6_K, experts: int = 0
) -> Path:
    """Write the model; `head` is None if tied, `experts` makes a Mixtral with 2 per token."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(len(layers))
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)

    def add(name: str, kind: Q, rows: int, columns: int) -> None:
        if experts and "ffn_" in name:
            blocks = random_blocks(rng, kind, experts * rows, columns)
            blocks = blocks.reshape(experts, rows, -1)
            writer.add_tensor(f"{name}_exps.weight", blocks, raw_dtype=kind)
            return
        writer.add_tensor(f"{name}.weight", random_blocks(rng, kind, rows, columns), raw_dtype=kind)

    add("token_embd", embedding, VOCAB, HIDDEN)
    if head is not None:
        add("output", head, VOCAB, HIDDEN)
    norm = np.ones(HIDDEN, np.float32)
    writer.add_tensor("output_norm.weight", norm)
    for layer, kinds in enumerate(layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", norm)
        if experts:
            router = rng.standard_normal((experts, HIDDEN)).astype(np.float32) * 0.5
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
        for name, kind, (rows, columns) in zip(NAMES, kinds, SHAPES, strict=True):
            add(f"blk.{layer}.{name}", kind, rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
