"""Decoders with multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

The KV cache has one vector per token and layer, see `forge_kernels.latent_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from forge_jax.models.decoder import Decoder, Ragged, ResidualBlock, new_mlp
from forge_jax.models.kv import LayerLayout, PagedKV, PagedLayout
from forge_jax.models.linear import Linear, MatrixBuilder, RMSNorm, new_bias
from forge_jax.models.spec import ModelSpec
from forge_jax.models.weight_map import ExpertNames, RowsOfHeads, Tensor, WeightMap, decoder_weights
from forge_kernels.latent_attention import (
    latent_attention,
    write_latent_attention,
    write_latents,
)
from forge_kernels.rope import apply_rope

LATENT_NORM_EPS = 1e-6  # norms of latents do not use `rms_norm_eps`


@dataclass(frozen=True, kw_only=True)
class LatentSpec(ModelSpec):
    """A model with multi-head latent attention; `head_dim` is the rotated part of a head.

    Attributes:
      q_lora_rank: the width of the latent of queries; None if queries are computed directly.
      kv_lora_rank: the width of the latent of keys and values.
      qk_nope_head_dim: the part of a query and key that is not rotated.
      v_head_dim: the width of a value.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """The width of a query and key."""
        return self.qk_nope_head_dim + self.head_dim

    @property
    def cached_dim(self) -> int:
        """The numbers per token and layer in the KV cache."""
        return self.kv_lora_rank + self.head_dim

    @property
    def attention_width(self) -> int:
        return self.num_attention_heads * self.cached_dim

    @property
    def head_sizes(self) -> tuple[str, ...]:
        return (
            f"{self.num_attention_heads} heads of {self.qk_head_dim}, whose values have "
            f"{self.v_head_dim}",
            f"latents of {self.kv_lora_rank}",
        )

    def own_sections(self, leaf: str) -> tuple[int, tuple[int, ...]] | None:
        """Return how a leaf is split: by query heads, which have different dims in each leaf."""
        dims = {
            "attention.q.weight": (-2, self.qk_head_dim),
            "attention.key_up": (-2, self.qk_nope_head_dim),
            "attention.value_up": (-2, self.v_head_dim),
            "attention.out.weight": (-1, self.v_head_dim),
        }
        if leaf not in dims:
            return None
        axis, dim = dims[leaf]
        return axis, (self.num_attention_heads * dim,)


