"""The tensors of a GGUF file, in Hugging Face's names and layout.

llama.cpp's converter (`convert_hf_to_gguf.py`) changes the names and four other things, which this
module reverses:

- In `_PAIRED_ROWS`, it reorders the rows of queries and keys so that the two numbers of a
  rotated pair are neighbors. Hugging Face has the first numbers of all pairs, then the second.
- In GPT-NeoX, it stacks queries, keys and values. Hugging Face has them together for each head.
- It stores the whole factor of Gemma's norms. Hugging Face stores the difference from 1.
- It fuses the matrices of a layer's experts into one tensor. Here each matrix is a weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from forge_jax.checkpoint.gguf.metadata import Metadata
from forge_jax.checkpoint.gguf.reader import GGUFFile, GGUFTensor, read_gguf
from forge_jax.errors import CheckpointError, UnsupportedModelError
from forge_jax.host.files import short_repr
from forge_kernels.blocks import BlockValues, joined

CHUNK_ELEMENTS = 2**21  # decoded at once by one thread

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OUTSIDE_PARTS = ("token_embd", "position_embd", "output_norm", "output")
_LINEAR = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
# By architecture: the module of the experts and the router, and the matrices of each expert.
_USUAL_EXPERTS = (
    "mlp",
    {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"},
)
_EXPERTS = {
    "llama": ("block_sparse_moe", {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}),
    **dict.fromkeys(("qwen3moe", "olmoe", "qwen2moe", "glm4moe"), _USUAL_EXPERTS),
    **dict.fromkeys(("ernie4_5-moe", "granitemoe"), _USUAL_EXPERTS),
}
_SHARED_GATE = "mlp.shared_expert_gate"
# By architecture: the tensor that corrects the scores of experts.
_CORRECTIONS = {
    "glm4moe": "mlp.gate.e_score_correction_bias",
    "ernie4_5-moe": "mlp.moe_statics.e_score_correction_bias",
}
# Vectors that are matrices of one row in Hugging Face's checkpoints.
_ONE_ROW = (_SHARED_GATE, _CORRECTIONS["ernie4_5-moe"])
MAX_EXPERTS = 4096
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {"ffn_up": "mlp.gate_up_proj"}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_OWN_NAMES = {
    **{"gemma2": _GEMMA, "gemma3": _GEMMA, "phi3": _PHI3},
    **{"exaone4": _NORMS_AFTER, "olmo2": _NORMS_AFTER},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "ernie4_5-moe": _SHARED_EXPERTS,
    "gpt2": {"position_embd": "model.wpe"},
    "glm4moe": {"post_attention_norm": "post_attention_layernorm", **_SHARED_EXPERTS},
    "phi2": {
        "attn_output": "self_attn.dense",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
        "output_norm": "model.final_layernorm",
    },
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "qwen2moe": {
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
        "ffn_gate_inp_shexp": _SHARED_GATE,
    },
    "gptneox": {
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
    },
}
_LAYERS = {"gptneox": "gpt_neox.layers"}
_PAIRED_ROWS = ("llama", "granite", "granitemoe", "minicpm", "smollm3")
_NORM_BIASES = ("gpt2", "phi2", "stablelm", "starcoder2", "gptneox")

# Tensors that are read with the configuration or follow from it.
ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_NO_WEIGHTS = {ROPE_FREQS, ROPE_LONG, ROPE_SHORT}


@dataclass(frozen=True, eq=False)
class GGUFWeight:
    """A tensor as Hugging Face has it, converted when it is read.

    Attributes:
      name: Hugging Face's name.
      stored: the tensor in the file.
      num_heads: the number of heads whose rows are stored in pairs; 0: no pairs.
      stacked_heads: the number of heads if the file stacks queries, keys and values, [3, H, D].
        Hugging Face has them by head, [H, 3, D]; 0: the same order.
      offset: the number to subtract from the values.
    """

    name: str
    stored: GGUFTensor
    num_heads: int = 0
    stacked_heads: int = 0
    offset: float = 0.0

    @property
    def dtype(self) -> np.dtype:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @cached_property
    def rows(self) -> np.ndarray | None:
        """The row in the file of each row of Hugging Face's; None if they are the same."""
        if self.stacked_heads:
            stacked = np.arange(self.shape[0]).reshape(3, self.stacked_heads, -1)
            return stacked.swapaxes(0, 1).reshape(-1)
        if not self.num_heads:
            return None
        pairs = np.arange(self.shape[0]).reshape(self.num_heads, -1, 2)
        return pairs.swapaxes(1, 2).reshape(-1)

    def read_blocks(self, rows: np.ndarray) -> BlockValues:
        """Return the numbers and scales of some rows, i64[n], in Hugging Face's order.

        The values are the file's: a block never spans two rows, and nothing is rounded.
        """
        some = self.stored.blocks()[rows if self.rows is None else self.rows[rows]]
        return self.stored.format.unpacked(some)

    def read_rows(self, out: np.ndarray, first: int) -> None:
        """Decode some rows into `out`, cast to its type, one chunk at a time to save memory."""
        if len(self.shape) < 2:
            values = self.stored.read()
            values = values if self.rows is None else values[self.rows]
            values = values[first : first + len(out)]
            np.copyto(out, values - self.offset if self.offset else values, casting="unsafe")
            return
        assert not self.offset and len(self.shape) == 2, self.name
        blocks, format = self.stored.blocks(), self.stored.format
        step = max(1, CHUNK_ELEMENTS // self.shape[1])
        for begin in range(0, len(out), step):
            part = out[begin : begin + step]
            place = slice(first + begin, first + begin + len(part))
            chunk = blocks[place if self.rows is None else self.rows[place]]
            with np.errstate(all="ignore"):  # values that are not finite are detected later
                np.copyto(part, format.values(chunk), casting="unsafe")


def read_blocks(weights: Sequence[GGUFWeight], rows: np.ndarray) -> BlockValues:
    """Return rows of matrices that are stacked vertically and whose types have the same blocks."""
    if len(weights) == 1:
        return weights[0].read_blocks(rows)
    ends = np.cumsum([weight.shape[0] for weight in weights])
    source = np.searchsorted(ends, rows, side="right")
    starts = ends - [weight.shape[0] for weight in weights]
    found = [
        weights[number].read_blocks(rows[source == number] - starts[number])
        for number in np.unique(source)
    ]
    back = np.argsort(np.argsort(source, kind="stable"), kind="stable")
    return joined(found).each(lambda array: array[back])


def open_gguf(file: Path) -> dict[str, GGUFWeight]:
    """Return the weights of a file by Hugging Face's names.

    Raises:
      CheckpointError: the file is broken.
      UnsupportedModelError: a tensor belongs to no supported model.
    """
    return weights_of(read_gguf(file))


def weights_of(gguf: GGUFFile) -> dict[str, GGUFWeight]:
    """Return the weights of a header as `open_gguf` does."""
    metadata = gguf.view
    arch = metadata.string("general.architecture")
    heads = _paired_heads(metadata, arch)
    layers = _num_layers(metadata, arch)
    weights: dict[str, GGUFWeight] = {}
    for name, stored in gguf.tensors.items():
        if _is_unused(name, layers):
            continue
        fused = _experts_name(name, arch)
        if fused is None:
            found = _weight(gguf, arch, stored, heads)
            weights[found.name] = found
            continue
        count = metadata.integer(f"{arch}.expert_count", 0, high=MAX_EXPERTS)
        if len(stored.shape) != 3 or stored.shape[0] != count:
            raise CheckpointError(
                f"{gguf.file}: the tensor {short_repr(name)} must have a matrix for each of "
                f"{count} experts, got shape {stored.shape}"
            )
        for expert in range(count):
            theirs = fused.format(expert)
            weights[theirs] = GGUFWeight(theirs, stored.part(expert))
    return weights


def _weight(gguf: GGUFFile, arch: str, stored: GGUFTensor, heads: Mapping[str, int]) -> GGUFWeight:
    """Return the weight of a tensor that holds only one.

    Args:
      gguf: the header.
      arch: the architecture.
      stored: the tensor.
      heads: the number of heads of each part whose rows are stored in pairs.
    """
    name = stored.name
    theirs = _name(name, arch)
    if theirs is None:
        raise UnsupportedModelError(
            f"{gguf.file}: the tensor {short_repr(name)} is not part of any supported model "
            f"of architecture {short_repr(arch)}"
        )
    paired = heads.get(name.split(".")[-2], 0)
    if paired and stored.shape[0] % (2 * paired):
        raise CheckpointError(
            f"{gguf.file}: the tensor {short_repr(name)} has {stored.shape[0]} rows, which "
            f"cannot be split into pairs in {paired} heads"
        )
    offset = 1.0 if arch.startswith("gemma") and theirs.endswith("norm.weight") else 0.0
    if offset and len(stored.shape) != 1:
        raise CheckpointError(f"{gguf.file}: the tensor {short_repr(name)} is not a vector")
    if len(stored.shape) == 1 and any(part in theirs for part in _ONE_ROW):
        stored = replace(stored, shape=(1, *stored.shape))
    stacked = 0
    if arch == "gptneox" and ".attn_qkv." in name:
        stacked = _stacked_heads(gguf, name, stored)
    return GGUFWeight(theirs, stored, paired, stacked, offset)


def _paired_heads(metadata: Metadata, arch: str) -> dict[str, int]:
    """Return the number of heads of the parts whose rows are stored in pairs."""
    if arch not in _PAIRED_ROWS:
        return {}
    heads = metadata.integer(f"{arch}.attention.head_count", low=1)
    kv_heads = metadata.integer(f"{arch}.attention.head_count_kv", heads, low=1)
    return {"attn_q": heads, "attn_k": kv_heads}


def _num_layers(metadata: Metadata, arch: str) -> int | None:
    """Return the number of layers if the file also has layers for multi-token prediction."""
    unused = metadata.integer(f"{arch}.nextn_predict_layers", 0)
    return metadata.integer(f"{arch}.block_count", low=unused) - unused if unused else None


def _is_unused(name: str, layers: int | None) -> bool:
    """Return True for a tensor that no layer has: `layers` or more are not computed."""
    if name in _NO_WEIGHTS or name.endswith("attn_rot_embd.weight"):
        return True
    match name.split("."):
        case ["blk", str(layer), *_] if _is_number(layer):
            return layers is not None and int(layer) >= layers
    return False


def _stacked_heads(gguf: GGUFFile, name: str, stored: GGUFTensor) -> int:
    """Return the number of heads of a tensor with stacked queries, keys and values."""
    heads = gguf.view.integer("gptneox.attention.head_count", low=1)
    if stored.shape[0] % (3 * heads):
        raise CheckpointError(
            f"{gguf.file}: the tensor {short_repr(name)} has {stored.shape[0]} rows, which cannot "
            f"be split into queries, keys and values of {heads} heads"
        )
    return heads


def _name(name: str, arch: str) -> str | None:
    """Return Hugging Face's name of a tensor, or None if it is unknown."""
    own = _OWN_NAMES.get(arch, {})
    match name.split("."):
        case ["blk", str(layer), "exp_probs_b", "bias"] if _is_number(layer):
            found = _CORRECTIONS.get(arch)
            return None if found is None else f"model.layers.{layer}.{found}"
        case ["blk", str(layer), str(part), "weight" | "bias" as kind] if _is_number(layer):
            if part == "ffn_gate_inp" and arch in _EXPERTS and kind == "weight":
                return f"model.layers.{layer}.{_EXPERTS[arch][0]}.gate.weight"
            found = (_LINEAR | _NORMS | own).get(part)
            if found is None or (kind == "bias" and part not in _LINEAR | _biased_norms(arch)):
                return None
            return f"{_LAYERS.get(arch, 'model.layers')}.{layer}.{found}.{kind}"
        case ["output_norm", "bias"] if arch in _NORM_BIASES:
            return f"{own.get('output_norm', 'model.norm')}.bias"
        case [str(part), "weight"] if part in _OUTSIDE_PARTS and part in own:
            return f"{own[part]}.weight"
        case ["output", "bias"] if arch == "phi2":
            return "lm_head.bias"
    return _OUTSIDE.get(name)


def _biased_norms(arch: str) -> dict[str, str]:
    return _NORMS if arch in _NORM_BIASES else {}


def _experts_name(name: str, arch: str) -> str | None:
    """Return Hugging Face's name of a matrix of a layer's experts, with {} for the expert."""
    where, matrices = _EXPERTS.get(arch, ("", {}))
    match name.split("."):
        case ["blk", str(layer), str(part), "weight"] if part.endswith("_exps"):
            found = matrices.get(part.removesuffix("_exps"))
            if found is not None and _is_number(layer):
                return f"model.layers.{layer}.{where}.experts.{{}}.{found}.weight"
    return None


def _is_number(layer: str) -> bool:
    """Return True for a number without leading zeros, so that no two names mean the same layer."""
    return layer.isdecimal() and len(layer) < 6 and str(int(layer)) == layer
