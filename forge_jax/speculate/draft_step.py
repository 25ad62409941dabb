"""The calls of a draft model as pure functions, and their packed upload.

`extend[T]` computes keys and values of known tokens. `draft[B]` computes the last one or two tokens
of up to B sequences, and then generates token after token on the device. The noise is that of the
target's sampler for the same sequence and position (Gumbel coupling: Daliri, Musco and Suresh 2024,
arXiv:2408.07978). A draft therefore equals the target's sample as often as possible without
communication, and always if both distributions are the same.

For verification by rejection the noise is independent, and each draft's distribution is stored in
`DraftProbs` for the target's step. The length policy then receives the probability of the most
likely token. The probability of the drawn token would select good draws and bias the output.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax.models.kv import KV, first_paged
from forge_jax.step.draft_probs import SUPPORT, Proposed
from forge_jax.step.slots import MIN_TEMPERATURE, PADDING
from forge_jax.step.step_shapes import decode_sizes
from forge_kernels import sampling
from forge_kernels.attention import Implementation
from forge_kernels.embed import embed

if TYPE_CHECKING:
    from forge_jax.models.decoder import Leaves, Model
    from forge_jax.sampling_params import SamplingParams

NUM_PARAMS = 6  # sampling parameters: seed (2), temperature, top_p, min_p, top_k
RANDOM, FILTER = 1, 2  # bits of the header for work that at least one row needs


class Row(NamedTuple):
    """One sequence in a call."""

    token_ids: Seq[int]  # Tokens without keys and values. One or two for `draft`.
    start: int  # Position of the first token.
    blocks: Seq[int]  # Blocks of the draft model's KV cache, in order.
    end: int = 0  # `draft`: positions below it have a block.
    params: np.ndarray | None = None  # `draft`: i32[NUM_PARAMS], floats as their bits.
    slot: int = PADDING  # `draft`: the sequence's slot in the target's steps.


class DraftInputs(NamedTuple):
    """The segments of a call's packed array."""

    header: jax.Array  # i32[3]: num_seqs, num_tokens, flags
    tokens: jax.Array  # i32[T]
    token_seq: jax.Array  # i32[T]
    start: jax.Array  # i32[S]
    cu_q_lens: jax.Array  # i32[S + 1]
    end: jax.Array  # i32[S]
    params: jax.Array  # i32[S * NUM_PARAMS]
    tables: jax.Array  # i32[S * max_blocks]
    slot: jax.Array  # i32[S]. Empty if the shape does not propose.


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """The static sizes of one executable."""

    name: str
    num_tokens: int  # T, the known tokens
    num_seqs: int  # S
    max_blocks: int
    max_q_len: int  # most tokens of one sequence
    # `draft`: tokens of each later pass, and rows of logits of every pass; at least `num_seqs`.
    later_tokens: int = 0
    num_rows: int = 0
    proposes: bool = False  # True for verification by rejection

    @cached_property
    def segments(self) -> tuple[slice, ...]:
        """The slice of each segment in the packed array, in the order of `DraftInputs`."""
        t, s = self.num_tokens, self.num_seqs
        slots = s * self.proposes
        lengths = (3, t, t, s, s + 1, s, s * NUM_PARAMS, s * self.max_blocks, slots)
        ends = tuple(accumulate(lengths))
        return tuple(slice(end - length, end) for end, length in zip(ends, lengths, strict=True))

    @property
    def width(self) -> int:
        return self.segments[-1].stop

    def split(self, packed):
        """Cut the packed array (numpy or traced) into its segments, without a copy."""
        return DraftInputs(*[packed[segment] for segment in self.segments])

    def most(self, rows: Seq[Row]) -> int:
        """Return how many of the first rows fit."""
        lengths = accumulate(len(row.token_ids) for row in rows[: self.num_seqs])
        return sum(length <= self.num_tokens for length in lengths)

    def pack(self, rows: Seq[Row]) -> np.ndarray:
        """Pack at most `num_seqs` rows with at most `num_tokens` in total, as i32[width]."""
        packed = np.zeros(self.width, np.int32)
        m, n = self.split(packed), len(rows)
        q_lens = np.array([len(row.token_ids) for row in rows], np.int32)
        num_tokens = int(q_lens.sum())
        assert n <= self.num_seqs and num_tokens <= self.num_tokens
        m.tokens[:num_tokens] = [token for row in rows for token in row.token_ids]
        m.token_seq[:num_tokens] = np.repeat(np.arange(n, dtype=np.int32), q_lens)
        m.cu_q_lens[1 : n + 1] = np.cumsum(q_lens)
        m.cu_q_lens[n + 1 :] = num_tokens
        tables = m.tables.reshape(self.num_seqs, self.max_blocks)
        params = m.params.reshape(self.num_seqs, NUM_PARAMS)
        m.slot[n:] = PADDING
        flags = 0
        for i, row in enumerate(rows):
            m.start[i], m.end[i] = row.start, row.end
            tables[i, : len(row.blocks)] = row.blocks
            if row.params is not None:
                params[i] = row.params
                flags |= _flags(row.params)
            if self.proposes:
                m.slot[i] = row.slot
        m.header[:] = n, num_tokens, flags
        return packed


