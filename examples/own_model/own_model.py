"""Tandem, a made-up model family with its own forward pass, for forge-jax.

Each layer computes attention and MLP from the same normalized input with one matrix product. The
source is PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 2). A layer also adds the token
embedding, times `embedding_shortcut`. Only this family has this field of `config.json`.

T tokens of the step, d hidden size, H query heads, K key/value heads, D head dim, I inner size of
the MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from forge_jax.models import (
    KV,
    Architecture,
    Decoder,
    HFConfig,
    LayerLora,
    Linear,
    MatrixBuilder,
    ModelSpec,
    PagedKV,
    Ragged,
    Tensor,
    WeightMap,
    attend,
    decoder_spec,
    new_norm,
)


@dataclass(frozen=True, kw_only=True)
class TandemSpec(ModelSpec):
    """The common fields, and one of this family."""

    embedding_shortcut: float


def read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    return decoder_spec(
        config,
        generation,
        "TandemForCausalLM",
        kind=TandemSpec,
        embedding_shortcut=config.number("embedding_shortcut"),
    )


class TandemLayer(nnx.Module):
    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        d, inner, name = spec.hidden_size, spec.intermediate_size, f"layers.{layer}"
        self.head_dim, self.sm_scale = spec.head_dim, spec.sm_scale
        self.qkv_heads = spec.num_attention_heads + 2 * spec.num_key_value_heads
        self.ends = [self.qkv_heads * self.head_dim, self.qkv_heads * self.head_dim + inner]
        heads_dim = spec.num_attention_heads * self.head_dim
        self.norm = new_norm(d, spec, dtype)
        self.mixed = Linear(matrix(f"{name}.mixed.weight", self.ends[1] + inner, d))
        self.attention_out = Linear(matrix(f"{name}.attention_out.weight", d, heads_dim))
        self.mlp_out = Linear(matrix(f"{name}.mlp_out.weight", d, inner))

    def __call__(self, x: jax.Array, kv: PagedKV, ragged: Ragged) -> tuple[PagedKV, jax.Array]:
        """Return (kv, x plus attention and MLP of x). x: dtype[T, d]."""
        rows = ragged.num_rows
        mixed = self.mixed(x, norm=self.norm, num_rows=rows)  # dtype[T, (H + 2 K) D + 2 I]
        qkv, gate, up = jnp.split(mixed, self.ends, axis=-1)
        qkv = qkv.reshape(-1, self.qkv_heads, self.head_dim)
        kv, heads = attend(qkv, kv, ragged, sm_scale=self.sm_scale)
        x = self.attention_out(heads, residual=x, num_rows=rows)
        return kv, self.mlp_out(jax.nn.silu(gate) * up, residual=x, num_rows=rows)


class TandemDecoder(Decoder):
    """Embedding, final norm and head of the common decoder around its own layers."""

    layer = TandemLayer

    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, shards: int = 1):
        super().__init__(spec, dtype, matrix, shards)
        assert isinstance(spec, TandemSpec)
        self.shortcut = spec.embedding_shortcut

    def hidden(
        self,
        tokens: jax.Array,
        kv: KV,
        ragged: Ragged,
        lora: Callable[[int], LayerLora] | None = None,
    ) -> tuple[KV, jax.Array, tuple[jax.Array, ...]]:
        """See `forge_jax.models.DecoderModule`."""
        x = embedded = ragged.tap("embed", self.embed(tokens, ragged))
        stream, new_kv = [x], []
        for i, (layer, layer_kv) in enumerate(zip(self.layers, kv, strict=True)):
            x = x + embedded * jnp.asarray(self.shortcut, x.dtype)
            layer_kv, x = layer(x, layer_kv, ragged.in_layer(i))
            x = ragged.in_layer(i).tap("resid", x)
            new_kv.append(layer_kv)
            stream.append(x)
        return tuple(new_kv), ragged.tap("final_norm", self.norm(x)), tuple(stream)


def weights(spec: ModelSpec) -> WeightMap:
    """Return the checkpoint's tensors of each leaf: the paths of the parameters above."""
    d, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    rows = {"q": spec.num_attention_heads * dim, "k": spec.num_key_value_heads * dim}
    rows |= {"v": rows["k"], "gate": inner, "up": inner}
    embedding = Tensor("embedding.weight", (spec.vocab_size, d))
    found: WeightMap = {"norm.weight": (Tensor("norm.weight", (d,)),), "head.weight": (embedding,)}
    if not spec.tie_word_embeddings:
        found["embedding.weight"] = (embedding,)
        found["head.weight"] = (Tensor("head.weight", (spec.vocab_size, d)),)
    for index in range(spec.num_hidden_layers):
        name = f"layers.{index}"
        found[f"{name}.norm.weight"] = (Tensor(f"{name}.norm.weight", (d,)),)
        found[f"{name}.mixed.weight"] = tuple(
            Tensor(f"{name}.{part}.weight", (size, d)) for part, size in rows.items()
        )
        for part, inputs in (("attention_out", rows["q"]), ("mlp_out", inner)):
            found[f"{name}.{part}.weight"] = (Tensor(f"{name}.{part}.weight", (d, inputs)),)
    return found


ARCHITECTURE = Architecture(
    read_spec=read_spec,
    defaults={
        "head_dim": None,
        "hidden_act": "silu",
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "embedding_shortcut": 0.1,
    },
    nullable=frozenset({"head_dim", "num_key_value_heads"}),
    decoder=TandemDecoder,
    weights=weights,
    lora=False,
    tensor_parallel=False,
)
