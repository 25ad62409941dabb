"""Micro-batches: parts of a step that are in different stages of a pipeline at the same time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from forge_jax.schedule.plan import Decodes, ScheduledSequence, SequenceResult, StepPlan


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Consecutive sequences of a step, without its admissions.

    Attributes:
      continues: True if the last sequence continues in the next micro-batch.
    """

    plan: StepPlan
    continues: bool


def split_plan(plan: StepPlan, count: int) -> list[MicroBatch]:
    """Divide a step into at most `count` micro-batches with about equally many tokens.

    The order of the sequences is unchanged. A prompt chunk with no row before its last token may be
    divided, because each stage computes the micro-batches in order.
    """
    size = max(-(-plan.num_tokens // count), 1)
    batches: list[MicroBatch] = []
    first_row = 0
    for decodes, chunks, continues in _parts(plan, size):
        part = replace(plan, admissions=(), decodes=decodes, chunks=tuple(chunks), masks=None)
        end_row = first_row + part.num_rows
        if plan.masks is not None:
            part = replace(part, masks=plan.masks[first_row:end_row])
        batches.append(MicroBatch(part, continues))
        first_row = end_row
    return batches


def _parts(plan: StepPlan, size: int) -> Iterable[tuple[Decodes, list[ScheduledSequence], bool]]:
    """Yield the decodes and chunks of parts with about `size` tokens."""
    num_decodes, room = len(plan.decodes), size
    start, chunks = 0, list[ScheduledSequence]()
    while num_decodes - start > size:
        yield _some_decodes(plan.decodes, start, start + size), [], False
        start += size
    decodes = _some_decodes(plan.decodes, start, num_decodes)
    room -= len(decodes)
    for chunk in plan.chunks:
        rest = chunk
        while rest.num_tokens > room:
            if room and _divisible(rest):
                begin, rest = _divided(rest, room)
                chunks.append(begin)
                yield decodes, chunks, True
            elif decodes or chunks:
                yield decodes, chunks, False
            else:
                break  # it cannot be divided
            decodes, chunks, room = Decodes(), [], size
        chunks.append(rest)
        room = max(room - rest.num_tokens, 0)
    if decodes or chunks:
        yield decodes, chunks, False


def _some_decodes(decodes: Decodes, start: int, end: int) -> Decodes:
    return Decodes(
        slots=decodes.slots[start:end],
        starts=decodes.starts[start:end],
        tokens=decodes.tokens[start:end],
        num_outputs=decodes.num_outputs[start:end],
        new_blocks=[
            (row - start, index, block)
            for row, index, block in decodes.new_blocks
            if start <= row < end
        ],
        seq_keys=decodes.seq_keys[start:end],
        salts=decodes.salts[start:end],
    )


def _divisible(chunk: ScheduledSequence) -> bool:
    return chunk.num_rows <= 1 and not chunk.scoring and chunk.pooling is None


def _divided(chunk: ScheduledSequence, size: int) -> tuple[ScheduledSequence, ScheduledSequence]:
    """Return the first `size` tokens of a chunk, without rows, and the others."""
    begin = replace(chunk, token_ids=chunk.token_ids[:size], num_rows=0, samples=False)
    rest = replace(chunk, start=chunk.start + size, token_ids=chunk.token_ids[size:], new_blocks=())
    return begin, rest


def joined_results(
    batches: Iterable[tuple[MicroBatch, tuple[SequenceResult, ...]]],
) -> tuple[SequenceResult, ...]:
    """Join the results of micro-batches. Return one result per sequence of the step."""
    joined: list[SequenceResult] = []
    for batch, results in batches:
        joined += results[:-1] if batch.continues else results
    return tuple(joined)
