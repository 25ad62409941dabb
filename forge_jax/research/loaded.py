"""`LoadedModel`: a model with its weights, as one callable pytree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from forge_jax.checkpoint.converted import read_record
from forge_jax.checkpoint.gguf import is_gguf
from forge_jax.checkpoint.hub import resolve
from forge_jax.checkpoint.load import load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.config import GGUFWeights, python_names
from forge_jax.errors import ModelError
from forge_jax.models import DecoderModule, Leaves, Model, ModelSpec, build_model
from forge_jax.models.probe import Edit, Probe, edit_functions, sorted_names, tap_patterns
from forge_jax.models.registry import decoded
from forge_jax.models.summary import summarize
from forge_jax.research.dense import dense_call, dense_logits
from forge_jax.research.inputs import (
    check_dense,
    check_ids,
    check_rows,
    floats,
    integers,
    require_leaves,
)
from forge_jax.weights.formats import WeightFormats, fused_values
from forge_kernels import cpu

TokenIds = ArrayLike | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False, repr=False)
class LoadedModel:
    """A model, its weights, and the folder or GGUF file they were read from.

    It is a pytree whose leaves are the weights. Pass it to a function that is compiled or
    differentiated: `jax.jit(lambda model, ids: model(ids))`.

    Letters: B sequences, T tokens, d hidden size, V vocabulary.
    """

    model: Model
    leaves: Leaves
    folder: Path

    @property
    def spec(self) -> ModelSpec:
        """The sizes and options of the architecture."""
        return self.model.spec

    def leaf(self, name: str) -> jax.Array:
        """Return a weight by its name in `model.names`, e.g. "layers.0.attention.qkv.weight"."""
        return self.leaves[self.model.names.index(name)]

    def __repr__(self) -> str:
        title = f"LoadedModel[{self.spec.architecture}, {self.model.dtype}, {self.folder.name}]"
        return summarize(title, self.spec, self.model.names, self.model.leaves)

    @overload
    def __call__(
        self,
        token_ids: TokenIds | None = None,
        *,
        inputs_embeds: ArrayLike | None = None,
        lengths: ArrayLike | Sequence[int] | None = None,
        leaves: Leaves | None = None,
        taps: None = None,
        edit: Mapping[str, Edit] | None = None,
        checks: bool = False,
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        token_ids: TokenIds | None = None,
        *,
        inputs_embeds: ArrayLike | None = None,
        lengths: ArrayLike | Sequence[int] | None = None,
        leaves: Leaves | None = None,
        taps: Sequence[str],
        edit: Mapping[str, Edit] | None = None,
        checks: bool = False,
    ) -> tuple[jax.Array, dict[str, jax.Array]]: ...

    def __call__(
        self,
        token_ids: TokenIds | None = None,
        *,
        inputs_embeds: ArrayLike | None = None,
        lengths: ArrayLike | Sequence[int] | None = None,
        leaves: Leaves | None = None,
        taps: Sequence[str] | None = None,
        edit: Mapping[str, Edit] | None = None,
        checks: bool = False,
    ) -> jax.Array | tuple[jax.Array, dict[str, jax.Array]]:
        """Return the logits of every token, f32[T, V] or f32[B, T, V].

        The call computes whole sequences, can be compiled, and is differentiable with respect to
        the weights and `inputs_embeds`. Attention and experts are computed in full, which takes
        memory for B * T * T scores per head.

        Args:
          token_ids: i32[T], or a batch i32[B, T]. A list also works.
          inputs_embeds: float[T, d] or float[B, T, d] in place of token ids, as `embed` returns.
          lengths: i32[B], tokens of each sequence of a padded batch. The logits of the padding are
            zero, and its ids are ignored.
          leaves: weights in place of the model's own.
          taps: names of activations to return, or patterns such as "layers.*.mlp.out". See
            `tap_names`.
          edit: functions that replace activations, by name or pattern.
          checks: in a compiled function, check the values of the arguments with
            `jax.experimental.checkify`. Otherwise, only known values are checked.

        Returns:
          The logits. With `taps`, (logits, activations by name). Activations have the axes [T, ...]
          or [B, T, ...]. Patterns of attention are f32[H, T, T] or f32[B, H, T, T], queries first.

        Raises:
          ValueError: an argument is wrong, or a name in `taps` or `edit` does not exist.
        """
        leaves = self.leaves if leaves is None else leaves
        ids = None if token_ids is None else integers("token_ids", token_ids)
        sizes = None if lengths is None else integers("lengths", lengths)
        embeds = None if inputs_embeds is None else floats("inputs_embeds", inputs_embeds)
        require_leaves(self.model, leaves)
        check_dense(self.model, ids, embeds, sizes, checks=checks)
        patterns, functions = tap_patterns(taps), edit_functions(edit)
        logits, taken = dense_call(self.model, leaves, ids, embeds, sizes, patterns, functions)
        if taps is None:
            return logits
        return logits, {name: taken[name] for name in sorted_names(taken)}

    def tap_names(self) -> tuple[str, ...]:
        """Return the names of all activations, for `taps` and `edit`."""
        probe = Probe(full_attention=True, lead=(1, 1))

        def call(leaves: Leaves, ids: jax.Array) -> jax.Array:
            return dense_logits(self.model, leaves, ids, None, probe)

        one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        jax.eval_shape(call, self.model.leaves, one)  # pyright: ignore[reportUnknownMemberType]
        return tuple(sorted_names(probe.reached))

    def embed(
        self, token_ids: TokenIds, *, leaves: Leaves | None = None, checks: bool = False
    ) -> jax.Array:
        """Return the embeddings of token ids i32[...], dtype[..., d], for `inputs_embeds`.

        Raises:
          ValueError: an id is not one of the model's, or the model has no embeddings by token. With
            `checks`, unknown ids are checked as in `__call__`.
        """
        leaves = self.leaves if leaves is None else leaves
        require_leaves(self.model, leaves)
        ids = integers("token_ids", token_ids)
        check_ids(self.model, "token_ids", ids, checks=checks)
        embeddings = self.model.embed(leaves, ids.reshape(-1))
        return embeddings.reshape(*ids.shape, self.spec.hidden_size)

    def unembed(self, resid: ArrayLike, *, leaves: Leaves | None = None) -> jax.Array:
        """Return the logits f32[..., V] of a residual stream dtype[..., d]: final norm and head.

        Raises:
          ValueError: `resid` does not have the hidden size d.
        """
        leaves = self.leaves if leaves is None else leaves
        require_leaves(self.model, leaves)
        stream = floats("resid", resid)
        check_rows(self.model, "resid", stream, ("...",) * max(stream.ndim - 1, 0))
        rows = stream.reshape(-1, self.spec.hidden_size)
        logits = self.model.logits(leaves, self.model.final_norm(leaves, rows))
        return logits.reshape(*stream.shape[:-1], self.spec.vocab_size)

    def with_leaves(self, leaves: Leaves) -> LoadedModel:
        """Return the model with other weights of the same shapes.

        Raises:
          ValueError: the number of leaves or a shape differs.
        """
        require_leaves(self.model, leaves)
        return dataclasses.replace(self, leaves=tuple(leaves))

    def module(self) -> DecoderModule:
        """Return the Flax NNX module with these weights, for `nnx.state`, `split` and `display`.

        The module shares the weights. Replacing a parameter of the module does not change the
        model: see `with_module`.
        """
        return self.model.decoder(self.leaves)

    def with_module(self, module: DecoderModule) -> LoadedModel:
        """Return the model with the weights of a module that `module` returned.

        Raises:
          ValueError: the module has other parameters.
        """
        return self.with_leaves(self.model.leaves_of(module))


jax.tree_util.register_dataclass(
    LoadedModel, data_fields=["leaves"], meta_fields=["model", "folder"]
)


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
        which have gradients.
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
