"""The model as pure functions, for research: load, step, differentiate and inspect it.

    model = forge_jax.load("forge-tiny")
    kv = forge_jax.new_kv(model, num_blocks=64, block_size=16)
    kv, hidden = forge_jax.forward(model, model.leaves, kv, tokens, positions, slot_mapping, ...)
    scores = forge_jax.logits(model, model.leaves, hidden)

The weights are an argument of each function, so you can jit over them, differentiate with respect
to them, or replace them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from forge_jax.checkpoint.converted import read_record
from forge_jax.checkpoint.gguf import is_gguf
from forge_jax.checkpoint.hub import resolve
from forge_jax.checkpoint.load import load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.config import GGUFWeights, python_names
from forge_jax.errors import ModelError
from forge_jax.models import KV, Leaves, Model, ModelSpec, build_model
from forge_jax.models.kv import EIGHT_BITS, first_paged
from forge_jax.models.registry import decoded
from forge_jax.step.kv_cache import kv_shape
from forge_jax.weights.formats import WeightFormats, fused_values
from forge_kernels import cpu
from forge_kernels.attention import Implementation
from forge_kernels.embed import embed


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model, its weights, and the folder or GGUF file they were read from."""

    model: Model
    leaves: Leaves
    folder: Path

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def leaf(self, name: str) -> jax.Array:
        """Return a weight by its name in `model.names`, e.g. "layers.0.attention.qkv.weight"."""
        return self.leaves[self.model.names.index(name)]


@python_names()
def load(
    model: str,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    gguf_weights: GGUFWeights = "packed",
    progress: bool = True,
) -> LoadedModel:
    """Read a model and its weights.

    Args:
      model: "forge-tiny", a folder, a .gguf file, or a Hugging Face id. The leaves of a converted
        folder keep the layout they were written in, which may be packed for the CPU kernels.
      dtype: data type of weights and activations: "auto" (the checkpoint's), "bfloat16",
        "float16" or "float32".
      revision: branch, tag or commit of a Hugging Face id.
      gguf_weights: how to store the matrices of a GGUF file. "packed" and "packed-exact" keep
        their blocks. They differ only for a converted folder that is packed for the CPU kernels:
        there, "packed" rounds activations to int8. "decoded" converts the matrices to floats,
        which gradients require.
      progress: show a progress bar on a terminal.

    Raises:
      ModelError: if the model does not exist, is not supported, or its checkpoint is corrupt.
    """
    folder = resolve(model, revision)
    record = read_record(folder)
    formats = WeightFormats(
        ggml_activations="int8" if gguf_weights == "packed" else None,
        fused=fused_values(jax.devices()[0]),  # pyright: ignore[reportUnknownMemberType]
    )
    if record is not None:
        record.check_options(dtype=dtype)
        formats = dataclasses.replace(formats, rounded=record.rounded, **dict(record.formats))
        if record.packed and not (jax.default_backend() == "cpu" and cpu.available()):
            raise ModelError(
                f"{folder} is packed for the C++ CPU kernels, which are not available here: "
                "convert the original model with --kernels xla"
            )
    spec = read_spec(folder)
    if gguf_weights == "decoded" and spec.ggml_types is not None:
        if not is_gguf(folder):
            raise ModelError(
                f"gguf_weights: {folder} was converted with its matrices in GGUF blocks: load the "
                "original model"
            )
        spec = decoded(spec)
    built = build_model(spec, dtype, formats)
    return LoadedModel(built, load_weights(built, folder, progress=progress), folder)


def new_kv(
    model: LoadedModel | Model,
    num_blocks: int,
    block_size: int,
    dtype: Any = None,
    *,
    num_slots: int = 1,
) -> KV:
    """Return an empty KV cache: one array [num_blocks, 2, K, block_size, D] per layer.

    Layers may differ in K and D. A layer with per-sequence state has a dict of arrays
    [num_slots + 1, ...] instead, and a layer that shares another layer's cache has `()`.

    Args:
      model: the model, which defines the number of layers, K (key/value heads) and D (head size).
      num_blocks: blocks per layer.
      block_size: tokens per block.
      dtype: float32, the model's dtype (default), "fp8" or "int8". On CPU, 16-bit types are stored
        as their bits in uint16 arrays. An 8-bit cache is one `QuantizedKV` per layer: the elements,
        and one scale per token and head.
      num_slots: the most sequences of a call, for models whose layers have state.

    Raises:
      ValueError: if the dtype is not one of these.
    """
    built = model.model if isinstance(model, LoadedModel) else model
    dtype = jnp.dtype(EIGHT_BITS.get(dtype, dtype or built.dtype))
    if dtype not in (built.dtype, jnp.float32, *EIGHT_BITS.values()):
        raise ValueError(
            f"the KV cache of a {built.dtype} model must be {built.dtype}, float32, "
            f"{' or '.join(EIGHT_BITS)}, got {dtype}"
        )
    return kv_shape(
        built.spec,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=dtype,
        platform=jax.default_backend(),
        num_slots=num_slots,
    ).empty()


