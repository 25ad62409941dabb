"""The executables of an engine: their sizes, the first ones, and the limits of plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from forge_jax.step.inputs import StepShape


class StepLimits(NamedTuple):
    """Limits that a plan must meet so that an executable fits it."""

    max_num_batched_tokens: int
    max_rows: int


def step_shapes(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_rows: int,
    block_size: int,
    max_drafts: int = 0,
    deterministic: bool = False,
    platform: str = "cpu",
) -> list[StepShape]:
    """Return the shapes of an engine, smallest first: several decode sizes, a few mixed sizes.

    If drafts are on (`max_drafts` per sequence), a few sizes for drafts alone are added. The
    deterministic tier uses one shape for every step, because another may round differently.
    """

    def mixed(num_tokens: int) -> StepShape:
        return StepShape.mixed(num_tokens, max_num_seqs, max_rows, block_size, max_drafts)

    if deterministic:
        return [mixed(max_num_batched_tokens)]
    largest = min(max_num_seqs, max_num_batched_tokens)
    shapes = [StepShape.decode(b) for b in decode_sizes(largest, platform)]
    if max_drafts:
        most = min(max_num_batched_tokens, max_num_seqs * (1 + max_drafts))
        shapes += [
            StepShape.verify(t, max_num_seqs, block_size, max_drafts)
            for t in (8, 32, 128)
            if t <= most
        ]
    several = [t for t in (64, 256, 1024) if t < max_num_batched_tokens] + [max_num_batched_tokens]
    return shapes + [mixed(t) for t in several]


def decode_sizes(largest: int, platform: str) -> list[int]:
    """Return the batch sizes of decode steps, up to `largest`.

    GPUs compute and write padded rows too, so a size is at most twice the one before. Their matrix
    instructions multiply eight rows at least. On a CPU, each executable costs compile time and
    padding costs little.
    """
    sizes = [4, 16, 64] if platform == "cpu" else [8 << i for i in range(largest.bit_length())]
    return [size for size in sizes if size < largest] + [largest]


def step_limits(shapes: Iterable[StepShape]) -> StepLimits:
    """Return the limits of plans that these shapes can run: the largest shape with prompts."""
    largest = max((s for s in shapes if s.prompts), key=lambda shape: shape.num_tokens)
    return StepLimits(largest.num_tokens, largest.num_rows)


def first_shapes(shapes: Iterable[StepShape], platform: str) -> list[StepShape]:
    """Return the shapes that serving begins with: one mixed shape, which also takes decodes.

    On a CPU, a step's cost depends on its tokens only, so this is the smallest. Elsewhere it is the
    largest, which needs the most memory. The memory has then been checked before serving begins.
    """
    mixed = [shape for shape in shapes if shape.prompts]
    return mixed[:1] if platform == "cpu" else mixed[-1:]


def pool_shapes(shapes: list[StepShape]) -> list[StepShape]:
    """Return the shapes that pool hidden states: the smallest and the largest with chunks."""
    mixed = [shape for shape in shapes if shape.prompts]
    chosen = list(dict.fromkeys([*mixed[:1], shapes[-1]]))
    return [
        dataclasses.replace(shape, name=f"pool[{shape.num_tokens}]", pools=True) for shape in chosen
    ]
