"""Writes a Llama folder's bfloat16 weights as GGUF: `python to_gguf.py FOLDER FILE.gguf`.

It runs in the environment of llama.cpp, which has numpy and gguf and nothing of this project.
"""

import json
import sys
from pathlib import Path

import gguf  # pyright: ignore[reportMissingImports]
import numpy as np


def read_safetensors(path):
    """Yields (name, bits uint16[...]) of a file whose tensors are all bfloat16."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = np.memmap(path, np.uint8, "r", offset=file.tell())
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{path}: {name} is {entry['dtype']}, not BF16")
        begin, end = entry["data_offsets"]
        yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])


def interleave_rope(weight, num_heads):
    """Rows of q or k, from rotating halves (Hugging Face) to rotating pairs (llama.cpp)."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def add_vocabulary(writer, folder, config):
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    types = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types(
        [types.CONTROL if i in special else types.NORMAL for i in range(len(ids))]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def main():
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    partial = target.with_name(target.name + ".tmp")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_name(folder.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_vocabulary(writer, folder, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, bits in read_safetensors(folder / "model.safetensors"):
        gguf_name = f"{names.get_name(name.removesuffix('.weight'))}.weight"
        if bits.ndim == 1:  # norms are kept in float32
            writer.add_tensor(gguf_name, (bits.astype(np.uint32) << 16).view(np.float32))
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            bits = interleave_rope(bits, heads if "q_proj" in name else kv_heads)
        as_bytes = np.ascontiguousarray(bits).view(np.uint8)
        writer.add_tensor(gguf_name, as_bytes, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


if __name__ == "__main__":
    main()
