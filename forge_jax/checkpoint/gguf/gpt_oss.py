"""The experts of gpt-oss in GGUF files, in the layout of OpenAI's checkpoint.

Files have the gate and up projections of a layer's experts in two tensors. In OpenAI's layout,
their rows alternate. MXFP4 experts keep their values and scales: two tensors for each matrix, with
two values per byte. Experts of other types are one matrix each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge_jax.checkpoint.gguf.names import MAX_EXPERTS, is_number
from forge_jax.checkpoint.gguf.reader import GGUFFile, GGUFTensor
from forge_jax.checkpoint.gguf.weights import GGUFWeight
from forge_jax.errors import CheckpointError, UnsupportedModelError
from forge_jax.host.files import short_repr
from forge_jax.weights.stored import TensorSource

ARCH = "gpt-oss"
SWIGLU_LIMIT = 7.0  # hard-coded in llama.cpp
_GROUP = 32  # values per scale
_PARTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def is_expert(name: str) -> bool:
    """Return True for a tensor with the matrices or biases of a layer's experts."""
    match name.split("."):
        case ["blk", str(layer), str(part), "weight" | "bias"]:
            return part in _PARTS and is_number(layer)
    return False


def expert_weights(gguf: GGUFFile) -> dict[str, TensorSource]:
    """Return the weights of all experts by name.

    Raises:
      CheckpointError: a tensor is missing or has the wrong shape.
      UnsupportedModelError: the gates and ups of a layer have different types.
    """
    return {name: weight for layer in _layers(gguf) for name, weight in layer.weights()}


def quantization(gguf: GGUFFile) -> dict[str, Any] | None:
    """Return the `quantization_config` for MXFP4 experts; None if no layer has them."""
    layers = _layers(gguf)
    if not any(layer.is_mxfp4 for layer in layers):
        return None
    others = [layer.module for layer in layers if not layer.is_mxfp4]
    return {"quant_method": "mxfp4", "modules_to_not_convert": others}


@dataclass(frozen=True, eq=False)
class _Layer:
    """The tensors of a layer's experts.

    Attributes:
      module: Hugging Face's name of the experts.
      weight: the gates, ups and downs, [E, rows, columns].
      bias: the same, [E, rows].
    """

    module: str
    weight: tuple[GGUFTensor, GGUFTensor, GGUFTensor]
    bias: tuple[GGUFTensor, GGUFTensor, GGUFTensor]

    @property
    def is_mxfp4(self) -> bool:
        return all(tensor.format.name == "MXFP4" for tensor in self.weight)

    def weights(self) -> Iterator[tuple[str, TensorSource]]:
        matrices = {"gate_up_proj": slice(0, 2), "down_proj": slice(2, 3)}
        for name, place in matrices.items():
            found = f"{self.module}.{name}"
            yield f"{found}_bias", _Biases(self.bias[place])
            if self.is_mxfp4:
                yield f"{found}_blocks", _MXFP4Values(self.weight[place])
                yield f"{found}_scales", _MXFP4Scales(self.weight[place])
                continue
            for expert in range(self.weight[0].shape[0]):
                first, *others = (tensor.part(expert) for tensor in self.weight[place])
                own = f"{self.module}.{expert}.{name}.weight"
                yield own, GGUFWeight(own, first, other=others[0] if others else None)


def _layers(gguf: GGUFFile) -> list[_Layer]:
    numbers = dict.fromkeys(name.split(".")[1] for name in gguf.tensors if is_expert(name))
    return [_layer(gguf, number) for number in numbers]


def _layer(gguf: GGUFFile, number: str) -> _Layer:
    count = gguf.view.integer(f"{ARCH}.expert_count", low=1, high=MAX_EXPERTS)

    def read(kind: str, axes: int) -> tuple[GGUFTensor, GGUFTensor, GGUFTensor]:
        gate, up, down = (_tensor(gguf, f"blk.{number}.{part}.{kind}") for part in _PARTS)
        for tensor in (gate, up, down):
            if len(tensor.shape) != axes or tensor.shape[0] != count:
                raise CheckpointError(
                    f"{gguf.file}: the tensor {short_repr(tensor.name)} must have {axes} axes, the "
                    f"first for {count} experts, got shape {tensor.shape}"
                )
        if gate.shape != up.shape:
            raise CheckpointError(
                f"{gguf.file}: the tensors {short_repr(gate.name)} and {short_repr(up.name)} must "
                f"have the same shape, got {gate.shape} and {up.shape}"
            )
        return gate, up, down

    weight = read("weight", 3)
    gate, up, _ = weight
    if gate.format != up.format:
        raise UnsupportedModelError(
            f"{gguf.file}: the tensors {short_repr(gate.name)} ({gate.format.name}) and "
            f"{short_repr(up.name)} ({up.format.name}) have different types, which is not "
            "supported for gpt-oss: quantize both to the same type"
        )
    return _Layer(f"model.layers.{number}.mlp.experts", weight, read("bias", 2))


def _tensor(gguf: GGUFFile, name: str) -> GGUFTensor:
    found = gguf.tensors.get(name)
    if found is None:
        raise CheckpointError(f"{gguf.file}: the tensor {name} is missing")
    return found


def _alternating(parts: list[np.ndarray]) -> np.ndarray:
    """Return [N, ...] of one part, or [2 N, ...] whose rows alternate between two."""
    return np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])


@dataclass(frozen=True, eq=False)
class _Biases:
    """The biases of all experts, [E, rows]."""

    parts: tuple[GGUFTensor, ...]
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        count, rows = self.parts[0].shape
        return count, len(self.parts) * rows

    def read_rows(self, out: np.ndarray, first: int) -> None:
        for place, part in enumerate(self.parts):
            some = part.read()[first : first + len(out)]
            np.copyto(out[:, place :: len(self.parts)], some, casting="unsafe")


@dataclass(frozen=True, eq=False)
class _MXFP4:
    """The MXFP4 matrices of all experts. Only whole matrices can be read."""

    parts: tuple[GGUFTensor, ...]
    dtype = np.dtype(np.uint8)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        count, rows, columns = self.parts[0].shape
        return count, len(self.parts) * rows, columns // _GROUP

    def blocks(self, expert: int) -> np.ndarray:
        """Return the blocks of one expert, u8[rows, groups, bytes of a block]."""
        return _alternating([part.part(expert).blocks() for part in self.parts])


class _MXFP4Scales(_MXFP4):
    """The exponents of the groups, u8[E, rows, groups]."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.scales_shape

    def read_rows(self, out: np.ndarray, first: int) -> None:
        _, rows, groups = self.shape
        assert first % rows == 0 and out.shape == (rows, groups), (first, out.shape)
        out[...] = self.blocks(first // rows)[..., 0]


class _MXFP4Values(_MXFP4):
    """The values, u8[E, rows, groups, 16], with neighbors in a byte.

    A file has the first half of a group in the low bits of its bytes, the second in the high bits.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.scales_shape, _GROUP // 2)

    def read_rows(self, out: np.ndarray, first: int) -> None:
        _, rows, groups, width = self.shape
        size = rows * groups
        assert first % size == 0 and out.shape == (size, width), (first, out.shape)
        packed = self.blocks(first // size)[..., 1:].reshape(size, width)
        values = np.concatenate([packed & 0x0F, packed >> 4], axis=-1)
        out[...] = values[:, ::2] | (values[:, 1::2] << 4)
