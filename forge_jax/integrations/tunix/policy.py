"""`ForgePolicy`: the served model as a module that Tunix trains."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from forge_jax.errors import ModelError
from forge_jax.llm import LLM
from forge_jax.models import Leaves
from forge_jax.scoring import served_logits


class ForgePolicy(nnx.Module):
    """A model for `RLCluster(actor=...)` or `reference=...`, with the bits of the rollouts.

    Its parameters are copies of the engine's weights, by the names of `LLM.model.names`. Calls run
    the engine's operations in the engine's shapes. Gradients are those of `forge_jax.score`.

    Args:
      llm: an engine with `deterministic=True` and plain float weights, such as `dtype="float32"`.

    Raises:
      ModelError: the engine is not deterministic, or its weights have no gradients.
    """

    def __init__(self, llm: LLM):
        model = llm.model
        self._options = llm.score_options
        if model.shards > 1:
            raise ModelError("ForgePolicy requires a model on one device: use tensor_parallel=1")
        if model.formats or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in llm.leaves):
            raise ModelError(
                f"ForgePolicy requires plain float weights, but some are {sorted(model.formats)}: "
                'use dtype="float32" or kernels="xla", and gguf_weights="decoded"'
            )
        self._model = model
        copies = map(jnp.copy, llm.leaves)
        # By name, because a trainer's optimizer accepts no parameters that are trees.
        self.weights = nnx.Dict(
            {name: nnx.Param(leaf) for name, leaf in zip(model.names, copies, strict=True)}
        )

    @property
    def leaves(self) -> Leaves:
        """The parameters in the order of `LLM.model.names`."""
        return tuple(self.weights[name][...] for name in self._model.names)

    def __call__(
        self,
        input_tokens: jax.Array,
        positions: jax.Array,
        cache: Any,
        attention_mask: jax.Array | None,
    ) -> tuple[jax.Array, None]:
        """Return the logits f32[B, T, V], and no cache.

        Args:
          input_tokens: i32[B, T], padded on the left, on the right or on both sides.
          positions: ignored, because they follow from the mask.
          cache: None.
          attention_mask: bool[B, T, T], causal, and False for padding.

        Raises:
          ValueError: there is a cache or no mask, or T is more than the engine's context.
        """
        del positions
        if cache is not None:
            raise ValueError("cache: ForgePolicy only computes whole sequences: use ForgeRollout")
        if attention_mask is None:
            raise ValueError(
                "attention_mask: ForgePolicy does not support packed sequences: leave "
                "max_seq_token_per_tpu unset"
            )
        # The engine has no padding on the left, so each sequence moves to the start of its row.
        offset = jnp.argmax(attention_mask[:, -1, :], axis=-1)[:, None]
        place = jnp.arange(input_tokens.shape[1])[None]
        length = input_tokens.shape[1]
        moved = jnp.take_along_axis(input_tokens, (place + offset) % length, axis=1)
        logits = served_logits(self._model, self.leaves, moved, self._options)
        back = ((place - offset) % length)[:, :, None]
        # Other operations must not be fused with the engine's, which would round differently.
        return jax.lax.optimization_barrier(jnp.take_along_axis(logits, back, axis=1)), None
