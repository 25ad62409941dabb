"""The checkpoint tensors that make up each leaf of a model, declared per architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_jax.models.spec import ExpertSpec, ModelSpec


@dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint, and its required shape."""

    name: str
    shape: tuple[int, ...]
    transpose: bool = False  # stored [K_in, N_out]; leaves are [N_out, K_in]


# leaf -> tensors, stacked vertically (axis 0; for experts' leaves [E, N, K], the rows of all)
WeightMap = dict[str, tuple[Tensor, ...]]


# The norms of a layer by placement: the leaf's name and the checkpoint's.
_NORMS = {
    "before": {
        "attention.norm": "input_layernorm",
        "mlp.norm": "post_attention_layernorm",
    },
    "after": {
        "attention.post_norm": "post_attention_layernorm",
        "mlp.post_norm": "post_feedforward_layernorm",
    },
    "both": {
        "attention.norm": "input_layernorm",
        "attention.post_norm": "post_attention_layernorm",
        "mlp.norm": "pre_feedforward_layernorm",
        "mlp.post_norm": "post_feedforward_layernorm",
    },
}


@dataclass(frozen=True)
class ExpertNames:
    """The tensor names of a layer's experts.

    If `fused`, all experts of a layer share one tensor with gates above ups, as in transformers 5.
    """

    part: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused: bool = False


def decoder_weights(
    spec: ModelSpec, *, fused: bool = False, experts: ExpertNames | None = None
) -> WeightMap:
    """Return the tensors of a checkpoint with Hugging Face's usual names.

    If `fused`, the checkpoint stores queries, keys and values as one matrix, and gate and up too.
    """
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
    qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    gate_up = {"gate_proj": inner, "up_proj": inner}
    if fused:
        qkv, gate_up = {"qkv_proj": q_rows + 2 * kv_rows}, {"gate_up_proj": 2 * inner}

    for index in range(spec.num_hidden_layers):
        leaf, tensor = f"layers.{index}", f"model.layers.{index}"

        def linear(
            name: str, outputs: dict[str, int], inputs: int, bias: bool,
            leaf: str = leaf, tensor: str = tensor,
        ) -> WeightMap:  # fmt: skip
            part = f"{tensor}.self_attn" if name.startswith("attention") else f"{tensor}.mlp"
            parts = {
                f"{leaf}.{name}.weight": tuple(
                    Tensor(f"{part}.{each}.weight", (rows, inputs))
                    for each, rows in outputs.items()
                )
            }
            if bias:
                parts[f"{leaf}.{name}.bias"] = tuple(
                    Tensor(f"{part}.{each}.bias", (rows,)) for each, rows in outputs.items()
                )
            return parts

        weights |= linear("attention.qkv", qkv, d, spec.attention_bias)
        weights |= linear("attention.out", {"o_proj": d}, q_rows, spec.output_bias)
        mixture = spec.experts_of(index)
        if mixture is None:
            weights |= linear("mlp.gate_up", gate_up, d, spec.mlp_bias)
            weights |= linear("mlp.down", {"down_proj": d}, inner, spec.mlp_bias)
        else:
            weights |= _expert_weights(f"{leaf}.mlp", tensor, d, mixture, experts or ExpertNames())
        for ours, theirs in _NORMS[spec.norm_placement].items():
            weights[f"{leaf}.{ours}.weight"] = (Tensor(f"{tensor}.{theirs}.weight", (d,)),)
        if spec.qk_norm is not None:
            by_head = spec.qk_norm == "head"
            for ours, theirs, rows in (("q", "q_norm", q_rows), ("k", "k_norm", kv_rows)):
                size = spec.head_dim if by_head else rows
                name = f"{tensor}.self_attn.{theirs}.weight"
                weights[f"{leaf}.attention.{ours}_norm.weight"] = (Tensor(name, (size,)),)
    return weights


def _expert_weights(
    leaf: str, layer: str, d: int, mixture: ExpertSpec, names: ExpertNames
) -> WeightMap:
    count, inner, part = mixture.count, mixture.intermediate_size, f"{layer}.{names.part}"
    weights: WeightMap = {f"{leaf}.router.weight": (Tensor(f"{part}.gate.weight", (count, d)),)}
    if names.fused:
        gate_up, down = f"{part}.experts.gate_up_proj", f"{part}.experts.down_proj"
        weights[f"{leaf}.gate_up.weight"] = (Tensor(gate_up, (count, 2 * inner, d)),)
        weights[f"{leaf}.down.weight"] = (Tensor(down, (count, d, inner)),)
        return weights
    experts = [f"{part}.experts.{expert}" for expert in range(count)]
    weights[f"{leaf}.gate_up.weight"] = tuple(
        Tensor(f"{expert}.{name}.weight", (inner, d))
        for expert in experts
        for name in (names.gate, names.up)
    )
    weights[f"{leaf}.down.weight"] = tuple(
        Tensor(f"{expert}.{names.down}.weight", (d, inner)) for expert in experts
    )
    return weights