def pack_params(seed: int, params: SamplingParams) -> np.ndarray:
    """Return i32[NUM_PARAMS] of a sequence, with the values of its slot on the device."""
    temperature = max(params.temperature, MIN_TEMPERATURE) if params.temperature else 0.0
    packed = np.zeros(NUM_PARAMS, np.int32)
    packed[:2] = np.array([seed], np.uint64).view(np.int32)
    floats = [temperature, params.top_p, params.min_p]
    packed[2:5] = np.array(floats, np.float32).view(np.int32)
    packed[5] = max(params.top_k, 0)
    return packed


def _flags(params: np.ndarray) -> int:
    temperature, top_p, min_p = params[2:5].view(np.float32)
    if temperature <= 0.0:
        return 0
    return RANDOM | FILTER * bool(params[5] > 0 or top_p < 1.0 or min_p > 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftPass:
    """One forward pass of a draft model, followed by sampling.

    Args:
      implementation: the implementation of attention.
      sampler: the sampler of the target's steps, because the noise must have the same bits.
      uniform: True in the deterministic tier.
    """

    model: Model
    shape: DraftShape
    block_size: int
    implementation: Implementation = "auto"
    sampler: Literal["xla", "cpu"] = "xla"
    uniform: bool = False

    def take_in(self, leaves: Leaves, kv: KV, m: DraftInputs) -> tuple[KV, jax.Array]:
        """Compute the known tokens of a call, and return (kv, dtype[T, d])."""
        shape, block_size = self.shape, self.block_size
        tables = m.tables.reshape(shape.num_seqs, shape.max_blocks)
        index = jnp.arange(shape.num_tokens)
        valid = index < m.header[1]
        positions = jnp.where(valid, m.start[m.token_seq] + index - m.cu_q_lens[m.token_seq], 0)
        blocks = tables[m.token_seq, positions // block_size]
        num_kv = first_paged(kv).shape[0] * block_size
        return self.model.forward(
            leaves,
            kv,
            m.tokens,
            positions,
            jnp.where(valid, blocks * block_size + positions % block_size, num_kv),
            tables,
            m.start + m.cu_q_lens[1:] - m.cu_q_lens[:-1],
            m.cu_q_lens,
            m.header[0],
            implementation=self.implementation,
            max_q_len=shape.max_q_len,
            uniform=self.uniform,
            skip_padding=True,
        )

    def go_on(
        self,
        leaves: Leaves,
        kv: KV,
        m: DraftInputs,
        last: jax.Array,  # i32[S], position of the last known token
        token: jax.Array,  # i32[S], at `last + ahead`
        ahead: jax.Array,  # i32[]
    ) -> tuple[KV, tuple[jax.Array, ...]]:
        """Compute the drafts `token`, and return (kv, the result of `sample` after them)."""
        shape, block_size = self.shape, self.block_size
        num_seqs = shape.num_seqs
        padding = (0, shape.later_tokens - num_seqs)
        seq = jnp.arange(num_seqs)
        exists = seq < m.header[0]
        # Without room, the last position is computed again and its result is not used. Nothing is
        # written, and no unwritten position is read.
        written = exists & (last + ahead < m.end)
        position = jnp.where(exists, jnp.minimum(last + ahead, m.end - 1), 0)
        tables = m.tables.reshape(num_seqs, shape.max_blocks)
        slot = tables[seq, position // block_size] * block_size + position % block_size
        num_kv = first_paged(kv).shape[0] * block_size
        kv, hidden = self.model.forward(
            leaves,
            kv,
            jnp.pad(token, padding),
            jnp.pad(position, padding),
            jnp.pad(jnp.where(written, slot, num_kv), padding, constant_values=num_kv),
            tables,
            position + 1,
            jnp.minimum(jnp.arange(num_seqs + 1), m.header[0]),
            m.header[0],
            implementation=self.implementation,
            max_q_len=shape.max_q_len if self.uniform else 1,
            uniform=self.uniform,
            skip_padding=True,
        )
        return kv, self.sample(leaves, m, hidden, seq, last + ahead + 1, ahead)

    def sample(
        self,
        leaves: Leaves,
        m: DraftInputs,
        hidden: jax.Array,  # dtype[T, d]
        row_token: jax.Array,  # i32[S], each sequence's row in T
        position: jax.Array,  # i32[S], positions of the sampled tokens
        ahead: jax.Array,  # i32[], number of drafts before them
    ) -> tuple[jax.Array, ...]:
        """Return tokens, i32[S], and their probabilities, f32[S].

        If the shape proposes, also return their distributions, i32[S, K] and f32[S, K].
        """
        num_seqs = self.shape.num_seqs
        row_token = jnp.pad(row_token, (0, self.shape.num_rows - num_seqs))
        logits = self.model.logits(leaves, embed(hidden, row_token), m.header[0])[:num_seqs]
        params = m.params.reshape(num_seqs, NUM_PARAMS)
        floats = jax.lax.bitcast_convert_type(params[:, 2:5], jnp.float32)
        temperature = floats[:, 0]
        asked: dict[str, Any] = {
            "temperature": temperature,
            "top_k": params[:, 5],
            "top_p": floats[:, 1],
            "min_p": floats[:, 2],
            "seed": params[:, :2].view(jnp.uint32),
        }
        any_random, any_filter = ((m.header[2] & bit) != 0 for bit in (RANDOM, FILTER))
        if self.shape.proposes:
            drawn = sampling.propose(
                logits,
                support=SUPPORT,
                known=position - ahead - 1,
                ahead=ahead,
                any_filter=any_filter,
                **asked,
            )
            return drawn.token, drawn.probability.max(axis=1), drawn.token_ids, drawn.probability
        token = sampling.sample(
            logits,
            position=position,
            any_random=any_random,
            any_filter=any_filter,
            num_rows=m.header[0],
            **asked,
            implementation=self.sampler,
        )
        token = jnp.clip(token, 0, logits.shape[1] - 1)
        scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
        chosen = jnp.take_along_axis(scaled, token[:, None], axis=1)[:, 0]
        probability = jnp.exp(chosen - jax.nn.logsumexp(scaled, axis=1))
        return token, jnp.where(jnp.isfinite(probability), probability, 0.0)


def make_extend(pass_: DraftPass) -> Callable[..., tuple[KV, None]]:
    """Return (leaves, kv*, packed) -> (kv, None), which computes keys and values of all rows."""
    shape = pass_.shape

    def extend(
        leaves: Leaves,
        kv: KV,  # per layer dtype[N, 2, K, bs, D]
        packed: jax.Array,  # i32[shape.width]
    ) -> tuple[KV, None]:
        return pass_.take_in(leaves, kv, shape.split(packed))[0], None

    extend.__name__ = shape.name.replace("[", "_").replace("]", "")
    return extend


def make_draft(pass_: DraftPass, max_draft_tokens: int) -> Callable[..., tuple[KV, Any]]:
    """Return (leaves, kv*, packed) -> (kv, out), where `out` is i32[2, S, k].

    `out` has the drafts and the bits of their probabilities. For a shape that proposes, the
    function is (leaves, kv*, packed, `Proposed`) -> (kv, (out, `Proposed`)).
    """
    shape = pass_.shape
    go_on = jax.jit(pass_.go_on)  # traced and lowered once for all passes

    def draft(
        leaves: Leaves,
        kv: KV,
        packed: jax.Array,  # i32[shape.width]
        proposed: Proposed | None = None,
    ) -> tuple[KV, Any]:
        m = shape.split(packed)
        kv, hidden = pass_.take_in(leaves, kv, m)
        last = m.start + m.cu_q_lens[1:] - m.cu_q_lens[:-1] - 1
        row_token = jnp.maximum(m.cu_q_lens[1:] - 1, 0)
        drawn = [pass_.sample(leaves, m, hidden, row_token, last + 1, jnp.int32(0))]
        # Unrolled, because a GPU's command buffers cannot contain a loop. On CPU it is as fast.
        for ahead in range(1, max_draft_tokens):
            kv, more = go_on(leaves, kv, m, last, drawn[-1][0], jnp.int32(ahead))
            drawn.append(more)
        tokens, probabilities, *drawn_from = zip(*drawn, strict=True)
        bits = jax.lax.bitcast_convert_type(jnp.stack(probabilities, axis=1), jnp.int32)
        out = jnp.stack([jnp.stack(tokens, axis=1), bits])
        if proposed is None:
            return kv, out
        new = Proposed(*[jnp.stack(values, axis=1) for values in drawn_from])

        def put(old: jax.Array, value: jax.Array) -> jax.Array:
            return old.at[m.slot].set(value, mode="drop", unique_indices=True)

        return kv, (out, jax.tree.map(put, proposed, new))

    draft.__name__ = shape.name.replace("[", "_").replace("]", "")
    return draft


class DraftShapes(NamedTuple):
    """The shapes of all executables, smallest first."""

    extend: tuple[DraftShape, ...]
    draft: tuple[DraftShape, ...]


def draft_shapes(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_rows: int,
    max_blocks: int,
    deterministic: bool = False,
    proposes: bool = False,
    platform: str = "cpu",
) -> DraftShapes:
    """Return the shapes for an engine with these limits, which are those of its steps.

    In the deterministic tier every pass has the shape of the engine's step. The target as its own
    draft model then computes the same bits.

    Args:
      proposes: True for verification by rejection.
    """

    def extend(num_tokens: int) -> DraftShape:
        return DraftShape(
            name=f"extend[{num_tokens}]",
            num_tokens=num_tokens,
            num_seqs=min(max_num_seqs, num_tokens),
            max_blocks=max_blocks,
            max_q_len=num_tokens,
        )

    def draft(batch: int) -> DraftShape:
        return DraftShape(
            name=f"draft[{batch}]",
            num_tokens=2 * batch,
            num_seqs=batch,
            max_blocks=max_blocks,
            max_q_len=2,
            later_tokens=batch,
            num_rows=batch,
            proposes=proposes,
        )

    if deterministic:
        step = extend(max_num_batched_tokens)
        whole = replace(
            step,
            name=f"draft[{step.num_seqs}]",
            num_tokens=max(step.num_tokens, 2),
            later_tokens=step.num_tokens,
            num_rows=min(max_rows, step.num_tokens),
            proposes=proposes,
        )
        return DraftShapes((step,), (whole,))
    tokens = [t for t in (64,) if t < max_num_batched_tokens] + [max_num_batched_tokens]
    batches = decode_sizes(max_num_seqs, platform)
    return DraftShapes(tuple(map(extend, tokens)), tuple(map(draft, batches)))
