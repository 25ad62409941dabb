"""The packed upload of one step: everything the device needs, in one i32 array, one transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from forge_jax.schedule.plan import FED_BACK, StepPlan
from forge_jax.step.slots import PADDING

# Bits of Meta.flags: work that at least one row of the step needs.
RANDOM, FILTER, BIAS, PENALTIES, MIN_TOKENS, LOGPROBS = (1 << i for i in range(6))


class Meta(NamedTuple):
    """The segments of the packed array. Padding rows have zero tokens; padding indices, PADDING."""

    header: jax.Array  # i32[4]: num_seqs, num_tokens, num_rows, flags
    slot: jax.Array  # i32[S]
    start: jax.Array  # i32[S], position of the first token
    cu_q_lens: jax.Array  # i32[S+1]
    cu_rows: jax.Array  # i32[S+1]
    samples: jax.Array  # i32[S], whether the sequence's next token is sampled
    scoring: jax.Array  # i32[S]
    num_output: jax.Array  # i32[S]
    tokens: jax.Array  # i32[T], FED_BACK where the slot's last token is meant
    token_seq: jax.Array  # i32[T]
    row_token: jax.Array  # i32[R], index of the row's token among the T
    row_seq: jax.Array  # i32[R], S for padding
    row_target: jax.Array  # i32[R], the token whose logprob is wanted; FED_BACK: the sampled one
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
    max_q_len: int  # tokens of one sequence

    @classmethod
    def decode(cls, batch: int) -> StepShape:
        """One token and one row for each sequence, at most one new block."""
        return cls(f"decode[{batch}]", batch, batch, batch, batch, max_q_len=1)

    @classmethod
    def mixed(cls, num_tokens: int, max_num_seqs: int, max_rows: int, block_size: int) -> StepShape:
        num_seqs = min(max_num_seqs, num_tokens)
        updates = num_seqs + num_tokens // block_size + 1
        rows = min(max_rows, num_tokens)
        return cls(f"mixed[{num_tokens}]", num_tokens, num_seqs, rows, updates, num_tokens)

    def segments(self) -> Meta:
        """The length of each segment, in the place of the segment."""
        s, t, r, u = self.num_seqs, self.num_tokens, self.num_rows, self.num_updates
        return Meta(4, s, s, s + 1, s + 1, s, s, s, t, t, r, r, r, u, u)  # type: ignore[arg-type]

    @property
    def width(self) -> int:
        return sum(self.segments())  # type: ignore[arg-type]

    def fits(self, plan: StepPlan) -> bool:
        return (
            len(plan.sequences) <= self.num_seqs
            and plan.num_tokens <= self.num_tokens
            and all(len(s.token_ids) <= self.max_q_len for s in plan.sequences)
            and plan.num_rows <= self.num_rows
            and sum(len(s.new_blocks) for s in plan.sequences) <= self.num_updates
        )

    def split(self, packed):
        """Cuts the packed array (numpy or traced) into its segments, without a copy."""
        parts, offset = [], 0
        for length in self.segments():
            parts.append(packed[offset : offset + length])
            offset += length
        return Meta(*parts)

    def pack(self, plan: StepPlan, flags: int, max_blocks: int) -> np.ndarray:
        """A plan that `fits` -> i32[width]."""
        packed = np.zeros(self.width, np.int32)
        m = self.split(packed)
        sequences = plan.sequences
        n = len(sequences)
        q_lens = np.array([len(s.token_ids) for s in sequences], np.int32)
        rows = np.array([s.num_rows for s in sequences], np.int32)
        total_tokens, total_rows = int(q_lens.sum()), int(rows.sum())
        m.header[:] = (n, total_tokens, total_rows, flags)
        m.slot[:n] = [s.slot for s in sequences]
        m.start[:n] = [s.start for s in sequences]
        m.cu_q_lens[1 : n + 1] = np.cumsum(q_lens)
        m.cu_q_lens[n + 1 :] = total_tokens
        m.cu_rows[1 : n + 1] = np.cumsum(rows)
        m.cu_rows[n + 1 :] = total_rows
        m.samples[:n] = [s.samples for s in sequences]
        m.scoring[:n] = [s.scoring for s in sequences]
        m.num_output[:n] = [s.num_output for s in sequences]
        index = np.arange(n, dtype=np.int32)
        m.tokens[:total_tokens] = [t for s in sequences for t in s.token_ids]
        m.token_seq[:total_tokens] = np.repeat(index, q_lens)
        m.token_seq[total_tokens:] = self.num_seqs
        m.row_seq[:total_rows] = np.repeat(index, rows)
        m.row_seq[total_rows:] = self.num_seqs
        # The rows of a sequence are its last tokens.
        last_rows = np.repeat(m.cu_q_lens[1 : n + 1] - m.cu_rows[1 : n + 1], rows)
        m.row_token[:total_rows] = np.arange(total_rows) + last_rows
        m.row_target[:] = FED_BACK
        for s, first in zip(sequences, m.cu_rows, strict=False):
            if s.targets:
                m.row_target[first : first + len(s.targets)] = s.targets
        updates = [
            (s.slot * max_blocks + at, block) for s in sequences for at, block in s.new_blocks
        ]
        m.table_index[:] = PADDING
        if updates:
            m.table_index[: len(updates)] = [index for index, _ in updates]
            m.table_block[: len(updates)] = [block for _, block in updates]
        return packed
