"""Matrices of GGUF files stay in the blocks of their types: what becomes of each leaf."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from forge_jax.errors import ConfigError, UnsupportedModelError
from forge_jax.weights.block_types import KEY
from forge_jax.weights.forms import expert_leaves, num_experts
from forge_jax.weights.partition import Partition, partition_of, possible_shards
from forge_kernels.blocks import Blocks
from forge_kernels.linear import BlockPacking, Format, Quantization

if TYPE_CHECKING:
    from forge_jax.models.spec import ModelSpec
    from forge_jax.models.weight_map import Tensor, WeightMap

BlockRows = Literal["int8"]


@dataclass(frozen=True)
class BlockForm:
    """A matrix in blocks; `packed`: for the CPU kernels, which hold all of them.

    `activations`: packed, the rows of x are rounded to that type; those of experts are not.
    """

    blocks: Blocks
    packed: bool
    activations: BlockRows | None = None

    def packing(
        self, outputs: int, inputs: int, paired: bool, experts: int | None = None
    ) -> BlockPacking | None:
        if not self.packed:
            return None
        rows = self.activations if experts is None else None
        return BlockPacking(self.blocks, outputs, inputs, paired, experts, rows)

    def quantization(self, outputs: int, inputs: int, experts: int | None = None) -> Quantization:
        return Quantization.of_blocks(self.blocks, outputs, inputs, experts)


@dataclass(frozen=True)
class Piece:
    """Some rows of a matrix, of so many tensors that follow each other."""

    form: BlockForm | Format | None  # None: plain floats
    rows: int
    tensors: int


@dataclass(frozen=True)
class Pieces:
    """A matrix whose tensors have several types: each piece is multiplied by itself."""

    pieces: tuple[Piece, ...]


def block_forms(
    spec: ModelSpec,
    weights: WeightMap,
    plain: Format | None,
    shards: int = 1,
    rows: BlockRows | None = None,
) -> dict[str, BlockForm | Pieces]:
    """The leaves that have tensors in blocks, and their forms on each of so many devices.

    Args:
      plain: the form of matrices of floats: packed, where the CPU kernels are used.
      rows: what these round activations to. None: they round none.

    Raises:
      UnsupportedModelError: gates and ups of experts in different types.
      ConfigError: blocks that cannot be cut so, with each number of devices that goes.
    """
    forms = _whole_forms(spec, weights, plain, rows)
    if shards == 1:
        return forms
    cut_all = {}
    for leaf, form in forms.items():
        of_shard = _of_shard(form, partition_of(leaf, spec, shards))
        if of_shard is None:
            fit = [
                str(count)
                for count in possible_shards(spec)
                if all(_of_shard(form, partition_of(n, spec, count)) for n, form in forms.items())
            ]
            raise ConfigError(
                f"--tensor-parallel {shards} cuts the groups of {weights[leaf][0].name}, of which "
                f"16 values must stay together: use --tensor-parallel {' or '.join(fit)}, or "
                "--gguf-weights decoded"
            )
        cut_all[leaf] = of_shard
    return cut_all


def _of_shard(form: BlockForm | Pieces, partition: Partition | None) -> BlockForm | Pieces | None:
    """What a device has of a matrix; None: it cannot be cut so."""
    if partition is None:
        return form
    if isinstance(form, Pieces):
        assert partition.axis == -2, "a matrix of several tensors that is cut by its inputs"
        ends = list(itertools.accumulate(piece.rows for piece in form.pieces))
        return Pieces(
            tuple(
                replace(piece, rows=partition.within(end - piece.rows, end).size)
                for piece, end in zip(form.pieces, ends, strict=True)
            )
        )
    if partition.axis == -2:
        return form
    blocks = form.blocks.cut(partition.size)
    return None if blocks is None else replace(form, blocks=blocks)


def _whole_forms(
    spec: ModelSpec, weights: WeightMap, plain: Format | None, rows: BlockRows | None
) -> dict[str, BlockForm | Pieces]:
    if spec.block_types is None:
        return {}
    forms: dict[str, BlockForm | Pieces] = {}
    for leaf, parts in weights.items():
        blocks = [spec.block_types.blocks_of(part.name) for part in parts]
        if not any(blocks):
            continue
        name = parts[0].name
        if len(parts[0].shape) != 2:
            raise UnsupportedModelError(f"{KEY}: {name} is no matrix that can stay in blocks")
        if num_experts(leaf, spec) is not None:
            if len(set(blocks)) > 1:
                raise UnsupportedModelError(
                    f"{KEY}: {' and '.join(_each_type(blocks, parts))} have different types, but "
                    "are computed together, which is not supported of experts: use --gguf-weights "
                    "decoded"
                )
            assert blocks[0] is not None
            forms[leaf] = BlockForm(blocks[0], plain is not None)
            continue
        pieces = []
        pairs = zip(blocks, parts, strict=True)
        for found, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
            same = [part for _, part in group]
            form = plain if found is None else BlockForm(found, plain is not None, rows)
            pieces.append(Piece(form, sum(part.shape[0] for part in same), len(same)))
        first = pieces[0].form
        single = len(pieces) == 1 and isinstance(first, BlockForm)
        forms[leaf] = first if single else Pieces(tuple(pieces))
    for both in expert_leaves(spec):  # packed are both or none
        if sum(leaf in forms for leaf in both) == 1:
            forms |= {
                leaf: replace(form, packed=False)
                for leaf in both
                if isinstance(form := forms.get(leaf), BlockForm)
            }
    return forms


def _each_type(blocks: Sequence[Blocks | None], parts: Sequence[Tensor]) -> list[str]:
    """The name of the first tensor in each."""
    firsts = {found: part.name for found, part in reversed([*zip(blocks, parts, strict=True)])}
    return sorted(firsts.values())


def by_piece(weights: WeightMap, forms: Mapping[str, BlockForm | Pieces]) -> WeightMap:
    """The map with a leaf for each piece: "layers.0.attention.qkv.pieces.1.weight"."""
    split: WeightMap = {}
    for leaf, parts in weights.items():
        form = forms.get(leaf)
        if not isinstance(form, Pieces):
            split[leaf] = parts
            continue
        at = 0
        for number, piece in enumerate(form.pieces):
            split[piece_name(leaf, number)] = parts[at : at + piece.tensors]
            at += piece.tensors
    return split


def forms_by_piece(forms: Mapping[str, BlockForm | Pieces]) -> dict[str, BlockForm]:
    """The forms of all leaves in blocks, by the names that `by_piece` gives."""
    found: dict[str, BlockForm] = {}
    for leaf, form in forms.items():
        if isinstance(form, BlockForm):
            found[leaf] = form
            continue
        for number, piece in enumerate(form.pieces):
            if isinstance(piece.form, BlockForm):
                found[piece_name(leaf, number)] = piece.form
    return found


def piece_name(leaf: str, number: int) -> str:
    return f"{leaf.removesuffix('weight')}pieces.{number}.weight"