def forward(model: LoadedModel | Model, leaves: Leaves, kv: KV, *args: Any, **kwargs: Any) -> Any:
    """Run one step of the model and return (kv, hidden).

    Rows of several sequences are concatenated. A decode and a prompt chunk differ only in
    `cu_q_lens`.

    Args:
      model: the model, as `load` returns it.
      leaves: the weights, for example `LoadedModel.leaves`.
      kv: the KV cache, as `new_kv` returns it.
      args: tokens i32[T], positions i32[T], slot_mapping i32[T], block_tables i32[S, max_blocks],
        kv_lens i32[S], cu_q_lens i32[S + 1] and num_seqs i32[].
      kwargs: options such as `implementation` and `return_hidden_states`.

    Returns:
      (kv, hidden): hidden is dtype[T, d] after the final norm.
    """
    built = model.model if isinstance(model, LoadedModel) else model
    return built.forward(leaves, kv, *args, **kwargs)


def logits(model: LoadedModel | Model, leaves: Leaves, hidden: jax.Array) -> jax.Array:
    """Return logits f32[B, V] for hidden states dtype[B, d] after the final norm."""
    built = model.model if isinstance(model, LoadedModel) else model
    return built.logits(leaves, hidden)


def decode_step(
    model: LoadedModel | Model,
    leaves: Leaves,
    kv: KV,
    tokens: jax.Array,
    cu_q_lens: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    *,
    implementation: Implementation = "auto",
) -> tuple[KV, jax.Array, jax.Array]:
    """Run one greedy step of S sequences and return each one's next token.

    A sequence's new tokens may be one token (decode), a whole prompt, or a chunk of one. Positions
    and cache slots follow from the lengths. Pure and jittable: `jax.jit(partial(decode_step,
    model))`.

    Args:
      model: the architecture. Its own weights are ignored in favor of `leaves`.
      leaves: the weights, for example `LoadedModel.leaves`.
      kv: the KV cache, as `new_kv` returns it.
      tokens: i32[T], the sequences' new tokens, concatenated. T may exceed their number (padding).
      cu_q_lens: i32[S + 1], the offset of each sequence's first token. The last entry is at most T.
      kv_lens: i32[S], tokens of each sequence, including the new ones.
      block_tables: i32[S, max_blocks], the KV cache blocks of each sequence, enough for `kv_lens`.
      implementation: the attention kernel; "auto" selects one for the platform.

    Returns:
      (kv, next tokens i32[S], logits f32[S, V] of each sequence's last token).
    """
    rows, seqs = tokens.shape[0], kv_lens.shape[0]
    blocks, _, _, block_size, _ = first_paged(kv).shape
    row = jnp.arange(rows)  # pyright: ignore[reportUnknownMemberType]
    seq = jnp.minimum(jnp.sum(cu_q_lens[None, 1:] <= row[:, None], axis=1), seqs - 1)
    positions = kv_lens[seq] - cu_q_lens[seq + 1] + row
    slots = block_tables[seq, positions // block_size] * block_size + positions % block_size
    exists = row < cu_q_lens[-1]
    kv, hidden = forward(
        model,
        leaves,
        kv,
        tokens,
        jnp.where(exists, positions, 0),
        jnp.where(exists, slots, blocks * block_size),
        block_tables,
        kv_lens,
        cu_q_lens,
        jnp.int32(seqs),
        implementation=implementation,
    )
    scores = logits(model, leaves, embed(hidden, cu_q_lens[1:] - 1))
    return kv, jnp.argmax(scores, axis=-1).astype(jnp.int32), scores
