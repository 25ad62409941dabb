"""Which tensors of a checkpoint make up each leaf of a model, declared per architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_jax.models.spec import ModelSpec


@dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint, and the shape it must have there."""

    name: str
    shape: tuple[int, ...]
    transpose: bool = False  # stored [K_in, N_out]; leaves are [N_out, K_in]


WeightMap = dict[str, tuple[Tensor, ...]]  # leaf <- tensors, one below the other (axis 0)


def llama_weights(spec: ModelSpec) -> WeightMap:
    d, inner = spec.hidden_size, spec.intermediate_size
    q_rows = spec.num_attention_heads * spec.head_dim
    kv_rows = spec.num_key_value_heads * spec.head_dim
    embedding = Tensor("model.embed_tokens.weight", (spec.vocab_size, d))
    weights: WeightMap = {"norm.weight": (Tensor("model.norm.weight", (d,)),)}
    if spec.tie_word_embeddings:
        weights["head.weight"] = (embedding,)
    else:
        weights["embedding.weight"] = (embedding,)
        weights["head.weight"] = (Tensor("lm_head.weight", (spec.vocab_size, d)),)
    for index in range(spec.num_hidden_layers):
        leaf, tensor = f"layers.{index}", f"model.layers.{index}"
        weights |= {
            f"{leaf}.attention.norm.weight": (Tensor(f"{tensor}.input_layernorm.weight", (d,)),),
            f"{leaf}.attention.qkv.weight": (
                Tensor(f"{tensor}.self_attn.q_proj.weight", (q_rows, d)),
                Tensor(f"{tensor}.self_attn.k_proj.weight", (kv_rows, d)),
                Tensor(f"{tensor}.self_attn.v_proj.weight", (kv_rows, d)),
            ),
            f"{leaf}.attention.out.weight": (
                Tensor(f"{tensor}.self_attn.o_proj.weight", (d, q_rows)),
            ),
            f"{leaf}.mlp.norm.weight": (Tensor(f"{tensor}.post_attention_layernorm.weight", (d,)),),
            f"{leaf}.mlp.gate_up.weight": (
                Tensor(f"{tensor}.mlp.gate_proj.weight", (inner, d)),
                Tensor(f"{tensor}.mlp.up_proj.weight", (inner, d)),
            ),
            f"{leaf}.mlp.down.weight": (Tensor(f"{tensor}.mlp.down_proj.weight", (d, inner)),),
        }
    return weights