class LatentAttention(ResidualBlock):
    """Attention whose keys and values follow from one latent per token."""

    def __init__(self, spec: LatentSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        super().__init__(spec, dtype)
        self.heads, self.sm_scale = spec.num_attention_heads, spec.sm_scale
        self.plain_dim, self.rank = spec.qk_nope_head_dim, spec.kv_lora_rank
        d, q_rank, bias = spec.hidden_size, spec.q_lora_rank, spec.attention_bias
        rows, of_latents = self.heads * spec.qk_head_dim, replace(spec, norm_eps=LATENT_NORM_EPS)
        name = f"layers.{layer}.attention"
        if q_rank is None:
            self.q_a, self.q_a_norm = None, None
            self.q = Linear(matrix(f"{name}.q.weight", rows, d))
        else:
            q_bias = new_bias(q_rank, dtype, exists=bias)
            self.q_a = Linear(matrix(f"{name}.q_a.weight", q_rank, d), q_bias)
            self.q_a_norm = RMSNorm(q_rank, of_latents, dtype)
            self.q = Linear(matrix(f"{name}.q.weight", rows, q_rank))
        self.kv_a = Linear(
            matrix(f"{name}.kv_a.weight", spec.cached_dim, d),
            new_bias(spec.cached_dim, dtype, exists=bias),
        )
        self.kv_norm = RMSNorm(self.rank, of_latents, dtype)
        # Not matrices of `MatrixBuilder`, because each head has its own product.
        self.key_up = nnx.Param(jnp.zeros((self.heads * self.plain_dim, self.rank), dtype))
        self.value_up = nnx.Param(jnp.zeros((self.heads * spec.v_head_dim, self.rank), dtype))
        self.out = Linear(
            matrix(f"{name}.out.weight", d, self.heads * spec.v_head_dim),
            new_bias(d, dtype, exists=spec.output_bias),
        )

    def __call__(self, x: jax.Array, kv: PagedKV, ragged: Ragged) -> tuple[PagedKV, jax.Array]:
        """Return (kv, x plus the attention). x: dtype[T, d]; kv: one layer's."""
        assert isinstance(kv, jax.Array)
        rope, plain = ragged.ropes[0], self.plain_dim
        with jax.named_scope("qkv"):
            q, latents, keys = self._queries_and_latents(x, ragged)
            q, latents = ragged.tap("attn.q", q), ragged.tap("attn.latent", latents)
        with jax.named_scope("rope_write"):
            turned, keys = (
                apply_rope(each, rope.cos, rope.sin, interleaved=rope.interleaved)
                for each in (q[..., plain:], keys[:, None])
            )
            q = jnp.concatenate([q[..., :plain], turned], axis=-1)
            vectors = jnp.concatenate([latents, keys[:, 0]], axis=-1)
        kv, out = self._attend(q, vectors, kv, ragged)
        with jax.named_scope("attention_out"):
            return kv, self.add(x, self.out, out.reshape(len(out), -1), ragged, "o")

    def _attend(
        self, q: jax.Array, vectors: jax.Array, kv: jax.Array, ragged: Ragged
    ) -> tuple[jax.Array, jax.Array]:
        """Write the vectors, and return (kv, the values of the heads [T, H, V])."""
        key_up = self.key_up[...].reshape(self.heads, -1, self.rank)
        value_up = self.value_up[...].reshape(self.heads, -1, self.rank)
        scoring = {
            "sm_scale": self.sm_scale,
            "kv_dtype": ragged.kv_dtype,
            "max_q_len": ragged.max_q_len,
        }
        if (attention := ragged.attention()) is not None:
            kv = write_latents(kv, vectors, ragged.slot_mapping, kv_dtype=ragged.kv_dtype)
            return kv, latent_attention(
                q, kv, key_up, value_up, *ragged.batch, attention=attention, **scoring
            )
        return write_latent_attention(
            q,
            vectors,
            kv,
            key_up,
            value_up,
            ragged.slot_mapping,
            *ragged.batch,
            implementation="reference" if ragged.implementation == "reference" else "auto",
            uniform=ragged.uniform,
            **scoring,
        )

    def _queries_and_latents(
        self, x: jax.Array, ragged: Ragged
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries [T, H, P + E], normalized latents [T, R] and shared keys [T, E]."""
        rows = ragged.num_rows
        if self.q_a is None:
            q = self.q(x, norm=self.norm, num_rows=rows)
        else:
            latents = self.q_a(x, norm=self.norm, num_rows=rows)
            q = self.q(latents, norm=self.q_a_norm, num_rows=rows)
        both = self.kv_a(x, norm=self.norm, num_rows=rows)
        return (
            q.reshape(len(x), self.heads, -1),
            self.kv_norm(both[:, : self.rank]),
            both[:, self.rank :],
        )


class LatentLayer(nnx.Module):
    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        assert isinstance(spec, LatentSpec)
        self.attention = LatentAttention(spec, dtype, matrix, layer)
        self.mlp = new_mlp(spec, dtype, matrix, layer)

    def __call__(self, x: jax.Array, kv: PagedKV, ragged: Ragged) -> tuple[PagedKV, jax.Array]:
        kv, x = self.attention(x, kv, ragged)
        return kv, self.mlp(x, ragged)


class LatentDecoder(Decoder):
    layer = LatentLayer


def latent_cache(spec: ModelSpec) -> tuple[LayerLayout, ...]:
    """Return the layouts of one vector per token and layer: dtype[N, 1, 1, bs, R + E]."""
    assert isinstance(spec, LatentSpec)
    return (PagedLayout(planes=1, heads=1, dim=spec.cached_dim),) * spec.num_hidden_layers


def latent_weights(spec: ModelSpec, *, experts: ExpertNames | None = None) -> WeightMap:
    """Return the tensors of a checkpoint with DeepSeek's names.

    In each head's rows of `kv_b_proj`, those of W_UK come before those of W_UV.
    """
    assert isinstance(spec, LatentSpec)
    d, heads, rank = spec.hidden_size, spec.num_attention_heads, spec.kv_lora_rank
    rows, plain, each = heads * spec.qk_head_dim, spec.qk_nope_head_dim, spec.v_head_dim
    both = plain + each
    weights = decoder_weights(spec, experts=experts)
    for layer in range(spec.num_hidden_layers):
        ours, theirs = f"layers.{layer}.attention", f"model.layers.{layer}.self_attn"
        weights.pop(f"{ours}.qkv.weight")
        weights.pop(f"{ours}.qkv.bias", None)
        up = Tensor(f"{theirs}.kv_b_proj.weight", (heads * both, rank))
        found = {
            "kv_a.weight": Tensor(f"{theirs}.kv_a_proj_with_mqa.weight", (spec.cached_dim, d)),
            "kv_norm.weight": Tensor(f"{theirs}.kv_a_layernorm.weight", (rank,)),
            "key_up": replace(up, of_heads=RowsOfHeads(both, 0, plain)),
            "value_up": replace(up, of_heads=RowsOfHeads(both, plain, both)),
            "out.weight": Tensor(f"{theirs}.o_proj.weight", (d, heads * each)),
        }
        if spec.attention_bias:
            found["kv_a.bias"] = Tensor(f"{theirs}.kv_a_proj_with_mqa.bias", (spec.cached_dim,))
        if (q_rank := spec.q_lora_rank) is None:
            found["q.weight"] = Tensor(f"{theirs}.q_proj.weight", (rows, d))
        else:
            found["q_a.weight"] = Tensor(f"{theirs}.q_a_proj.weight", (q_rank, d))
            found["q_a_norm.weight"] = Tensor(f"{theirs}.q_a_layernorm.weight", (q_rank,))
            found["q.weight"] = Tensor(f"{theirs}.q_b_proj.weight", (rows, q_rank))
            if spec.attention_bias:
                found["q_a.bias"] = Tensor(f"{theirs}.q_a_proj.bias", (q_rank,))
        weights |= {f"{ours}.{name}": (tensor,) for name, tensor in found.items()}
    return weights
