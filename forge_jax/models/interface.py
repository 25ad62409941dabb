"""The interface between a decoder and the rest of the project.

A family with its own math implements `DecoderModule`. The engine, `forge_jax.research` and the
tools call nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import jax

from forge_jax.models.kv import KV

if TYPE_CHECKING:
    from forge_jax.models.decoder import Ragged
    from forge_jax.models.linear import MatrixBuilder
    from forge_jax.models.lora import LayerLora
    from forge_jax.models.spec import ModelSpec


class DecoderModule(Protocol):
    """A Flax NNX module that computes a model.

    Its parameters are the leaves of the model, by their paths, such as "layers.0.mlp.down.weight".
    The weight map of the architecture must have exactly these leaves. Matrices come from the
    `MatrixBuilder`, under the same names.

    T tokens, L layers, B rows, d hidden size, V vocabulary.
    """

    @property
    def norm(self) -> Callable[[jax.Array], jax.Array]:
        """The final norm, dtype[..., d] to dtype[..., d], for a logit lens."""
        ...

    def hidden(
        self,
        tokens: jax.Array,
        kv: KV,
        ragged: Ragged,
        lora: Callable[[int], LayerLora] | None = None,
    ) -> tuple[KV, jax.Array, tuple[jax.Array, ...]]:
        """Compute one step: write the cache of its tokens, and attend.

        Args:
          tokens: i32[T]; rows from `ragged.num_tokens` on are padding. If `ragged.embeddings()` is
            not None, use its float[T, d] in place of the embeddings of tokens.
          kv: the cache of each layer, by default dtype[N, 2, K, bs, D]. A layer with state has
            its arrays by name, and a layer that shares another's cache has `()`.
          ragged: the positions, blocks and lengths of the step's sequences. For research, pass
            `ragged.in_layer(i)` to layer i, and activations to `ragged.tap`.
          lora: returns a layer's adapters, for `ragged._replace(lora=lora(i))`; None without
            adapters, and if the architecture does not support them.

        Returns:
          (kv, hidden, stream): hidden is dtype[T, d] after the final norm. The residual stream is
          L + 1 arrays dtype[T, d]: the embedding and each layer's output. A row must depend on its
          own sequence only.
        """
        ...

    def logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """Return f32[B, V].

        Args:
          hidden: dtype[B, d] after the final norm.
          num_rows: i32[]; the caller ignores the rows from there on.
        """
        ...


class DecoderFactory(Protocol):
    """A class of decoders, or a function that makes one."""

    def __call__(
        self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, shards: int, /
    ) -> DecoderModule:
        """Return a decoder whose parameters are zeros.

        Args:
          spec: the whole model.
          dtype: type of activations, and of parameters outside matrices.
          matrix: allocates every matrix in the format of the checkpoint or of the kernels.
          shards: the devices that share the model (tensor parallelism); 1 unless the architecture
            supports more.
        """
        ...
