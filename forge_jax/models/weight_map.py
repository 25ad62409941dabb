"""The checkpoint tensors that make up each leaf of a model, declared per architecture."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from forge_jax.models.spec import ExpertSpec, ModelSpec


@dataclass(frozen=True)
class RowsOfHeads:
    """Some rows of each head: of every `size` rows of a tensor, those from `begin` to `end`."""

    size: int
    begin: int
    end: int


@dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint, and its required shape.

    Attributes:
      name: the checkpoint's name.
      shape: the required shape.
      transpose: True if it is stored [..., K_in, N_out]; leaves are [..., N_out, K_in].
      heads: the number of key heads if queries, keys and values are stored by key head,
        [K, queries + 2, D, ...]. Leaves have all queries, all keys, then all values. If it is 0,
        the order is the leaf's.
      queries: the query heads of each key head, if they are stored so.
      of_heads: the rows of each head that the leaf has; None for all rows.
    """

    name: str
    shape: tuple[int, ...]
    transpose: bool = False
    heads: int = 0
    queries: int = 1
    of_heads: RowsOfHeads | None = None

    @property
    def rows(self) -> int:
        """N_out: the rows of a matrix's leaf that the tensor has."""
        rows, own = self.shape[-1 if self.transpose else 0], self.of_heads
        return rows if own is None else rows // own.size * (own.end - own.begin)

    @property
    def columns(self) -> int:
        """K_in: the columns of a matrix's leaf."""
        return self.shape[-2 if self.transpose else -1]

    def stored_rows(self) -> np.ndarray | None:
        """Return the stored row of each of the leaf's rows, i64[N]; None if they are the same."""
        if self.of_heads is not None:
            own = self.of_heads
            rows = np.arange(self.shape[0]).reshape(-1, own.size)
            return rows[:, own.begin : own.end].reshape(-1)
        if not self.heads:
            return None
        rows = np.arange(self.rows).reshape(self.heads, self.queries + 2, -1)
        parts = np.split(rows, [self.queries, self.queries + 1], axis=1)
        return np.concatenate([part.reshape(-1) for part in parts])


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

    If `fused` has names, all experts of a layer share these two tensors, with gates above ups.
    """

    part: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused: tuple[str, str] | None = None
    correction: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


FUSED_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")  # as transformers 5 saves them


def decoder_weights(
    spec: ModelSpec,
    *,
    fused: Collection[Literal["qkv", "gate_up"]] = (),
    experts: ExpertNames | None = None,
) -> WeightMap:
    """Return the tensors of a checkpoint with Hugging Face's usual names.

    `renamed` adapts the map to other names.

    Args:
      spec: the model.
      fused: which of these the checkpoint stores as one matrix.
      experts: the names of experts' tensors.
    """
    names = experts or ExpertNames()
    weights = _norm(spec, "norm", "model.norm") | _vocabulary(spec)
    for index in range(spec.num_hidden_layers):
        weights |= _layer_weights(spec.of_layer(index), index, fused, names)
    return weights


def _layer_weights(
    spec: ModelSpec, index: int, fused: Collection[str], names: ExpertNames
) -> WeightMap:
    """Return the tensors of one layer, whose sizes are those of `spec`."""
    d, inner = spec.hidden_size, spec.intermediate_size
    q_rows = spec.num_attention_heads * spec.head_dim
    kv_rows = spec.num_key_value_heads * spec.head_dim
    leaf, tensor = f"layers.{index}", f"model.layers.{index}"
    rows_of = {each: q_rows if each == "q" else kv_rows for each in spec.projections(index)}
    qkv = {f"{each}_proj": rows for each, rows in rows_of.items()}
    gate_up = {"gate_proj": inner, "up_proj": inner}
    if "qkv" in fused:
        qkv = {"qkv_proj": sum(rows_of.values())}
    if "gate_up" in fused:
        gate_up = {"gate_up_proj": 2 * inner}
    first, parts_of_first = ("gate_up", gate_up) if spec.mlp_gated else ("up", {"up_proj": inner})

    def linear(name: str, outputs: dict[str, int], inputs: int, bias: bool) -> WeightMap:
        part = f"{tensor}.self_attn" if name.startswith("attention") else f"{tensor}.mlp"
        parts = {
            f"{leaf}.{name}.weight": tuple(
                Tensor(f"{part}.{each}.weight", (rows, inputs)) for each, rows in outputs.items()
            )
        }
        if bias:
            parts[f"{leaf}.{name}.bias"] = tuple(
                Tensor(f"{part}.{each}.bias", (rows,)) for each, rows in outputs.items()
            )
        return parts

    weights = linear("attention.qkv", qkv, d, spec.attention_bias)
    weights |= linear("attention.out", {"o_proj": d}, q_rows, spec.output_bias)
    mixture = spec.experts_of(index)
    if mixture is None:
        weights |= linear(f"mlp.{first}", parts_of_first, d, spec.mlp_bias)
        weights |= linear("mlp.down", {"down_proj": d}, inner, spec.mlp_bias)
    else:
        weights |= _expert_weights(f"{leaf}.mlp", tensor, d, mixture, names)
    for ours, theirs in _NORMS[spec.norm_placement].items():
        weights |= _norm(spec, f"{leaf}.{ours}", f"{tensor}.{theirs}")
    if spec.qk_norm is not None:
        for each in (each for each in "qk" if each in rows_of):
            rows, D = rows_of[each], spec.head_dim
            shapes = {"head": (D,), "each_head": (rows // D, D), "all": (rows,)}
            name = f"{tensor}.self_attn.{each}_norm.weight"
            weights[f"{leaf}.attention.{each}_norm.weight"] = (Tensor(name, shapes[spec.qk_norm]),)
    return weights


def _vocabulary(spec: ModelSpec) -> WeightMap:
    """Return the tensors of the embedding and the head, which may be one."""
    shape = spec.vocab_size, spec.hidden_size
    embedding = Tensor("model.embed_tokens.weight", shape)
    weights: WeightMap = {"head.weight": (embedding,)}
    if not spec.tie_word_embeddings:
        head = Tensor("lm_head.weight", shape)
        weights = {"embedding.weight": (embedding,), "head.weight": (head,)}
    if spec.head_bias:
        weights["head.bias"] = (Tensor("lm_head.bias", (spec.vocab_size,)),)
    return weights


def _norm(spec: ModelSpec, leaf: str, module: str) -> WeightMap:
    """Return the tensors of a norm of the residual stream."""
    kinds = ("weight", "bias") if spec.norm_bias else ("weight",)
    return {f"{leaf}.{kind}": (Tensor(f"{module}.{kind}", (spec.hidden_size,)),) for kind in kinds}


def renamed(
    weights: WeightMap, names: Mapping[str, str], *, transposed: Collection[str] = ()
) -> WeightMap:
    """Return the map for a checkpoint that names its modules differently.

    Args:
      weights: as from `decoder_weights`.
      names: the checkpoint's name for parts of a module's name, such as "self_attn" or
        "model.layers". They are replaced in order.
      transposed: the last parts of modules whose matrices are stored [K_in, N_out].
    """

    def name_of(name: str) -> str:
        for ours, theirs in names.items():
            name = f".{name}.".replace(f".{ours}.", f".{theirs}.").strip(".")
        return name

    def tensor_of(part: Tensor) -> Tensor:
        name, shape = name_of(part.name), part.shape
        transpose = len(shape) == 2 and name.split(".")[-2] in transposed
        if transpose:
            return Tensor(name, shape[::-1], transpose=not part.transpose)
        return replace(part, name=name)

    return {leaf: tuple(map(tensor_of, parts)) for leaf, parts in weights.items()}


def _expert_weights(
    leaf: str, layer: str, d: int, mixture: ExpertSpec, names: ExpertNames
) -> WeightMap:
    count, inner, part = mixture.count, mixture.intermediate_size, f"{layer}.{names.part}"
    weights: WeightMap = {
        f"{leaf}.router.weight": (Tensor(f"{part}.{names.router}.weight", (count, d)),)
    }
    if mixture.router.correction:
        weights[f"{leaf}.correction"] = (Tensor(f"{part}.{names.correction}", (count,)),)
    if mixture.shared_size:
        size, module = mixture.shared_size, f"{part}.{names.shared}"
        weights[f"{leaf}.shared.gate_up.weight"] = tuple(
            Tensor(f"{module}.{name}.weight", (size, d)) for name in (names.gate, names.up)
        )
        weights[f"{leaf}.shared.down.weight"] = (
            Tensor(f"{module}.{names.down}.weight", (d, size)),
        )
    if mixture.shared_gate:
        weights[f"{leaf}.shared.gate.weight"] = (
            Tensor(f"{part}.{names.shared_gate}.weight", (1, d)),
        )
    if names.fused is not None:
        gate_up, down = (f"{part}.{name}" for name in names.fused)
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
