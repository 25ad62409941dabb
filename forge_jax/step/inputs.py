"""The packed upload of one step: all its inputs in one i32 array, one transfer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import jax
import numpy as np

from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.plan import FED_BACK, ScheduledSequence, StepPlan
from forge_jax.step.slots import PADDING

# Bits of the header's flags: work that at least one row of the step needs.
RANDOM, FILTER, BIAS, PENALTIES, MIN_TOKENS, LOGPROBS, MASKS, PROCESSED = (1 << i for i in range(8))


class StepInputs(NamedTuple):
    """The segments of the packed array. Padding rows have zero tokens, padding indices PADDING."""

    header: jax.Array  # i32[4]: num_seqs, num_tokens, num_rows, flags

    slot: jax.Array  # i32[S]
    start: jax.Array  # i32[S], first token's position
    cu_q_lens: jax.Array  # i32[S+1]
    cu_rows: jax.Array  # i32[S+1]
    samples: jax.Array  # i32[S], 1 if a token is sampled
    scoring: jax.Array  # i32[S]
    num_output: jax.Array  # i32[S]

    tokens: jax.Array  # i32[T], FED_BACK for the slot's last token
    token_seq: jax.Array  # i32[T]

    row_token: jax.Array  # i32[R], the row's index among the T
    row_seq: jax.Array  # i32[R], S for padding
    row_target: jax.Array  # i32[R], the token to score, FED_BACK for the sampled one

    table_index: jax.Array  # i32[U], slot * max_blocks + index
    table_block: jax.Array  # i32[U]


@dataclass(frozen=True)
class StepShape:
    """The static sizes of one executable."""

    name: str
    num_tokens: int  # T
    num_seqs: int  # S
    num_rows: int  # R
    num_updates: int  # U

    max_q_len: int  # maximum tokens of one sequence
    max_drafts: int = 0  # maximum drafts of one sequence
    prompts: bool = False  # takes prompts, so any plan within its sizes
    pools: bool = False  # pools hidden states, for such plans only

    @classmethod
    def decode(cls, batch: int) -> StepShape:
        """Return a shape with one token, one row and at most one new block per sequence."""
        return cls(f"decode[{batch}]", batch, batch, batch, batch, max_q_len=1)

    @classmethod
    def verify(
        cls, num_tokens: int, max_num_seqs: int, block_size: int, max_drafts: int
    ) -> StepShape:
        """Return a shape with a row per token: a sequence's last token and its drafts."""
        num_seqs = min(max_num_seqs, num_tokens)
        updates = num_seqs + num_tokens // block_size + 1
        sizes = (num_tokens, num_seqs, num_tokens, updates)
        return cls(f"verify[{num_tokens}]", *sizes, max_q_len=1 + max_drafts, max_drafts=max_drafts)

    @classmethod
    def mixed(
        cls,
        num_tokens: int,
        max_num_seqs: int,
        max_rows: int,
        block_size: int,
        max_drafts: int = 0,
    ) -> StepShape:
        num_seqs = min(max_num_seqs, num_tokens)
        updates = num_seqs + num_tokens // block_size + 1
        rows = min(max_rows, num_tokens)
        sizes = (num_tokens, num_seqs, rows, updates)
        return cls(
            f"mixed[{num_tokens}]",
            *sizes,
            max_q_len=num_tokens,
            max_drafts=max_drafts,
            prompts=True,
        )

    @cached_property
    def segments(self) -> tuple[slice, ...]:
        """The slices of the packed array, in the order of `StepInputs`."""
        s, t, r, u = self.num_seqs, self.num_tokens, self.num_rows, self.num_updates
        lengths = (4, s, s, s + 1, s + 1, s, s, s, t, t, r, r, r, u, u)
        ends = tuple(accumulate(lengths))
        return tuple(slice(end - length, end) for end, length in zip(ends, lengths, strict=True))

    @property
    def width(self) -> int:
        return self.segments[-1].stop

    def fits(self, plan: StepPlan) -> bool:
        decodes, chunks = plan.decodes, plan.chunks
        return (
            plan.num_sequences <= self.num_seqs
            and plan.pools == self.pools
            and plan.num_tokens <= self.num_tokens
            and all(len(s.token_ids) <= self.max_q_len for s in chunks)
            and plan.num_rows <= self.num_rows
            and len(decodes.new_blocks) + sum(len(s.new_blocks) for s in chunks) <= self.num_updates
        )

    def split(self, packed):
        """Split the packed array (NumPy or traced) into its segments, without a copy."""
        return StepInputs(*[packed[segment] for segment in self.segments])

    def pack(self, plan: StepPlan, flags: int, max_blocks: int) -> np.ndarray:
        """Pack a plan that `fits` as i32[width]."""
        packed = np.zeros(self.width, np.int32)
        m = self.split(packed)
        decodes, chunks = plan.decodes, plan.chunks
        d, n = len(decodes), plan.num_sequences
        m.slot[:d] = decodes.slots
        m.start[:d] = decodes.starts
        m.num_output[:d] = decodes.num_outputs
        m.tokens[:d] = decodes.tokens
        m.samples[:d] = 1
        # A decode has one token and one row, so all three share an index.
        index = np.arange(d + 1, dtype=np.int32)
        m.cu_q_lens[: d + 1] = m.cu_rows[: d + 1] = index
        m.token_seq[:d] = m.row_seq[:d] = m.row_token[:d] = index[:d]
        m.row_target[:] = FED_BACK
        num_tokens = num_rows = d
        if chunks:
            num_tokens, num_rows = _pack_chunks(m, chunks, d)
        m.header[:] = (n, num_tokens, num_rows, flags)
        m.cu_q_lens[n + 1 :] = num_tokens
        m.cu_rows[n + 1 :] = num_rows
        m.token_seq[num_tokens:] = self.num_seqs
        m.row_seq[num_rows:] = self.num_seqs
        updates = [
            (decodes.slots[row] * max_blocks + at, block) for row, at, block in decodes.new_blocks
        ]
        updates += [(s.slot * max_blocks + at, block) for s in chunks for at, block in s.new_blocks]
        m.table_index[len(updates) :] = PADDING
        for u, (index, block) in enumerate(updates):
            m.table_index[u] = index
            m.table_block[u] = block
        return packed


