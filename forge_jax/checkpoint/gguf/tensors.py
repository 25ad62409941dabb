"""The tensors of a GGUF file, in Hugging Face's names and layout.

llama.cpp's converter (`convert_hf_to_gguf.py`) changes the names and seven other things, which this
module reverses:

- In `PAIRED_ROWS`, it reorders the rows of queries and keys so that the two numbers of a
  rotated pair are neighbors. Hugging Face has the first numbers of all pairs, then the second.
- In GPT-NeoX, it stacks queries, keys and values. Hugging Face has them together for each head.
- It stores the whole factor of norms in Gemma 1 to 3. Hugging Face stores the difference from 1.
- It fuses the matrices of a layer's experts into one tensor. Here each matrix is a weight, except
  for MXFP4 experts of gpt-oss (`forge_jax.checkpoint.gguf.gpt_oss`).
- In DeepSeek's models, it splits the matrix for keys and values
  (`forge_jax.checkpoint.gguf.latent`).
- In Qwen3-Next and Qwen 3.5, it reorders gated DeltaNet (`forge_jax.checkpoint.gguf.delta_net`).
- In Granite 4, it changes vectors of Mamba-2 (`forge_jax.checkpoint.gguf.mamba`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from forge_jax.checkpoint.gguf import delta_net, gpt_oss, latent, mamba
from forge_jax.checkpoint.gguf.metadata import Metadata
from forge_jax.checkpoint.gguf.names import (
    MAX_EXPERTS,
    MAX_LAYERS,
    NO_WEIGHTS,
    ONE_ROW,
    PAIRED_ROWS,
    SHIFTED_NORMS,
    experts_name,
    hf_name,
    is_number,
)
from forge_jax.checkpoint.gguf.reader import GGUFFile, GGUFTensor
from forge_jax.checkpoint.gguf.split import read_gguf
from forge_jax.checkpoint.gguf.weights import GGUFWeight
from forge_jax.errors import CheckpointError, UnsupportedModelError
from forge_jax.host.files import short_repr
from forge_jax.weights.stored import TensorSource


def open_gguf(file: Path) -> dict[str, TensorSource]:
    """Return the weights of a file by Hugging Face's names.

    Raises:
      CheckpointError: the file is broken.
      UnsupportedModelError: a tensor belongs to no supported model.
    """
    return weights_of(read_gguf(file))


def weights_of(gguf: GGUFFile) -> dict[str, TensorSource]:
    """Return the weights of a header as `open_gguf` does."""
    metadata = gguf.view
    arch = metadata.string("general.architecture")
    heads = _paired_heads(metadata, arch)
    layers = _num_layers(metadata, arch)
    weights: dict[str, TensorSource] = {}
    is_read: Callable[[str], bool] = {}.__contains__
    if arch == gpt_oss.ARCH:
        weights, is_read = gpt_oss.expert_weights(gguf), gpt_oss.is_expert
    elif arch == latent.ARCH:
        weights, is_read = latent.joined_weights(gguf), latent.is_part
    elif arch in delta_net.ARCHES:
        weights, is_read = delta_net.layer_weights(gguf, arch), delta_net.is_part
    elif arch == mamba.ARCH:
        weights, is_read = mamba.layer_weights(gguf), mamba.is_part
    for name, stored in gguf.tensors.items():
        if _is_unused(name, layers) or is_read(name):
            continue
        fused = experts_name(name, arch)
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
    theirs = hf_name(name, arch)
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
    offset = 1.0 if arch in SHIFTED_NORMS and theirs.endswith("norm.weight") else 0.0
    if offset and len(stored.shape) != 1:
        raise CheckpointError(f"{gguf.file}: the tensor {short_repr(name)} is not a vector")
    if len(stored.shape) == 1 and any(part in theirs for part in ONE_ROW):
        stored = replace(stored, shape=(1, *stored.shape))
    stacked = 0
    if arch == "gptneox" and ".attn_qkv." in name:
        stacked = _stacked_heads(gguf, name, stored)
    return GGUFWeight(theirs, stored, paired, stacked, offset)


def _paired_heads(metadata: Metadata, arch: str) -> dict[str, int]:
    """Return the number of heads of the parts whose rows are stored in pairs."""
    if arch not in PAIRED_ROWS:
        return {}
    heads = metadata.integer(f"{arch}.attention.head_count", low=1)
    if arch == mamba.ARCH:
        kv_heads, _ = mamba.kv_heads(metadata, _num_layers(metadata, arch))
    else:
        kv_heads = metadata.integer(f"{arch}.attention.head_count_kv", heads, low=1)
    return {"attn_q": heads, "attn_k": kv_heads}


def _num_layers(metadata: Metadata, arch: str) -> int:
    """Return the number of layers, without those for multi-token prediction."""
    unused = metadata.integer(f"{arch}.nextn_predict_layers", 0)
    return metadata.integer(f"{arch}.block_count", low=unused, high=MAX_LAYERS) - unused


def _is_unused(name: str, layers: int) -> bool:
    """Return True for a tensor that no layer has: `layers` or more are not computed."""
    if name in NO_WEIGHTS or name.endswith("attn_rot_embd.weight"):
        return True
    match name.split("."):
        case ["blk", str(layer), *_] if is_number(layer):
            return int(layer) >= layers
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
