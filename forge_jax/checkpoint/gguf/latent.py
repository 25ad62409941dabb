"""Multi-head latent attention in GGUF files: the matrix that turns latents into keys and values.

Older files contain the whole matrix. Newer files contain two matrices per head: the transpose of
the rows for keys, and the rows for values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forge_jax.checkpoint.gguf.names import is_number
from forge_jax.checkpoint.gguf.reader import GGUFFile, GGUFTensor
from forge_jax.errors import CheckpointError
from forge_jax.host.files import short_repr
from forge_jax.weights.stored import TensorSource

ARCH = "deepseek2"
BOTH = "kv_b_proj.weight"  # the end of Hugging Face's name
_PARTS = ("attn_k_b", "attn_v_b")


def is_part(name: str) -> bool:
    """Return True for the keys' or the values' part of the matrix."""
    match name.split("."):
        case ["blk", str(layer), str(part), "weight"]:
            return part in _PARTS and is_number(layer)
    return False


def joined_weights(gguf: GGUFFile) -> dict[str, TensorSource]:
    """Return the whole matrices of the layers that have them in parts.

    Raises:
      CheckpointError: a part is missing or has the wrong shape.
    """
    found: dict[str, TensorSource] = {}
    for layer in dict.fromkeys(name.split(".")[1] for name in gguf.tensors if is_part(name)):
        names = [f"blk.{layer}.{part}.weight" for part in _PARTS]
        if f"blk.{layer}.attn_kv_b.weight" in gguf.tensors:
            continue
        for name in names:
            if name not in gguf.tensors:
                raise CheckpointError(f"{gguf.file}: the tensor {name} is missing")
        keys, values = (gguf.tensors[name] for name in names)
        heads = gguf.view.integer(f"{ARCH}.attention.head_count", low=1)
        for tensor in (keys, values):
            if len(tensor.shape) != 3 or tensor.shape[0] != heads:
                raise CheckpointError(
                    f"{gguf.file}: the tensor {short_repr(tensor.name)} must have a matrix for "
                    f"each of {heads} heads, got shape {tensor.shape}"
                )
        if keys.shape[1] != values.shape[2]:
            raise CheckpointError(
                f"{gguf.file}: the tensors {short_repr(keys.name)} and {short_repr(values.name)} "
                f"have different latents, {keys.shape[1]} and {values.shape[2]} wide"
            )
        found[f"model.layers.{layer}.self_attn.{BOTH}"] = _Joined(keys, values)
    return found


@dataclass(frozen=True, eq=False)
class _Joined:
    """The rows of all heads, [H (K + V), L]: in each head, those of keys come first.

    Attributes:
      keys: [H, L, K].
      values: [H, V, L].
    """

    keys: GGUFTensor
    values: GGUFTensor
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        heads, latent, plain = self.keys.shape
        return heads * (plain + self.values.shape[1]), latent

    def read_rows(self, out: np.ndarray, first: int) -> None:
        size = self.shape[0] // self.keys.shape[0]
        end = first + len(out)
        for head in range(first // size, -(-end // size)):
            both = [self.keys.part(head).read().T, self.values.part(head).read()]
            begin = max(first, head * size)
            some = np.concatenate(both)[begin - head * size : end - head * size]
            np.copyto(out[begin - first :][: len(some)], some, casting="unsafe")