def _pack_chunks(
    m: StepInputs, chunks: tuple[ScheduledSequence, ...], first: int
) -> tuple[int, int]:
    """Write the sequences from index `first`, after as many decodes.

    Returns:
      The numbers of tokens and rows of the step, including the decodes.
    """
    end = first + len(chunks)
    tokens: list[int] = []
    token_seq: list[int] = []
    row_token: list[int] = []
    row_seq: list[int] = []
    cu_q_lens: list[int] = []
    cu_rows: list[int] = []
    for i, s in enumerate(chunks, start=first):
        q_len, rows = len(s.token_ids), s.num_rows
        tokens += s.token_ids
        token_seq += [i] * q_len
        row_seq += [i] * rows
        num_tokens, num_rows = first + len(tokens), first + len(row_seq)
        row_token += range(num_tokens - rows, num_tokens)  # the last tokens of the sequence
        cu_q_lens.append(num_tokens)
        cu_rows.append(num_rows)
        if s.targets:
            m.row_target[num_rows - rows : num_rows - rows + len(s.targets)] = s.targets
    num_tokens, num_rows = first + len(tokens), first + len(row_seq)
    m.slot[first:end] = [s.slot for s in chunks]
    m.start[first:end] = [s.start for s in chunks]
    m.cu_q_lens[first + 1 : end + 1] = cu_q_lens
    m.cu_rows[first + 1 : end + 1] = cu_rows
    m.samples[first:end] = [s.samples for s in chunks]
    m.scoring[first:end] = [s.scoring for s in chunks]
    m.num_output[first:end] = [s.num_output for s in chunks]
    m.tokens[first:num_tokens] = tokens
    m.token_seq[first:num_tokens] = token_seq
    m.row_seq[first:num_rows] = row_seq
    m.row_token[first:num_rows] = row_token
    return num_tokens, num_rows


class SlotFlags:
    """The optional sampler work that each slot needs, set at its admission."""

    def __init__(self, num_slots: int):
        self._flags = [0] * num_slots
        self._min_tokens: dict[int, int] = {}  # only of slots that have it

    def admit(self, slot: int, params: SamplingParams) -> None:
        flags = 0
        if params.temperature > 0.0:
            flags |= RANDOM
            if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
                flags |= FILTER
        if params.logit_bias:
            flags |= BIAS
        if params.penalized:
            flags |= PENALTIES
        if params.logprobs is not None:
            flags |= LOGPROBS
        if params.processed:
            flags |= PROCESSED
        self._flags[slot] = flags
        self._min_tokens.pop(slot, None)
        if params.held_tokens:
            self._min_tokens[slot] = params.held_tokens

    def of_step(self, plan: StepPlan) -> int:
        """Return the flags that any row of the step needs."""
        flags, decodes = 0 if plan.masks is None else MASKS, plan.decodes
        for slot_flags in set(map(self._flags.__getitem__, decodes.slots)):
            flags |= slot_flags
        if self._min_tokens and any(map(self._holds, decodes.slots, decodes.num_outputs)):
            flags |= MIN_TOKENS
        for s in plan.chunks:
            if s.scoring:
                flags |= LOGPROBS
            if s.samples:
                flags |= self._flags[s.slot]
                if self._holds(s.slot, s.num_output):
                    flags |= MIN_TOKENS
        return flags

    def _holds(self, slot: int, num_output: int) -> bool:
        """Return True if it is too early for the sequence to end."""
        return num_output < self._min_tokens.get(slot, 0)
